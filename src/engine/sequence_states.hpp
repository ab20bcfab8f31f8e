#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "engine/kv/state_snapshots.hpp"
#include "engine/sequence.hpp"

namespace prl::engine {

/// Where the states of running sequences lie, of models with linear attention, and which states of prefixes are kept so that others go on
/// from there. A state is that of one position, so a sequence can begin only where a copy was made: behind the last full block of a prompt,
/// at which its row ends for that purpose, and every kStep tokens of what follows, of which each sequence keeps the last one.
/// A step with drafts may leave a state behind tokens that do not count: it works on the sequence's slot, and what the state was before is
/// in a second one, to which the sequence goes back. It then computes the tokens that did count again, with those that come next.
/// Copies are collected in the order in which they are to be made, before the next step that has rows.
class SequenceStates {
 public:
  static constexpr std::int64_t kStep = 64;
  /// Most tokens that a sequence computes again after drafts that failed: a row of more has no drafts.
  static constexpr std::int64_t kMostAgain = 16;
  /// Slots for `num_slots` sequences (num_state_slots()), then for `num_snapshots` copies; 0: none are made.
  SequenceStates(std::int64_t num_slots, std::int64_t num_snapshots, std::int64_t block_size);

  void take_slot(Sequence& sequence);
  void return_slot(Sequence& sequence);
  bool keeps_prefixes() const noexcept { return snapshots_.is_enabled(); }

  /// How many drafts a row of the sequence may have that begins at `first` with `count` tokens.
  std::int64_t room_for_drafts(const Sequence& sequence, std::int64_t first, std::int64_t count) const noexcept;
  /// The sequence's state is copied before a step with drafts. Once in a step.
  void guard(Sequence& sequence);
  /// Some of these drafts failed: the sequence's state is what it was before the step.
  void go_back(Sequence& sequence) noexcept;

  /// A plan begins: what was expected of the one before has been computed.
  void begin_plan() noexcept { expected_.clear(); }
  /// `count` tokens of the sequence from `first` on, or fewer, so that they end where its state is kept.
  std::int64_t cut(const Sequence& sequence, std::int64_t first, std::int64_t count) const noexcept;
  /// The sequence is about to compute the token at `first`: its state is copied if that is a place to keep it. For sequences whose blocks
  /// may be published.
  void keep(Sequence& sequence, std::int64_t first);
  /// The row that was planned ends at `end`, behind the last block that was hashed: others may wait for its state.
  void expect(const Sequence& sequence, std::int64_t end);
  /// Leaves a sequence that PrefixLookup has given blocks those before the last state that is kept; `root` is the hash before them all.
  /// False if a row of this plan leads to a later one: the sequence had better wait for the next plan.
  [[nodiscard]] bool trim(Sequence& sequence, BlockHash root);
  /// The sequence, which has a slot and what trim() left it, begins from that state.
  void restore(const Sequence& sequence);

  /// Moves the copies that were collected to `copies`.
  void list(std::vector<StateCopy>& copies);
  /// Forgets all states of prefixes.
  void clear();
  /// Copies that were listed last may have been made or not: forgets them, too. Running sequences must start over.
  void give_up();
  void check_integrity(std::span<Sequence* const> running) const;

 private:
  /// Whether a state is kept at a position, which is the end of a block.
  bool is_kept_at(const Sequence& sequence, std::int64_t position) const noexcept;
  /// Behind the last full block of the prompt that leaves a token to compute.
  std::int64_t prompt_end(const Sequence& sequence) const noexcept;
  std::optional<BlockHash> hash_at(const Sequence& sequence, std::int64_t position) const;

  std::int64_t block_size_;
  std::int64_t num_slots_;
  std::vector<std::int32_t> free_slots_;  ///< the next one is the last
  StateSnapshots snapshots_;
  std::unordered_set<std::uint64_t> expected_;  ///< hashes of blocks behind which rows of this plan end
  std::vector<StateCopy> copies_;
};

}  // namespace prl::engine
