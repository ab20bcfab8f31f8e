#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::trainer {

/// What the ranks own after a step, in host memory: each keeps its own part and that of the rank before it, so that the run can go on
/// without any one rank. The last step is kept until every rank has the new one. One thread.
///
/// Memory    four times what a rank owns once the second step is kept, in host memory, page-locked for a GPU where the system allows that.
///           Beside it four pieces of at most kPieceBytes on the device.
class PeerSnapshots {
 public:
  /// Of what travels at once.
  static constexpr std::size_t kPieceBytes = std::size_t{32} << 20;
  /// `is_newcomer`: this rank joins a group that goes on, and has nothing until its first commit.
  PeerSnapshots(Policy& policy, bool is_newcomer, std::size_t piece_bytes = kPieceBytes);
  ~PeerSnapshots();

  /// Every rank calls it after the step of `progress`. PeerLost; what was kept is then still there.
  void commit(const TrainProgress& progress, const GradientStep& gradient_step);
  /// Every rank of the group that `gradient_step` has moved to calls it. Masters, optimizer and counters become those of the newest step
  /// that all of them keep but for newcomers, whose progress it returns; nullopt, with nothing touched, if one of them has none yet.
  /// Error{kUnavailable} if a part is nowhere, PeerLost.
  std::optional<TrainProgress> restore(GradientStep& gradient_step);
  std::size_t num_bytes() const noexcept;

 private:
  /// Elements [begin, begin + count) of all masters (no name), or of what the optimizer keeps under a name.
  struct Array {
    std::string name;
    ElementRange range;
    std::size_t num_bytes = 0;
  };
  struct HostMemory {
    std::shared_ptr<void> data;
    std::size_t num_bytes = 0;
    char* bytes() const noexcept { return static_cast<char*>(data.get()); }
  };
  /// What one rank owns: its arrays' bytes one after the other.
  struct Part {
    std::string list;  ///< of the arrays, as text
    HostMemory memory;
  };
  struct Snapshot {
    std::int64_t generation = 0, step = 0;
    std::string progress;       ///< as JSON
    int num_owners = 0;         ///< ranks of the group that made it
    std::map<int, Part> parts;  ///< by owner
  };
  class Passage;
  static std::string text_of(const std::vector<Array>& arrays);
  static std::vector<Array> arrays_of(std::string_view text);

  HostMemory take_memory(std::size_t num_bytes);
  Passage& passage();
  void drop_oldest();
  /// Generation and step of the newest that all have, negative if one has none. A newcomer has whatever was made before it joined, but
  /// nothing of what has been made since until it has it itself.
  std::pair<std::int64_t, std::int64_t> find_common(comm::Communicator& group) const;
  /// An array reaches everyone piece by piece, from `from`, who has its bytes as `mine`; each takes what it owns now.
  void hand_out(const Array& array, const char* mine, int from, GradientStep& gradient_step);

  Policy& policy_;
  bool is_newcomer_ = false;
  std::optional<std::int64_t> joined_;  ///< a newcomer: generation of the group that it came to
  std::size_t piece_bytes_;
  std::unique_ptr<Passage> passage_;
  std::vector<HostMemory> spare_;  ///< of snapshots that are no longer kept
  std::deque<Snapshot> kept_;      ///< oldest first, at most two
};

}  // namespace prl::trainer
