#include "engine/draft_yield.hpp"

#include <algorithm>
#include <cmath>

namespace prl::engine {
namespace {

/// What is taken for the chance where nothing is known, with the weight of so many drafts.
constexpr double kFirstChance = 0.7, kFirstWeight = 8;
/// Drafts that are remembered.
constexpr double kMostTested = 256;
/// Weight of the newest one in what is remembered of steps' times, which are more often too long than too short.
constexpr double kLonger = 0.1, kShorter = 0.3;
/// Of a step that stalls no more counts than so many times what is known, and nothing of the first ones, which record and measure.
constexpr double kMostStall = 2;
constexpr int kNumFirst = 3;
/// What each step without drafts takes off what is known of them, so that they are tried again: after some 1,400 half is left.
constexpr double kForgetting = 0.0005;
/// Drafts must make tokens come faster by so much.
constexpr double kLeastSpeedup = 1.03;

}  // namespace

void DraftYield::Seconds::add(double seconds) noexcept {
  if (++num_added <= kNumFirst) return;
  if (value == 0)
    value = seconds;
  else
    value += (seconds > value ? kLonger : kShorter) * (std::min(seconds, kMostStall * value) - value);
}

void DraftYield::add_outcome(std::int64_t num_tested, std::int64_t num_accepted) {
  num_tested_ += static_cast<double>(num_tested);
  num_accepted_ += static_cast<double>(num_accepted);
  if (num_tested_ <= kMostTested) return;
  num_accepted_ *= kMostTested / num_tested_;
  num_tested_ = kMostTested;
}

double DraftYield::chance() const noexcept { return (kFirstWeight * kFirstChance + num_accepted_) / (kFirstWeight + num_tested_); }

void DraftYield::add_time(const StepPlan& plan, double seconds) {
  std::int64_t num_rows = 0;
  bool is_ahead = true;
  for (const PlanRow& row : plan.rows) {
    if (!row.is_sampled || row.num_tokens != 1 + row.num_drafts) return;  // of prompts
    num_rows += row.num_tokens;
    is_ahead = is_ahead && row.drawn_row >= 0;
  }
  const bool has_drafts = plan.drafting.num_steps > 0;
  const double row_s = std::max(0.0, seconds - plan.drafting.total_s) / (static_cast<double>(num_rows) + base_rows_);
  if (has_drafts) {
    draft_row_.add(row_s);
    draft_step_.add(plan.drafting.step_s);
    return;
  }
  num_tested_ *= 1 - kForgetting;
  num_accepted_ *= 1 - kForgetting;
  if (draft_row_.value > 0) draft_row_.value += kForgetting * (plain_row_.value - draft_row_.value);
  if (!is_ahead && has_ahead_) return;  // behind one with drafts, or with a prompt, which it waited for
  if (is_ahead && !has_ahead_) plain_row_ = {};
  has_ahead_ = has_ahead_ || is_ahead;
  plain_row_.add(row_s);
}

std::int64_t DraftYield::best(std::int64_t num_tokens, std::int64_t num_sequences) const noexcept {
  if (!adapts_ || draft_row_.value <= 0) return most_;  // else nothing is known
  const double row_s = draft_row_.value, plain_row_s = plain_row_.value > 0 ? plain_row_.value : row_s;
  const auto rows = static_cast<double>(num_tokens) + base_rows_;
  const double of_one = this->chance();
  double best_rate = kLeastSpeedup / (plain_row_s * rows), gain = 0, chance = 1;
  std::int64_t best = 0;
  for (std::int64_t count = 1; count <= most_; ++count) {
    chance *= of_one;
    gain += chance;
    const double seconds = row_s * (rows + static_cast<double>(num_sequences * count)) + static_cast<double>(count) * draft_step_.value;
    if (const double rate = (1 + gain) / seconds; rate > best_rate) {
      best_rate = rate;
      best = count;
    }
  }
  return best;
}

}  // namespace prl::engine
