#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/model_runner.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

/// Draws draft tokens with a smaller model of the same vocabulary. A draft is drawn as the token that it guesses will be: with the
/// request's temperature and limits and the same random numbers, so that it comes true far more often than two independent draws agree.
///
/// The model has a cache of its own, whose blocks have the numbers of the engine's: a block holds the same tokens in both. It reads a
/// sequence when it first drafts for it, and then what has come since; what it has read of a block that another sequence finds in the
/// prefix cache need not be read again. One thread, that of the engine.
class DraftModel {
 public:
  /// `runner` computes with the draft model and cannot be reached by others; its cache has `num_blocks` blocks of `block_size` tokens, and
  /// its steps take max_num_batched_tokens tokens, at least as many as sequences run.
  DraftModel(std::unique_ptr<ModelRunner> runner, std::int64_t num_blocks, std::int64_t block_size, std::int64_t max_num_batched_tokens,
             bool is_head = false);
  /// The engine's weights are `model` from now on: a head for multi-token prediction (`is_head`) follows them, another model stays as it
  /// is.
  void change_weights(const nn::Weights& model);
  /// Fills PlanRow::drafts of the rows that have num_drafts, and StepPlan::drafting. No step of the engine's own runner is in flight.
  /// Errors of the runner; what it has read then counts as not read.
  void draw(StepPlan& plan);
  /// Tokens of sequences that the model has read, beside those that it drew.
  [[nodiscard]] std::int64_t num_read_tokens() const noexcept { return num_read_; }

 private:
  /// Finds out how much of the sequence is in the cache, all but its newest token at most.
  void look_up(Sequence& sequence) const;
  /// Reads what is missing until the newest tokens of all rows fit one step.
  void catch_up();
  void draw_all();
  void take(std::int64_t step);
  /// Nothing is known of the blocks that the sequence's row writes.
  void forget_blocks(const PlanRow& row);
  void remember_blocks(Sequence& sequence);

  std::unique_ptr<ModelRunner> runner_;
  std::int64_t block_size_, max_num_batched_tokens_;
  bool is_head_;
  std::vector<BlockHash> read_;  ///< of each block: hash of the tokens up to its end if it was read in full, else 0
  std::int64_t num_read_ = 0;
  std::vector<PlanRow*> rows_;  ///< that want drafts, those that want most first
  std::array<StepPlan, 2> steps_;
  std::array<StepOutput, 2> outputs_;
};

}  // namespace prl::engine
