#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "engine/core.hpp"
#include "engine/model_runner.hpp"

namespace prl::engine::testing {

/// Everything the fake model knows of a prefix.
inline std::uint64_t extend(std::uint64_t state, std::int32_t token) { return mix_seed(state, static_cast<std::uint64_t>(token) + 1); }
inline std::int32_t draw(std::uint64_t state, std::uint64_t seed, std::int64_t index, PolicyVersion version, std::int32_t vocab_size) {
  return static_cast<std::int32_t>(
      mix_seed(state, mix_seed(seed, static_cast<std::uint64_t>(index)), static_cast<std::uint64_t>(version.value)) %
      static_cast<std::uint64_t>(vocab_size));
}

inline nn::WeightsPtr fake_weights(std::int64_t version) {
  auto weights = std::make_shared<nn::Weights>();
  weights->version = PolicyVersion{version};
  return weights;
}

/// A model whose next token is a hash of the whole sequence, read from a cache of one number per slot. A wrong block, a
/// stale prefix or a token that was never computed changes the tokens; what can be checked directly is checked.
class FakeRunner final : public ModelRunner {
 public:
  FakeRunner(std::int64_t num_blocks, std::int64_t block_size, std::int32_t vocab_size, std::int64_t num_host_blocks = 0)
      : block_size_(block_size),
        vocab_size_(vocab_size),
        slots_(static_cast<std::size_t>(num_blocks * block_size)),
        host_slots_(static_cast<std::size_t>(num_host_blocks * block_size)),
        weights_(fake_weights(0)) {}

  /// Computes at once, as a device that works through its queue would; the results are not visible before finish().
  void begin(const StepPlan& plan, StepOutput&) override {
    if (before_run) before_run(plan);
    PRL_CHECK(under_way_.size() < (is_beside_host ? 2u : 1u), "{} steps are in flight", under_way_.size());
    for (const BlockCopy& copy : plan.copies.saves) copy_block(slots_, copy.device, host_slots_, copy.host);
    for (const BlockCopy& copy : plan.copies.restores) copy_block(host_slots_, copy.host, slots_, copy.device);
    StepOutput output;
    output.rows.resize(plan.rows.size());
    std::vector<std::int32_t> drawn;
    for (std::size_t r = 0; r < plan.rows.size(); ++r) {
      const PlanRow& row = plan.rows[r];
      const Sequence& sequence = *row.sequence;
      const auto token_at = [&](std::int64_t position) {
        if (position >= row.known_end()) return row.drafts.at(static_cast<std::size_t>(position - row.known_end()));
        if (position < row.first_token || row.drawn_row < 0) return sequence.tokens.at(static_cast<std::size_t>(position));
        PRL_CHECK(position == sequence.num_tokens() + row.num_unseen && (is_draft_model || !under_way_.empty()),
                  "a token is drawn by a step that is over");
        return drawn_.at(static_cast<std::size_t>(row.drawn_row));
      };
      std::uint64_t state = 0;
      for (std::int64_t position = 0; position < row.first_token; ++position) {
        const Slot& slot = at(sequence, position);
        if (position >= sequence.num_tokens()) {
          state = slot.state;  // of a draft model, which alone knows what it drew there
          continue;
        }
        state = extend(state, token_at(position));
        PRL_CHECK(slot.state == state, "request {} reads position {} of another prefix", sequence.request_id.value, position);
        PRL_CHECK(is_draft_model || slot.epoch >= sequence.kv_epoch, "request {} reads position {} of weights before its admission",
                  sequence.request_id.value, position);
      }
      for (std::int64_t position = row.first_token; position < row.first_token + row.num_tokens; ++position) {
        state = extend(state, token_at(position));
        at(sequence, position) = {state, epoch_};
        if (position + 1 < row.known_end() || !row.is_sampled) continue;
        ops::SampleResult& sample = output.rows[r].samples.emplace_back();
        sample.token = draw(state, sequence.seed, position + 1 - sequence.num_prompt_tokens, weights_->version, vocab_size_);
        sample.logprob = -0.5f;
      }
      StepOutput::Row& out = output.rows[r];
      out.num_good = row.num_samples();
      for (std::int64_t i = 0; i < row.num_prompt_logprobs; ++i)
        out.prompt_logprobs.push_back(static_cast<float>(-(row.prompt_logprob_begin + i + 1)));
      if (fail_row && fail_row(row)) {
        out.error = "made to fail";
        out.num_good = 0;
      }
      for (const ops::SampleResult& sample : out.samples) drawn.push_back(sample.token);
    }
    if (before_begun) before_begun(plan);
    drawn_ = std::move(drawn);
    under_way_.push_back(std::move(output));
    num_runs++;
    num_ahead += plan.rows.front().drawn_row >= 0 ? 1 : 0;
  }
  void finish(const StepPlan& plan, StepOutput& output) override {
    PRL_CHECK(!under_way_.empty() && under_way_.front().rows.size() == plan.rows.size(), "another step is in flight");
    output = std::move(under_way_.front());
    under_way_.pop_front();
    if (before_finish) before_finish(plan);
  }
  bool works_beside_host() const override { return is_beside_host; }
  void set_weights(nn::WeightsPtr weights) override {
    PRL_CHECK(under_way_.empty(), "a step is in flight");
    weights_ = std::move(weights);
    ++epoch_;
  }
  nn::WeightsPtr weights() const override { return weights_; }
  WeightProof prove() override { return {weights_->version, 1000 + static_cast<std::uint64_t>(weights_->version.value), probe_logprobs}; }

  std::function<void(const StepPlan&)> before_run;    ///< may throw
  std::function<void(const StepPlan&)> before_begun;  ///< may throw when the cache has been written to
  std::vector<float> probe_logprobs;
  std::function<bool(const PlanRow&)> fail_row;
  std::function<void(const StepPlan&)> before_finish;  ///< may throw
  std::int64_t num_runs = 0;
  std::int64_t num_ahead = 0;   ///< of num_runs, those begun before the tokens that they start from were known
  bool is_beside_host = false;  ///< plays a device that computes while the host does something else
  bool is_draft_model = false;  ///< draws drafts for another, whose weights may change

 private:
  struct Slot {
    std::uint64_t state = 0;
    std::uint64_t epoch = 0;
  };
  void copy_block(const std::vector<Slot>& from, BlockId from_id, std::vector<Slot>& to, BlockId to_id) const {
    for (std::int64_t i = 0; i < block_size_; ++i)
      to.at(static_cast<std::size_t>(to_id.value * block_size_ + i)) = from.at(static_cast<std::size_t>(from_id.value * block_size_ + i));
  }
  Slot& at(const Sequence& sequence, std::int64_t position) {
    const std::int64_t block = sequence.blocks.at(static_cast<std::size_t>(position / block_size_)).id().value;
    return slots_.at(static_cast<std::size_t>(block * block_size_ + position % block_size_));
  }
  std::int64_t block_size_;
  std::int32_t vocab_size_;
  std::vector<Slot> slots_, host_slots_;
  nn::WeightsPtr weights_;
  std::deque<StepOutput> under_way_;
  std::vector<std::int32_t> drawn_;  ///< by the last step begun
  std::uint64_t epoch_ = 1;          ///< the scheduler counts the first weights too
};

/// What FakeRunner generates for a prompt when nothing interferes.
inline std::vector<std::int32_t> expected_output(const ResolvedRequest& request, std::uint64_t seed, PolicyVersion version,
                                                 std::int32_t vocab_size) {
  std::uint64_t state = 0;
  for (const std::int32_t token : request.prompt_ids) state = extend(state, token);
  std::vector<std::int32_t> output;
  while (static_cast<std::int64_t>(output.size()) < request.max_new_tokens) {
    const std::int32_t token = draw(state, seed, static_cast<std::int64_t>(output.size()), version, vocab_size);
    output.push_back(token);
    const bool may_stop = static_cast<std::int64_t>(output.size()) >= request.sampling.min_tokens;
    if (may_stop && std::find(request.stop_ids.begin(), request.stop_ids.end(), token) != request.stop_ids.end()) break;
    state = extend(state, token);
  }
  return output;
}

/// Gathers the events of one request and holds them to the contract.
struct Collected {
  wire::GenerateOutput output;
  bool is_over = false;

  void on_event(const StepEvent& event) {
    PRL_CHECK(!is_over, "an event after the last one");
    const wire::GenerateOutput& delta = event.delta;
    PRL_CHECK(delta.token_ids.size() == delta.logprobs.size() && delta.token_ids.size() == delta.versions.size(), "lists differ in length");
    output.token_ids.insert(output.token_ids.end(), delta.token_ids.begin(), delta.token_ids.end());
    output.logprobs.insert(output.logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
    output.versions.insert(output.versions.end(), delta.versions.begin(), delta.versions.end());
    output.top_logprobs.insert(output.top_logprobs.end(), delta.top_logprobs.begin(), delta.top_logprobs.end());
    if (delta.finish_reason == wire::FinishReason::kNone) return;
    is_over = true;
    wire::GenerateOutput last = delta;
    last.token_ids = std::move(output.token_ids);
    last.logprobs = std::move(output.logprobs);
    last.versions = std::move(output.versions);
    last.top_logprobs = std::move(output.top_logprobs);
    output = std::move(last);
  }
};

/// The events of one request, from the engine's thread to that of the test.
class Inbox {
 public:
  void push(const StepEvent& event) {
    std::lock_guard lock(mutex_);
    collected_.on_event(event);
    if (collected_.is_over) over_.notify_all();
  }
  const Collected& wait() {
    std::unique_lock lock(mutex_);
    PRL_CHECK(over_.wait_for(lock, std::chrono::seconds(60), [&] { return collected_.is_over; }), "the request never ended");
    return collected_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  Collected collected_;
};

/// An EngineCore over a FakeRunner, and over another one that draws drafts if the options say so.
struct FakeWorld {
  FakeWorld(const CoreOptions& options, std::int32_t vocab_size, bool is_beside_host) {
    std::unique_ptr<DraftModel> drafts;
    if (options.scheduler.drafts.has_model) {
      auto small = std::make_unique<FakeRunner>(options.num_blocks, options.block_size, vocab_size);
      small->is_draft_model = true;
      small->is_beside_host = is_beside_host;
      drafts = std::make_unique<DraftModel>(std::move(small), options.num_blocks, options.block_size,
                                            std::max(options.scheduler.max_num_batched_tokens, options.scheduler.max_num_seqs));
      draft_model = drafts.get();
    }
    auto owned = std::make_unique<FakeRunner>(options.num_blocks, options.block_size, vocab_size, options.num_host_blocks);
    runner = owned.get();
    runner->is_beside_host = is_beside_host;
    core = std::make_unique<EngineCore>(options, std::move(owned), std::move(drafts));
  }
  std::shared_ptr<Collected> add(std::uint64_t id, ResolvedRequest request) {
    auto collected = std::make_shared<Collected>();
    core->add(RequestId{id}, std::move(request), [collected](const StepEvent& event) { collected->on_event(event); });
    return collected;
  }
  void drain(int max_steps = 100000) {
    while (core->step()) {
      core->scheduler().check_integrity();
      ASSERT_GT(max_steps--, 0) << "the engine does not come to an end";
    }
    EXPECT_TRUE(core->is_idle());
  }
  FakeRunner* runner = nullptr;
  DraftModel* draft_model = nullptr;  ///< nullptr: none
  std::unique_ptr<EngineCore> core;
};

}  // namespace prl::engine::testing
