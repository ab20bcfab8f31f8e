#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/draft_planner.hpp"
#include "engine/kv/block_pool.hpp"
#include "engine/kv/host_blocks.hpp"
#include "engine/prefix_lookup.hpp"
#include "engine/sequence.hpp"
#include "engine/sequence_states.hpp"
#include "engine/step_plan.hpp"
#include "engine/waiting_line.hpp"

namespace prl::engine {

struct SchedulerOptions {
  std::int64_t max_num_seqs = 64;
  std::int64_t max_num_batched_tokens = 2048;
  std::int64_t max_adapters = 0;  ///< of the sequences that run, together; 0: any number
  bool enable_prefix_caching = true;
  /// Of a model with linear attention, whose sequences have states: how many copies are kept (SequenceStates). nullopt: of another model.
  std::optional<std::int64_t> num_state_snapshots = std::nullopt;
  bool enable_chunked_prefill = true;  ///< without it a prompt enters in one step; the token budget must allow that
  std::int64_t preempt_period = 0;     ///< preempt the youngest every so many steps, for tests; 0: only when needed
  DraftPlanOptions drafts = {};
  std::function<bool(Sequence&)> may_draw = {};  ///< asked before a step in which the sequence draws a token; none: always
};

struct SchedulerStats {
  std::int64_t num_preemptions = 0;
  std::int64_t num_prefix_query_tokens = 0;
  std::int64_t num_prefix_hit_tokens = 0;
  std::int64_t num_host_hit_tokens = 0;  ///< of them those that were not on the device
  std::int64_t num_disk_hit_tokens = 0;  ///< of these those that were in files alone
};

/// Decides what each step computes. Synchronous and single-threaded; sequences are borrowed and must be removed before
/// they are destroyed.
///
/// Invariants (check_integrity):
///   1. running, and what waits of each tenant, is sorted by is_before;
///   2. a waiting sequence holds no blocks and has computed nothing, so preempting all others always makes room for one;
///   3. a running sequence's blocks cover num_tokens_computed;
///   4. a block shared by two sequences is full, so no sequence writes to it, or what it has already (SequenceStates);
///   5. each running sequence has a slot for its state, which no other has, and with drafts perhaps a second one.
class Scheduler {
 public:
  /// `host`: what the pool saves its blocks to, if there is any; `disk`: the same of `host`.
  Scheduler(const SchedulerOptions& options, BlockPool& pool, HostBlocks* host = nullptr, DiskBlocks* disk = nullptr);

  void add(Sequence& sequence);
  /// Takes the sequence out wherever it is and releases its blocks; its state becomes kFinished. No effect if it is already. Plans still
  /// name it, and a step that has begun may still write to the blocks: later steps that get them run after it.
  void remove(Sequence& sequence);
  /// Sets `plan` to the next step. Running sequences go first, in service order; when blocks run out the last of them is preempted (its
  /// blocks are released and it starts over later, to the same result). Then waiting ones are admitted, as WaitingLine says, as
  /// long as the whole sequence fits; those whose adapters find no room are passed over, a bounded number of times. Empty rows: nothing to
  /// do. Sequences that may not draw yet (SchedulerOptions::may_draw) go no further than the token before. Drafts come last: they take
  /// what is left of the budget, and no block that another sequence may need next.
  void plan(StepPlan& plan);
  /// Sets `plan` to the step after `begun`, which was planned last and draws tokens that are not known yet: its sequences go one token
  /// further, except those that reach their length. Empty if the next step may be any other one, or needs those tokens before it can be
  /// carried out: then wait and call plan(). A sequence that `begun` turns out to end must be removed.
  void plan_ahead(const StepPlan& begun, StepPlan& plan);
  /// The plan was carried out: its tokens are in the cache, but for its drafts. In the order of plans, before the tokens that it drew are
  /// appended. `seconds`: from the end of the step before it on, if that was right before it.
  void commit(const StepPlan& plan, std::optional<double> seconds = {});
  /// The sequence's last `num_tokens` tokens, one at least, are what the row drew: as many drafts less one came true.
  void accept(const PlanRow& row, std::int64_t num_tokens);
  /// New weights: invalidates the prefix cache. Running sequences keep their blocks but publish no more of them.
  void change_weights(PolicyVersion version);
  /// The hash before the first block of sequences with that adapter and salt that begin now.
  BlockHash root_of(const AdapterKey& adapter, std::string_view cache_salt) const noexcept {
    return root_hash({.epoch = epoch_, .version = version_, .adapter = adapter, .cache_salt = cache_salt});
  }
  /// Invalidates the prefix cache, for instance because a step failed and its blocks may hold anything.
  void reset_prefix_cache();
  /// The step of the last plan was not begun, so that its copies may have been carried out or not: running sequences that need them start
  /// over, and nothing can be found that they would have written. Of models with states all start over with the next plan(), as each layer
  /// may have gone on from its state already.
  void give_up_copies();

  /// A share, a limit or a pause from the next step on. Not while a step is in flight. A pause preempts what the tenant runs.
  void set_tenant(const TenantPtr& tenant, const TenantOptions& options);

  std::span<Sequence* const> running() const noexcept { return running_; }
  std::int64_t num_running() const noexcept { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_waiting() const noexcept { return waiting_.size(); }
  /// True if there is one that no pause holds back.
  bool has_work() const noexcept { return !running_.empty() || waiting_.has_ready(); }
  const SchedulerStats& stats() const noexcept { return stats_; }
  const BlockPool& pool() const noexcept { return pool_; }
  void check_integrity() const;

 private:
  [[nodiscard]] bool can_plan_ahead(const StepPlan& begun) const;
  void plan_running(StepPlan& plan, std::int64_t& budget);
  void plan_waiting(StepPlan& plan, std::int64_t& budget);
  /// What PrefixLookup finds, if the sequence may have it. False: more of it can be had in the next plan.
  [[nodiscard]] bool take_prefix(Sequence& sequence);
  /// `count` tokens of the sequence, or one less if that draws a token and it may not yet.
  std::int64_t hold_back(StepPlan& plan, Sequence& sequence, std::int64_t count);
  void preempt(Sequence& victim);
  void add_row(StepPlan& plan, Sequence& sequence, std::int64_t num_tokens);
  /// Publishes the blocks that this step fills, so that rows planned after this one can share them.
  void publish_blocks(Sequence& sequence, std::int64_t num_tokens);

  SchedulerOptions options_;
  BlockPool& pool_;
  HostBlocks* host_;
  DiskBlocks* disk_;
  PrefixLookup prefix_;
  std::vector<Sequence*> running_;
  SequenceStates states_;
  DraftPlanner drafts_;
  WaitingLine waiting_;
  SchedulerStats stats_;
  PolicyVersion version_;
  std::uint64_t epoch_ = 0;
  std::uint64_t num_plans_ = 0;
  bool restarts_ = false;
};

}  // namespace prl::engine
