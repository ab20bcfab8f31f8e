#pragma once

#include <array>
#include <memory>

#include "comm/communicator.hpp"

namespace prl::comm {

/// How the ranks of a run are arranged. From the outermost axis: copies of the whole state (kReplicate), owners of a part of it (kShard),
/// parts of one sequence (kContext), which are neighbours.
enum class Axis : std::uint8_t { kReplicate, kShard, kContext };
inline constexpr int kNumAxes = 3;

struct MeshShape {
  std::array<int, kNumAxes> sizes{1, 1, 1};
  int size(Axis axis) const noexcept { return sizes[static_cast<std::size_t>(axis)]; }
  int num_ranks() const noexcept { return sizes[0] * sizes[1] * sizes[2]; }
  /// rank = (replicate * shard size + shard) * context size + context.
  std::array<int, kNumAxes> coordinates(int rank) const;
  /// Ranks that differ from `rank` along `axis` alone, in order, `rank` among them.
  std::vector<int> line(int rank, Axis axis) const;
};

/// `num_replicas` copies of the state on `num_ranks` ranks; one, with a warning, if that does not go.
MeshShape replicated_shape(int num_ranks, int num_replicas);

/// The ranks of a run and, for each axis, the group of those that differ along it alone. One rank: all groups are local and cost nothing.
class Mesh {
 public:
  /// Every rank of `world` calls it alike. Error{kInvalidArgument} if the sizes do not multiply to the world's.
  Mesh(std::unique_ptr<Communicator> world, MeshShape shape);
  /// All ranks along one axis, kShard.
  explicit Mesh(std::unique_ptr<Communicator> world);
  /// One rank.
  static Mesh of_one(std::shared_ptr<DeviceRuntime> runtime = nullptr) { return Mesh(make_local_communicator(std::move(runtime))); }

  const MeshShape& shape() const noexcept { return shape_; }
  Communicator& world() noexcept { return *world_; }
  /// The world itself along an axis that holds all ranks.
  Communicator& along(Axis axis) noexcept;
  /// Ends all groups for this rank (Communicator::give_up_on); `lost` numbers ranks as the world does.
  void give_up_on(const PeerLost& lost) noexcept;
  /// Ends all groups for this rank (Communicator::abort).
  void abort(std::string_view reason) noexcept;

 private:
  std::unique_ptr<Communicator> world_;
  MeshShape shape_;
  std::array<std::unique_ptr<Communicator>, kNumAxes> groups_;  ///< null: the world
};

}  // namespace prl::comm
