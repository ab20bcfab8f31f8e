#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/draft_source.hpp"
#include "engine/kv/host_blocks.hpp"
#include "engine/kv/state_snapshots.hpp"
#include "engine/sequence.hpp"
#include "ops/lm_head.hpp"

namespace prl::engine {

/// One sequence's part of a step: tokens [first_token, first_token + num_tokens) enter the cache. The last num_drafts of them are guesses,
/// which are not in Sequence::tokens: a token is drawn behind the sequence's newest one and behind each draft, and counts if all drafts
/// before it are what was drawn.
struct PlanRow {
  Sequence* sequence = nullptr;  ///< outlives the step; its state is kFinished if it was removed after the step was planned
  std::int64_t first_token = 0;
  std::int64_t num_tokens = 0;
  std::int32_t state_slot = -1;           ///< the sequence's, as it was planned
  bool is_sampled = false;                ///< the gap closes: draw the next token
  std::int32_t drawn_row = -1;            ///< not -1: its one token is what this row of the step before draws, and not in `tokens` yet
  std::int64_t prompt_logprob_begin = 0;  ///< positions whose prediction of the next prompt token is wanted
  std::int64_t num_prompt_logprobs = 0;
  std::int64_t num_unseen = 0;  ///< tokens between the newest of `tokens` and what drawn_row draws, which earlier steps drew
  std::int64_t num_drafts = 0;  ///< only with is_sampled, and without drawn_row
  DraftTokens drafts = {};      ///< the first num_drafts count

  /// Behind the last token that is no draft.
  std::int64_t known_end() const noexcept { return first_token + num_tokens - num_drafts; }
  /// Index of the first drawn token in the sequence's output.
  std::int64_t output_idx() const noexcept { return known_end() - sequence->num_prompt_tokens; }
  /// Tokens that are drawn.
  std::int64_t num_samples() const noexcept { return is_sampled ? 1 + num_drafts : 0; }
};

/// What drawing the drafts of a step took (DraftModel).
struct DraftingTimes {
  std::int64_t num_steps = 0;  ///< of the draft model, but for those that only read; 0: no model drew drafts
  double step_s = 0;           ///< of one of them
  double total_s = 0;          ///< in all
};

/// What one step does, as the scheduler decided: a value that does not change afterwards. Its blocks are taken already; rows are in service
/// order. A row may read full blocks that another row of the same plan writes, so keys and values of all rows are stored before any is
/// read.
struct StepPlan {
  std::vector<PlanRow> rows;
  BlockCopies copies;                   ///< before any row writes or reads
  std::vector<StateCopy> state_copies;  ///< the same, in this order
  std::int64_t num_tokens = 0;
  std::int64_t num_preempted = 0;
  bool has_held = false;   ///< something was left out because a sequence may not draw yet (SchedulerOptions::may_draw)
  DraftingTimes drafting;  ///< set by who fills in the drafts, before the step begins

  /// Empty, with its memory kept.
  void clear() {
    rows.clear();
    copies.clear();
    state_copies.clear();
    num_tokens = num_preempted = 0;
    has_held = false;
    drafting = {};
  }
};

/// What the runner found, aligned with StepPlan::rows; only the first rows.size() entries count.
struct StepOutput {
  struct Row {
    std::vector<ops::SampleResult> samples;                          ///< PlanRow::num_samples() of them, and perhaps others from before
    std::int64_t num_good = 0;                                       ///< of them those before the first that failed
    std::vector<float> prompt_logprobs;                              ///< num_prompt_logprobs values
    std::vector<std::vector<wire::TopLogprob>> prompt_top_logprobs;  ///< the same count if asked for, best first
    std::vector<std::int32_t> prompt_ranks;                          ///< the same count if asked for
    std::string error;                                               ///< not empty: this row alone failed (non-finite logits), from
                                                                     ///< sample num_good on
  };
  std::vector<Row> rows;
};

}  // namespace prl::engine
