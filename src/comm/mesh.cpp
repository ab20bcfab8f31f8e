#include "comm/mesh.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::comm {

namespace {
constexpr std::array<const char*, kNumAxes> kNames{"replicate", "shard", "context"};
}  // namespace

std::array<int, kNumAxes> MeshShape::coordinates(int rank) const {
  std::array<int, kNumAxes> at{};
  for (int axis = kNumAxes - 1; axis >= 0; --axis) {
    const int n = sizes[static_cast<std::size_t>(axis)];
    at[static_cast<std::size_t>(axis)] = rank % n;
    rank /= n;
  }
  return at;
}

std::vector<int> MeshShape::line(int rank, Axis axis) const {
  int stride = 1;
  for (auto i = static_cast<std::size_t>(axis) + 1; i < kNumAxes; ++i) stride *= sizes[i];
  const int first = rank - coordinates(rank)[static_cast<std::size_t>(axis)] * stride;
  std::vector<int> ranks;
  for (int i = 0; i < size(axis); ++i) ranks.push_back(first + i * stride);
  return ranks;
}

MeshShape replicated_shape(int num_ranks, int num_replicas) {
  if (num_replicas >= 1 && num_ranks % num_replicas == 0) return {{num_replicas, num_ranks / num_replicas, 1}};
  log::warning("{} ranks cannot hold {} copies of the state: they hold one", num_ranks, num_replicas);
  return {{1, num_ranks, 1}};
}

Mesh::Mesh(std::unique_ptr<Communicator> world, MeshShape shape) : world_(std::move(world)), shape_(shape) {
  for (std::size_t i = 0; i < kNumAxes; ++i)
    if (shape_.sizes[i] < 1) fail(ErrorCode::kInvalidArgument, "[mesh] the {} axis has {} ranks", kNames[i], shape_.sizes[i]);
  if (shape_.num_ranks() != world_->size())
    fail(ErrorCode::kInvalidArgument, "[mesh] replicate {} x shard {} x context {} are {} ranks, the run has {}", shape_.sizes[0],
         shape_.sizes[1], shape_.sizes[2], shape_.num_ranks(), world_->size());
  for (std::size_t i = 0; i < kNumAxes; ++i) {
    const std::vector<int> line = shape_.line(world_->rank(), static_cast<Axis>(i));
    if (static_cast<int>(line.size()) == world_->size()) continue;
    groups_[i] = world_->subgroup(line, fmt::format("{}-{}-{}", world_->options().group, kNames[i], line.front()), world_->generation());
  }
}

Mesh::Mesh(std::unique_ptr<Communicator> world) : world_(std::move(world)) {
  shape_.sizes = {1, world_->size(), 1};
  for (const Axis axis : {Axis::kReplicate, Axis::kContext})
    if (world_->size() > 1) groups_[static_cast<std::size_t>(axis)] = make_local_communicator(world_->options().runtime);
}

void Mesh::give_up_on(const PeerLost& lost) noexcept {
  for (std::size_t i = 0; i < kNumAxes; ++i) {
    if (groups_[i] == nullptr) continue;
    const std::vector<int> line = shape_.line(world_->rank(), static_cast<Axis>(i));
    std::vector<int> of_line;
    for (std::size_t r = 0; r < line.size(); ++r)
      if (std::ranges::count(lost.ranks(), line[r]) > 0) of_line.push_back(static_cast<int>(r));
    groups_[i]->give_up_on(PeerLost(of_line, lost.what(), lost.gave_up()));
  }
  world_->give_up_on(lost);
}

void Mesh::abort(std::string_view reason) noexcept {
  world_->abort(reason);
  for (const auto& group : groups_)
    if (group != nullptr) group->abort(reason);
}

Communicator& Mesh::along(Axis axis) noexcept {
  const auto& group = groups_[static_cast<std::size_t>(axis)];
  return group != nullptr ? *group : *world_;
}

}  // namespace prl::comm
