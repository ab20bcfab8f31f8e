#include "engine/draft_cost.hpp"

#include <algorithm>

namespace prl::engine {
namespace {

/// Weight of the newest step in what is remembered of plain ones, and of those with drafts.
constexpr double kPlainShare = 0.1, kDraftShare = 0.3;
/// Of a step that stalls, as the first of a size does, no more counts than this many plain ones.
constexpr double kMostExtra = 3;
/// What is left after each plain step: after some 700 half of it, so that a cost that was too high is tried again.
constexpr double kFading = 0.999;

}  // namespace

void DraftCost::add(const StepPlan& plan, double seconds) {
  std::int64_t num_drafts = 0;
  bool is_ahead = true;
  for (const PlanRow& row : plan.rows) {
    if (!row.is_sampled || row.num_tokens != 1 + row.num_drafts) return;
    num_drafts += row.num_drafts;
    is_ahead = is_ahead && row.drawn_row >= 0;
  }
  if (num_drafts == 0) {
    if (!is_ahead) return;  // behind one with drafts, which it waited for
    plain_s_ = plain_s_ == 0 ? seconds : plain_s_ + kPlainShare * (seconds - plain_s_);
    extra_s_ *= kFading;
  } else if (plain_s_ > 0) {
    const double extra = std::clamp(seconds - plain_s_, 0.0, kMostExtra * plain_s_);
    extra_s_ = extra_s_ == 0 ? extra : extra_s_ + kDraftShare * (extra - extra_s_);
  }
}

}  // namespace prl::engine
