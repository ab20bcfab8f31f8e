#include "engine/draft_planner.hpp"

#include <algorithm>
#include <utility>

#include "base/rng.hpp"
#include "engine/memory.hpp"

namespace prl::engine {
namespace {

/// A draft model reads no more than so many tokens of a sequence for each token that it may still help to draw.
constexpr std::int64_t kMostRead = 16;
/// No draft is worth its row below this chance: the rate of the latest guesses is not known well enough.
constexpr double kLeastChance = 0.25;

/// Of the pictures of a prompt in their order; 0 if there are none. Where they stand, the tokens say.
std::uint64_t hash_of_pictures(std::span<const wire::PromptImage> images) noexcept {
  std::uint64_t hash = 0;
  for (const wire::PromptImage& image : images) hash = mix_seed(mix_seed(hash, image.pixels->hash[0]), image.pixels->hash[1]);
  return hash;
}

}  // namespace

DraftPlanner::DraftPlanner(const DraftPlanOptions& options, std::int64_t max_num_seqs, BlockPool& pool, const SequenceStates* states)
    : options_(options),
      most_rows_(most_drawn_rows(max_num_seqs, options.num_tokens)),
      pool_(pool),
      states_(states),
      source_(options),
      yield_(options.num_tokens, options.base_rows, options.adapts) {}

double DraftPlanner::least_chance(std::int64_t num_tokens) const noexcept {
  const auto rows = static_cast<double>(num_tokens);
  return std::max(kLeastChance, rows / (rows + options_.base_rows));
}

bool DraftPlanner::wants_to_plan(const StepPlan& begun) const {
  if (!source_.is_on()) return false;
  if (options_.has_model) {
    const auto wants = [&](const PlanRow& row) { return row.sequence->state != SequenceState::kFinished && room_of(*row.sequence, 1) > 0; };
    const std::int64_t num_wanted = std::ranges::count_if(begun.rows, wants);
    return num_wanted > 0 && yield_.best(begun.num_tokens, num_wanted) > 0;
  }
  const double chance = least_chance(begun.num_tokens);
  double gain = 0;
  for (const PlanRow& row : begun.rows) {
    const Sequence& sequence = *row.sequence;
    if (sequence.state == SequenceState::kFinished) continue;
    // One token is being drawn, and another will be behind the drafts.
    const std::int64_t limit = sequence.request->max_new_tokens - sequence.num_output_tokens() - 2;
    gain += sequence.draft.hit_rate * source_.expected_gain(sequence.draft, source_.num_useful(sequence.draft, limit, chance, 1));
  }
  return is_worth_it(gain, begun.rows.size());
}

bool DraftPlanner::is_worth_it(double gain, std::size_t num_sequences) const noexcept {
  const double least = options_.least_gain > 0 ? std::max(options_.least_gain, cost_.least_gain()) : 0;
  return gain > 0 && gain >= least * static_cast<double>(num_sequences);
}

void DraftPlanner::plan(StepPlan& plan, std::int64_t budget, std::int64_t num_running) {
  if (!source_.is_on()) return;
  budget = std::min(budget, most_rows_ - static_cast<std::int64_t>(plan.rows.size()));
  if (options_.has_model)
    plan_room(plan, budget, num_running);
  else
    plan_lookups(plan, budget, num_running);
}

std::int64_t DraftPlanner::room_of(const Sequence& sequence, std::int64_t num_unknown) const noexcept {
  const ResolvedRequest& request = *sequence.request;
  if (!request.may_draft || !request.images.empty()) return 0;
  // One token comes behind the drafts.
  const std::int64_t left = std::min(request.max_new_tokens - sequence.num_output_tokens(), options_.most_tokens - sequence.num_tokens());
  if (sequence.num_tokens() - sequence.draft_reading.num_tokens > kMostRead * left) return 0;
  return std::max<std::int64_t>(0, left - num_unknown - 1);
}

void DraftPlanner::plan_room(StepPlan& plan, std::int64_t budget, std::int64_t num_running) {
  // A head reads hidden states, which there are of tokens that the model has computed: not of a prompt that ends in this step.
  const auto has_hidden = [&](const PlanRow& row) {
    return !options_.from_head || row.num_tokens == 1 || row.sequence->draft_reading.admission == row.sequence->num_preemptions;
  };
  const auto wants = [&](const PlanRow& row) { return row.is_sampled && has_hidden(row) && room_of(*row.sequence, 0) > 0; };
  const std::int64_t num_wanted = std::ranges::count_if(plan.rows, wants);
  if (num_wanted == 0 || budget <= 0) return;
  const std::int64_t count = std::min(yield_.best(plan.num_tokens, num_wanted), budget / num_wanted);
  for (PlanRow& row : plan.rows)
    if (count > 0 && wants(row))
      static_cast<void>(try_add(plan, row, within_state(row, std::min(count, room_of(*row.sequence, 0))), num_running));
}

std::int64_t DraftPlanner::within_state(const PlanRow& row, std::int64_t count) const noexcept {
  return states_ == nullptr ? count : std::min(count, states_->room_for_drafts(*row.sequence, row.first_token, row.num_tokens));
}

bool DraftPlanner::try_add(StepPlan& plan, PlanRow& row, std::int64_t count, std::int64_t num_running) {
  if (count == 0) return false;
  Sequence& sequence = *row.sequence;
  const std::int64_t end = row.first_token + row.num_tokens + count;
  // Each sequence may need a block in the next step.
  const std::int64_t num_wanted = pool_.num_blocks_for(end) - static_cast<std::int64_t>(sequence.blocks.size());
  if (num_wanted > 0 && (pool_.num_free() - num_wanted < num_running || !pool_.try_take(num_wanted, sequence.blocks))) return false;
  row.num_drafts = count;
  row.num_tokens += count;
  plan.num_tokens += count;
  return true;
}

void DraftPlanner::plan_lookups(StepPlan& plan, std::int64_t budget, std::int64_t num_running) {
  const double chance = least_chance(plan.num_tokens);
  double gain = 0;
  for (PlanRow& row : plan.rows) {
    if (budget <= 0) break;
    Sequence& sequence = *row.sequence;
    if (!row.is_sampled) continue;
    const std::int64_t limit = std::min(budget, sequence.request->max_new_tokens - sequence.num_output_tokens() - 1);
    row.num_drafts = source_.num_useful(sequence.draft, within_state(row, limit), chance);
    gain += source_.expected_gain(sequence.draft, row.num_drafts);
    budget -= row.num_drafts;
  }
  const bool has_drafts = is_worth_it(gain, plan.rows.size());
  for (PlanRow& row : plan.rows) {
    const std::int64_t count = std::exchange(row.num_drafts, 0);
    if (has_drafts && try_add(plan, row, count, num_running)) source_.propose(row.sequence->draft, count, row.drafts);
  }
}

void DraftPlanner::add_time(const StepPlan& plan, double seconds) {
  if (options_.has_model)
    yield_.add_time(plan, seconds);
  else
    cost_.add(plan, seconds);
}

void DraftPlanner::append(const PlanRow& row, std::int64_t num_tokens) {
  Sequence& sequence = *row.sequence;
  const ResolvedRequest& request = *sequence.request;
  if (!source_.is_on() || !request.may_draft) return;
  const std::span<const std::int32_t> tokens = sequence.tokens;
  if (options_.has_model) {
    // A text that ends leaves drafts untested.
    const auto tested =
        tokens.last(static_cast<std::size_t>(num_tokens)).first(static_cast<std::size_t>(std::min(num_tokens, row.num_drafts)));
    const auto differs = std::ranges::mismatch(tested, row.drafts).in1;
    yield_.add_outcome(std::ssize(tested), differs - tested.begin());
    return;
  }
  if (sequence.draft.group == nullptr && sequence.num_output_tokens() == num_tokens)
    source_.open(sequence.draft, {tokens.first(static_cast<std::size_t>(sequence.num_prompt_tokens)), request.adapter_key().id,
                                  request.cache_salt, hash_of_pictures(request.images)});
  for (const std::int32_t token : tokens.last(static_cast<std::size_t>(num_tokens))) source_.append(sequence.draft, token);
}

}  // namespace prl::engine
