#include "engine/scheduler.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "engine/image_keys.hpp"
#include "engine/memory.hpp"

namespace prl::engine {
namespace {

/// Steps in which a sequence may wait while later ones are admitted: then none is until its adapter has been loaded.
constexpr std::int32_t kMostPassedOver = 256;

template <typename Container>
void insert_sorted(Container& container, Sequence* sequence) {
  container.insert(std::upper_bound(container.begin(), container.end(), sequence, comes_before), sequence);
}

template <typename Container>
void erase_sorted(Container& container, Sequence* sequence) {
  const auto it = std::lower_bound(container.begin(), container.end(), sequence, comes_before);
  PRL_CHECK(it != container.end() && *it == sequence, "sequence {} is not where its state says", sequence->request_id.value);
  container.erase(it);
}

/// Whether blocks of the sequence are computed with the weights and the adapter that the cache is of.
bool is_current(const Sequence& sequence, std::uint64_t epoch) noexcept {
  return sequence.kv_epoch == epoch && sequence.kv_adapter == sequence.request->adapter_key();
}

/// True if the adapters of those that run leave room for the sequence's own.
bool has_adapter_room(const Sequence& sequence, std::span<Sequence* const> running, std::int64_t max_adapters) {
  const ServedAdapter* const wanted = sequence.request->served.get();
  if (wanted == nullptr || max_adapters == 0) return true;
  std::vector<const ServedAdapter*> found;
  for (const Sequence* other : running) {
    const ServedAdapter* const adapter = other->request->served.get();
    if (adapter == wanted) return true;
    if (adapter != nullptr && std::ranges::find(found, adapter) == found.end()) found.push_back(adapter);
  }
  return static_cast<std::int64_t>(found.size()) < max_adapters;
}

/// True if the sequence has blocks for so many tokens now.
[[nodiscard]] bool try_grow(BlockPool& pool, Sequence& sequence, std::int64_t num_tokens) {
  const std::int64_t num_wanted = pool.num_blocks_for(num_tokens) - static_cast<std::int64_t>(sequence.blocks.size());
  return num_wanted <= 0 || pool.try_take(num_wanted, sequence.blocks);
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, BlockPool& pool, HostBlocks* host, DiskBlocks* disk)
    : options_(options),
      pool_(pool),
      host_(host),
      disk_(disk),
      prefix_(pool, host, disk),
      states_(num_state_slots(options.max_num_seqs, options.drafts.num_tokens),
              options.enable_prefix_caching && options.enable_chunked_prefill ? options.num_state_snapshots.value_or(0) : 0,
              pool.block_size()),
      drafts_(options.drafts, options.max_num_seqs, pool, options.num_state_snapshots ? &states_ : nullptr) {
  PRL_CHECK(options.max_num_seqs > 0 && options.max_num_batched_tokens > 0, "scheduler limits must be positive");
  running_.reserve(static_cast<std::size_t>(options.max_num_seqs));
}

void Scheduler::add(Sequence& sequence) {
  PRL_CHECK(pool_.num_blocks_for(sequence.num_tokens()) <= pool_.num_blocks(), "a sequence of {} tokens can never fit {} blocks of {}",
            sequence.num_tokens(), pool_.num_blocks(), pool_.block_size());
  sequence.state = SequenceState::kWaiting;
  waiting_.push(sequence);
}

void Scheduler::remove(Sequence& sequence) {
  if (sequence.state == SequenceState::kFinished) return;
  if (sequence.state == SequenceState::kRunning) {
    erase_sorted(running_, &sequence);
    states_.return_slot(sequence);
    waiting_.leave_batch(sequence, /*has_ended=*/true);
  } else {
    waiting_.erase(sequence);
  }
  drop_blocks(sequence);
  drafts_.close(sequence);
  sequence.state = SequenceState::kFinished;
}

void Scheduler::plan(StepPlan& plan) {
  plan.clear();
  plan.rows.reserve(static_cast<std::size_t>(options_.max_num_seqs));
  ++num_plans_;
  if (std::exchange(restarts_, false))
    while (!running_.empty()) preempt(*running_.back());
  states_.begin_plan();
  if (options_.preempt_period > 0 && num_plans_ % static_cast<std::uint64_t>(options_.preempt_period) == 0 && running_.size() > 1) {
    preempt(*running_.back());
    ++plan.num_preempted;
  }
  std::int64_t budget = options_.max_num_batched_tokens;
  plan_running(plan, budget);
  // Blocks are short when a sequence was preempted: an admission now would only be undone.
  if (plan.num_preempted == 0) plan_waiting(plan, budget);
  if (plan.num_preempted == 0) drafts_.plan(plan, budget, num_running());
  if (options_.num_state_snapshots)
    for (const PlanRow& row : plan.rows)
      if (row.num_drafts > 0) states_.guard(*row.sequence);
  if (!plan.rows.empty()) states_.list(plan.state_copies);
  if (host_ != nullptr) host_->list(plan.copies);
}

bool Scheduler::can_plan_ahead(const StepPlan& begun) const {
  if (options_.preempt_period > 0 || restarts_) return false;
  // Whoever waits could come in, unless all places are taken.
  if (waiting_.has_ready() && num_running() < options_.max_num_seqs) return false;
  std::int64_t num_going_on = 0;
  for (const PlanRow& row : begun.rows) {
    if (!row.is_sampled || row.num_drafts > 0) return false;
    if (row.sequence->state == SequenceState::kFinished) continue;
    const ResolvedRequest& request = *row.sequence->request;
    // Who decides what may come next, or whether the text ends here, is asked after each token.
    if (request.needs_every_token || request.sampling.token_rule || !request.sampling.stop.empty()) return false;
    ++num_going_on;
  }
  return num_going_on == num_running() && !drafts_.wants_to_plan(begun);
}

void Scheduler::plan_ahead(const StepPlan& begun, StepPlan& plan) {
  plan.clear();
  if (!can_plan_ahead(begun)) return;
  PRL_CHECK(host_ == nullptr || !host_->has_restores(), "a block is restored by no step that was begun");
  plan.rows.reserve(static_cast<std::size_t>(options_.max_num_seqs));
  for (std::size_t i = 0; i < begun.rows.size(); ++i) {
    const PlanRow& before = begun.rows[i];
    if (before.sequence->state == SequenceState::kFinished) continue;
    const bool ends = before.output_idx() + 1 >= before.sequence->request->max_new_tokens;
    PlanRow row;
    row.sequence = before.sequence;
    row.first_token = before.first_token + before.num_tokens;
    row.num_tokens = 1;
    row.state_slot = row.sequence->state_slot;
    row.is_sampled = true;
    row.drawn_row = static_cast<std::int32_t>(i);
    // Blocks that were taken stay with their sequences, which need them next in any case.
    const bool has_room = !ends && try_grow(pool_, *row.sequence, row.first_token + 1);
    if (has_room) {
      plan.rows.push_back(row);
    } else if (!ends || waiting_.has_ready()) {
      plan.rows.clear();
      break;
    }
  }
  plan.num_tokens = static_cast<std::int64_t>(plan.rows.size());
  states_.begin_plan();
  for (const PlanRow& row : plan.rows)
    if (is_current(*row.sequence, epoch_)) states_.keep(*row.sequence, row.first_token);
  if (!plan.rows.empty()) states_.list(plan.state_copies);
  if (host_ != nullptr) host_->list(plan.copies);
}

void Scheduler::plan_running(StepPlan& plan, std::int64_t& budget) {
  std::size_t i = 0;
  while (i < running_.size() && budget > 0) {
    Sequence& sequence = *running_[i];
    const std::int64_t left = std::min(sequence.num_tokens() - sequence.num_tokens_computed, budget);
    const std::int64_t count = states_.cut(sequence, sequence.num_tokens_computed, left);
    if (!try_grow(pool_, sequence, sequence.num_tokens_computed + count)) {
      preempt(*running_.back());  // perhaps `sequence` itself; then i is past the end
      ++plan.num_preempted;
      continue;
    }
    if (const std::int64_t num_now = hold_back(plan, sequence, count); num_now > 0) {
      add_row(plan, sequence, num_now);
      budget -= num_now;
    }
    ++i;
  }
}

void Scheduler::plan_waiting(StepPlan& plan, std::int64_t& budget) {
  // Blocks that running sequences still need for the tokens they have. Counting them keeps half-computed prompts from
  // taking each other's room.
  std::int64_t num_reserved = 0;
  for (const Sequence* sequence : running_)
    num_reserved +=
        std::max<std::int64_t>(0, pool_.num_blocks_for(sequence->num_tokens()) - static_cast<std::int64_t>(sequence->blocks.size()));
  // A little room to grow for those that run, so that an admission is not undone by the next few tokens.
  const std::int64_t num_spare = pool_.num_blocks() / 100;

  waiting_.begin_round();
  while (num_running() < options_.max_num_seqs && budget > 0) {
    Sequence* const chosen = waiting_.candidate();
    if (chosen == nullptr) return;
    Sequence& sequence = *chosen;
    if (!has_adapter_room(sequence, running_, options_.max_adapters)) {
      if (++sequence.num_passed_over > kMostPassedOver) return;
      waiting_.pass_over();
      continue;
    }
    sequence.kv_epoch = epoch_;
    if (!take_prefix(sequence)) {
      prefix_.drop(sequence);
      return;
    }
    const std::int64_t num_held = static_cast<std::int64_t>(sequence.blocks.size()) - prefix_.num_in_host();
    const std::int64_t num_missing = pool_.num_blocks_for(sequence.num_tokens()) - num_held;
    const std::int64_t num_left = sequence.num_tokens() - sequence.num_tokens_computed;
    const bool has_room = num_missing + num_reserved + (running_.empty() ? 0 : num_spare) <= pool_.num_free();
    if (!has_room || (!options_.enable_chunked_prefill && num_left > budget)) {
      prefix_.drop(sequence);
      return;
    }
    const std::int64_t count = states_.cut(sequence, sequence.num_tokens_computed, std::min(num_left, budget));
    waiting_.admit();
    const std::int64_t num_from_host = prefix_.num_in_host() * pool_.block_size();
    const std::int64_t num_from_disk = prefix_.num_from_disk() * pool_.block_size();
    prefix_.restore(sequence);
    PRL_CHECK(try_grow(pool_, sequence, sequence.num_tokens_computed + count), "no room for an admitted sequence");
    num_reserved += pool_.num_blocks_for(sequence.num_tokens()) - static_cast<std::int64_t>(sequence.blocks.size());
    sequence.state = SequenceState::kRunning;
    states_.take_slot(sequence);
    if (options_.num_state_snapshots) states_.restore(sequence);
    insert_sorted(running_, &sequence);
    if (sequence.num_cached_tokens < 0) {
      sequence.num_cached_tokens = sequence.num_tokens_computed;
      stats_.num_prefix_query_tokens += sequence.num_tokens();
      stats_.num_prefix_hit_tokens += sequence.num_tokens_computed;
      stats_.num_host_hit_tokens += num_from_host;
      stats_.num_disk_hit_tokens += num_from_disk;
    }
    if (const std::int64_t num_now = hold_back(plan, sequence, count); num_now > 0) {
      add_row(plan, sequence, num_now);
      budget -= num_now;
    }
  }
}

std::int64_t Scheduler::hold_back(StepPlan& plan, Sequence& sequence, std::int64_t count) {
  const bool draws = sequence.num_tokens_computed + count == sequence.num_tokens();
  if (!draws || !options_.may_draw || options_.may_draw(sequence)) return count;
  plan.has_held = true;
  return count - 1;
}

bool Scheduler::take_prefix(Sequence& sequence) {
  const ResolvedRequest& request = *sequence.request;
  sequence.kv_adapter = request.adapter_key();
  const BlockHash root = root_of(sequence.kv_adapter, request.cache_salt);
  sequence.last_hash = root;
  sequence.num_hashed_blocks = 0;
  // Prompt log-probabilities come from computing every prompt token.
  if (!options_.enable_prefix_caching || sequence.wants_prompt_logprobs()) return true;
  prefix_.take(sequence);
  return !options_.num_state_snapshots || states_.trim(sequence, root);
}

void Scheduler::preempt(Sequence& victim) {
  erase_sorted(running_, &victim);
  states_.return_slot(victim);
  waiting_.leave_batch(victim, /*has_ended=*/false);
  drop_blocks(victim);
  victim.state = SequenceState::kWaiting;
  ++victim.num_preemptions;
  ++stats_.num_preemptions;
  waiting_.push(victim);
}

void Scheduler::set_tenant(const TenantPtr& tenant, const TenantOptions& options) {
  waiting_.set_options(*tenant, options);
  if (options.state != TenantState::kPaused) return;
  const std::vector<Sequence*> running = running_;
  for (Sequence* sequence : running)
    if (sequence->tenant == tenant) preempt(*sequence);
}

void Scheduler::add_row(StepPlan& plan, Sequence& sequence, std::int64_t num_tokens) {
  PlanRow row;
  row.sequence = &sequence;
  row.first_token = sequence.num_tokens_computed;
  row.num_tokens = num_tokens;
  row.state_slot = sequence.state_slot;
  const std::int64_t end = row.first_token + num_tokens;
  row.is_sampled = end == sequence.num_tokens();
  if (sequence.wants_prompt_logprobs()) {
    // Position p predicts token p + 1. Entry 0 has no prediction; a restart skips what is known already.
    const auto num_known = std::max<std::int64_t>(1, static_cast<std::int64_t>(sequence.prompt_logprobs.size()));
    row.prompt_logprob_begin = std::max(row.first_token, num_known - 1);
    row.num_prompt_logprobs = std::max<std::int64_t>(0, std::min(end, sequence.num_prompt_tokens - 1) - row.prompt_logprob_begin);
  }
  plan.rows.push_back(row);
  plan.num_tokens += num_tokens;
  if (is_current(sequence, epoch_)) states_.keep(sequence, row.first_token);
  publish_blocks(sequence, end);
  states_.expect(sequence, end);
}

void Scheduler::publish_blocks(Sequence& sequence, std::int64_t num_tokens) {
  // A block depends on all tokens before it through the layers below, so one old block taints the rest of its sequence.
  if (!options_.enable_prefix_caching || !is_current(sequence, epoch_)) return;
  const auto block_size = static_cast<std::size_t>(pool_.block_size());
  const std::int64_t num_full = num_tokens / pool_.block_size();
  while (sequence.num_hashed_blocks < num_full) {
    const auto index = static_cast<std::size_t>(sequence.num_hashed_blocks);
    const auto tokens = std::span<const std::int32_t>(sequence.tokens).subspan(index * block_size, block_size);
    const BlockHash link = link_of_block(sequence, sequence.last_hash, sequence.num_hashed_blocks * pool_.block_size(), pool_.block_size());
    const BlockHash hash = chain_hash(link, tokens);
    pool_.publish(sequence.blocks[index], hash, link, tokens);
    sequence.last_hash = hash;
    ++sequence.num_hashed_blocks;
  }
}

void Scheduler::commit(const StepPlan& plan, std::optional<double> seconds) {
  if (seconds) drafts_.add_time(plan, *seconds);
  for (const PlanRow& row : plan.rows) {
    if (row.sequence->state == SequenceState::kFinished) continue;
    row.sequence->num_tokens_computed = row.known_end();
    row.sequence->tenant->num_tokens += row.num_tokens - row.num_drafts;
    row.sequence->tenant->num_generation_tokens += row.is_sampled ? 1 : 0;
    // Blocks of a plan made ahead could not be published before their tokens were known.
    if (row.drawn_row >= 0) publish_blocks(*row.sequence, row.sequence->num_tokens_computed);
  }
}

void Scheduler::accept(const PlanRow& row, std::int64_t num_tokens) {
  Sequence& sequence = *row.sequence;
  PRL_CHECK(1 <= num_tokens && num_tokens <= row.num_samples(), "{} tokens of a row that draws {}", num_tokens, row.num_samples());
  if (row.num_drafts > 0 && options_.num_state_snapshots && num_tokens < row.num_samples()) {
    states_.go_back(sequence);
    sequence.num_tokens_computed = row.first_token;
    sequence.tenant->num_generation_tokens += num_tokens - 1;
  } else if (row.num_drafts > 0) {
    sequence.num_tokens_computed += num_tokens - 1;
    sequence.tenant->num_tokens += num_tokens - 1;
    sequence.tenant->num_generation_tokens += num_tokens - 1;
    publish_blocks(sequence, sequence.num_tokens_computed);
  }
  if (row.num_drafts > 0) {
    // What drafts that failed needed may be another's next.
    const auto num_needed = static_cast<std::size_t>(pool_.num_blocks_for(sequence.num_tokens()));
    while (sequence.blocks.size() > num_needed) sequence.blocks.pop_back();
  }
  drafts_.append(row, num_tokens);
}

void Scheduler::change_weights(PolicyVersion version) {
  version_ = version;
  ++epoch_;
  reset_prefix_cache();
}

void Scheduler::reset_prefix_cache() {
  pool_.reset_cache();
  states_.clear();
  if (host_ != nullptr) host_->reset_cache();
  if (disk_ != nullptr) disk_->reset_cache();
}

void Scheduler::give_up_copies() {
  states_.give_up();
  restarts_ = options_.num_state_snapshots.has_value();
  if (host_ == nullptr) return;
  if (host_->has_restores()) {
    // Blocks to be restored have been published: others may have found them since.
    reset_prefix_cache();
    const std::vector<Sequence*> running = running_;
    for (Sequence* sequence : running)
      if (std::ranges::any_of(sequence->blocks, [&](const BlockLease& lease) { return host_->is_restoring(lease.id()); }))
        preempt(*sequence);
  }
  host_->give_up();
}

void Scheduler::check_integrity() const {
  pool_.check_integrity();
  if (host_ != nullptr) host_->check_integrity();
  if (disk_ != nullptr) disk_->check_integrity();
  waiting_.check_integrity();
  PRL_CHECK(std::is_sorted(running_.begin(), running_.end(), comes_before), "running sequences are out of order");
  PRL_CHECK(num_running() <= options_.max_num_seqs, "{} sequences run, limit {}", num_running(), options_.max_num_seqs);
  waiting_.for_each([](const Sequence& sequence) {
    PRL_CHECK(sequence.state == SequenceState::kWaiting && sequence.blocks.empty() && sequence.num_tokens_computed == 0,
              "waiting sequence {} holds {} blocks", sequence.request_id.value, sequence.blocks.size());
  });
  states_.check_integrity(running_);
  std::vector<std::int32_t> num_refs(static_cast<std::size_t>(pool_.num_blocks()), 0);
  for (const Sequence* sequence : running_) {
    PRL_CHECK(sequence->state == SequenceState::kRunning, "sequence {} runs and says it does not", sequence->request_id.value);
    PRL_CHECK(pool_.num_blocks_for(sequence->num_tokens_computed) <= static_cast<std::int64_t>(sequence->blocks.size()),
              "sequence {} computed {} tokens in {} blocks", sequence->request_id.value, sequence->num_tokens_computed,
              sequence->blocks.size());
    PRL_CHECK(sequence->num_tokens_computed < sequence->num_tokens(), "sequence {} has nothing left to compute",
              sequence->request_id.value);
    for (std::size_t i = 0; i < sequence->blocks.size(); ++i) {
      const BlockId id = sequence->blocks[i].id();
      ++num_refs[static_cast<std::size_t>(id.value)];
      // A sequence whose state went back writes what a published block has once more.
      const bool is_full = static_cast<std::int64_t>(i + 1) * pool_.block_size() <=
                           std::max(sequence->num_tokens_computed, sequence->num_hashed_blocks * pool_.block_size());
      PRL_CHECK(is_full || pool_.ref_count(id) == 1, "block {} is shared and still written to", id.value);
    }
  }
  for (std::size_t i = 0; i < num_refs.size(); ++i) {
    const BlockId id{static_cast<std::int32_t>(i)};
    PRL_CHECK(num_refs[i] == pool_.ref_count(id), "block {} has {} references, sequences hold {}", i, pool_.ref_count(id), num_refs[i]);
  }
}

}  // namespace prl::engine
