#include "engine/draft_model.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {
namespace {

using DraftClock = std::chrono::steady_clock;

std::span<const std::int32_t> tokens_of_block(const Sequence& sequence, std::int64_t block, std::int64_t block_size) {
  return std::span(sequence.tokens).subspan(static_cast<std::size_t>(block * block_size), static_cast<std::size_t>(block_size));
}

PlanRow row_of(Sequence& sequence, std::int64_t first_token, std::int64_t num_tokens) {
  PlanRow row;
  row.sequence = &sequence;
  row.first_token = first_token;
  row.num_tokens = num_tokens;
  return row;
}

}  // namespace

DraftModel::DraftModel(std::unique_ptr<ModelRunner> runner, std::int64_t num_blocks, std::int64_t block_size,
                       std::int64_t max_num_batched_tokens, bool is_head)
    : runner_(std::move(runner)),
      block_size_(block_size),
      max_num_batched_tokens_(max_num_batched_tokens),
      is_head_(is_head),
      read_(static_cast<std::size_t>(num_blocks)) {}

void DraftModel::change_weights(const nn::Weights& model) {
  if (!is_head_) return;
  runner_->set_weights(model.mtp);
  // What other sequences left in blocks is of the former hidden states.
  std::ranges::fill(read_, BlockHash{});
}

void DraftModel::draw(StepPlan& plan) {
  rows_.clear();
  plan.drafting = {};
  for (PlanRow& row : plan.rows)
    if (row.num_drafts > 0) rows_.push_back(&row);
  if (rows_.empty()) return;
  std::ranges::stable_sort(rows_, std::ranges::greater{}, &PlanRow::num_drafts);
  const auto begin = DraftClock::now();
  for (const PlanRow* row : rows_) {
    look_up(*row->sequence);
    forget_blocks(*row);
  }
  try {
    catch_up();
    const auto first = DraftClock::now();
    draw_all();
    const auto end = DraftClock::now();
    plan.drafting = {.num_steps = rows_.front()->num_drafts,
                     .step_s = std::chrono::duration<double>(end - first).count() / static_cast<double>(rows_.front()->num_drafts),
                     .total_s = std::chrono::duration<double>(end - begin).count()};
  } catch (...) {
    for (const PlanRow* row : rows_) row->sequence->draft_reading = {};
    throw;
  }
  for (const PlanRow* row : rows_) {
    DraftReading& reading = row->sequence->draft_reading;
    reading.num_tokens = row->sequence->num_tokens();
    // What a head read behind its first draft was with hidden states that it guessed too, in place of which there will be the model's.
    reading.num_guesses = is_head_ ? 0 : row->num_drafts - 1;
    reading.guesses = row->drafts;
    remember_blocks(*row->sequence);
  }
}

void DraftModel::look_up(Sequence& sequence) const {
  DraftReading& reading = sequence.draft_reading;
  if (reading.admission != sequence.num_preemptions) {  // its blocks are others
    reading = {.admission = sequence.num_preemptions};
    for (std::int64_t block = 0; (block + 1) * block_size_ < sequence.num_tokens(); ++block) {
      const BlockHash hash = chain_hash(reading.hash, tokens_of_block(sequence, block, block_size_));
      if (read_[static_cast<std::size_t>(sequence.blocks[static_cast<std::size_t>(block)].id().value)] != hash) break;
      reading.hash = hash;
      reading.num_blocks = block + 1;
    }
    reading.num_tokens = reading.num_blocks * block_size_;
    return;
  }
  // Drafts that were read and came true.
  for (std::int64_t i = 0; i < reading.num_guesses && reading.num_tokens + 1 < sequence.num_tokens(); ++i, ++reading.num_tokens)
    if (sequence.tokens[static_cast<std::size_t>(reading.num_tokens)] != reading.guesses[static_cast<std::size_t>(i)]) break;
  reading.num_guesses = 0;
}

void DraftModel::forget_blocks(const PlanRow& row) {
  const Sequence& sequence = *row.sequence;
  const std::int64_t end = sequence.num_tokens() + row.num_drafts - 1;
  for (std::int64_t block = sequence.draft_reading.num_tokens / block_size_; block * block_size_ < end; ++block)
    read_[static_cast<std::size_t>(sequence.blocks[static_cast<std::size_t>(block)].id().value)] = {};
}

void DraftModel::remember_blocks(Sequence& sequence) {
  DraftReading& reading = sequence.draft_reading;
  for (; (reading.num_blocks + 1) * block_size_ <= reading.num_tokens; ++reading.num_blocks) {
    reading.hash = chain_hash(reading.hash, tokens_of_block(sequence, reading.num_blocks, block_size_));
    read_[static_cast<std::size_t>(sequence.blocks[static_cast<std::size_t>(reading.num_blocks)].id().value)] = reading.hash;
  }
}

void DraftModel::catch_up() {
  const auto num_missing = [](const PlanRow* row) { return row->sequence->num_tokens() - row->sequence->draft_reading.num_tokens; };
  while (true) {
    std::int64_t num_left = 0;
    for (const PlanRow* row : rows_) num_left += num_missing(row);
    if (num_left <= max_num_batched_tokens_) return;
    StepPlan& step = steps_[0];
    step.clear();
    for (const PlanRow* row : rows_) {
      const std::int64_t count = std::min(num_missing(row) - 1, max_num_batched_tokens_ - step.num_tokens);
      if (count == 0) continue;
      step.rows.push_back(row_of(*row->sequence, row->sequence->draft_reading.num_tokens, count));
      step.num_tokens += count;
      row->sequence->draft_reading.num_tokens += count;
    }
    PRL_CHECK(!step.rows.empty(), "{} sequences draw drafts, in steps of at most {} tokens", rows_.size(), max_num_batched_tokens_);
    num_read_ += step.num_tokens;
    runner_->begin(step, outputs_[0]);
    runner_->finish(step, outputs_[0]);
  }
}

void DraftModel::draw_all() {
  const std::int64_t num_steps = rows_.front()->num_drafts;
  for (std::int64_t i = 0; i < num_steps; ++i) {
    StepPlan& step = steps_[static_cast<std::size_t>(i % 2)];
    step.clear();
    for (const PlanRow* wanted : rows_) {
      // Those that want fewer come later, so a row's place is the same in each step.
      if (wanted->num_drafts <= i) break;
      Sequence& sequence = *wanted->sequence;
      const std::int64_t end = sequence.num_tokens();
      PlanRow row = i == 0 ? row_of(sequence, sequence.draft_reading.num_tokens, end - sequence.draft_reading.num_tokens)
                           : row_of(sequence, end + i - 1, 1);
      row.is_sampled = true;
      if (i > 0) {
        row.drawn_row = static_cast<std::int32_t>(step.rows.size());
        row.num_unseen = i - 1;
      }
      step.num_tokens += row.num_tokens;
      step.rows.push_back(row);
    }
    if (i == 0) num_read_ += step.num_tokens;
    // The next step is enqueued before this one's tokens reach the host, on devices that work beside it.
    if (i > 0 && !runner_->works_beside_host()) take(i - 1);
    runner_->begin(step, outputs_[static_cast<std::size_t>(i % 2)]);
    if (i > 0 && runner_->works_beside_host()) take(i - 1);
  }
  take(num_steps - 1);
}

void DraftModel::take(std::int64_t step) {
  const auto turn = static_cast<std::size_t>(step % 2);
  runner_->finish(steps_[turn], outputs_[turn]);
  for (std::size_t r = 0; r < steps_[turn].rows.size(); ++r) {
    const StepOutput::Row& drawn = outputs_[turn].rows[r];
    // What the draft model cannot say is a guess as bad as any.
    rows_[r]->drafts[static_cast<std::size_t>(step)] = drawn.num_good > 0 ? drawn.samples.front().token : 0;
  }
}

}  // namespace prl::engine
