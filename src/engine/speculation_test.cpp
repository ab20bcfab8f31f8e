// Speculative decoding changes no bit of what a request gets, whatever is guessed: over a fake model every way of scheduling, over real
// ones every way of sampling.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "base/rng.hpp"
#include "engine/core.hpp"
#include "engine/paged_runner.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {
using testing::Collected;
using testing::expected_output;
using testing::fake_weights;
using testing::FakeRunner;
using wire::FinishReason;

/// Of so few tokens that guesses often come true and often do not.
constexpr std::int32_t kFewTokens = 2;

struct SmallWorld : testing::FakeWorld {
  explicit SmallWorld(const CoreOptions& options, bool is_beside_host = false) : FakeWorld(options, kFewTokens, is_beside_host) {}
};

CoreOptions with_drafts(std::int64_t num_tokens) {
  CoreOptions options;
  options.num_blocks = 64;
  options.block_size = 4;
  options.scheduler.drafts.num_tokens = num_tokens;
  options.scheduler.drafts.min_ngram = 1;
  return options;
}

ResolvedRequest few_tokens(std::vector<std::int32_t> prompt, std::int64_t max_new_tokens, std::uint64_t seed) {
  ResolvedRequest request;
  request.prompt_ids = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  request.seed = seed;
  return request;
}

TEST(Speculation, ARequestThatWasMadeBeforeIsFollowedToItsEnd) {
  CoreOptions options = with_drafts(8);
  options.scheduler.drafts.max_ngram = 12;
  SmallWorld world(options);
  const auto request = few_tokens({0, 1, 1}, 60, 1);
  const auto first = world.add(1, request);
  world.drain();
  const std::int64_t num_runs = world.runner->num_runs;
  const auto second = world.add(2, request);
  world.drain();
  const auto wanted = expected_output(request, 1, PolicyVersion{0}, kFewTokens);
  EXPECT_EQ(first->output.token_ids, wanted);
  EXPECT_EQ(second->output.token_ids, wanted);
  EXPECT_LT(world.runner->num_runs - num_runs, 25) << "steps for 60 tokens";
  const EngineStats stats = world.core->stats();
  EXPECT_EQ(stats.num_generation_tokens, 120);
  EXPECT_EQ(stats.num_prompt_tokens, 3 + 3);
  EXPECT_EQ(world.runner->num_runs + stats.num_accepted_tokens, 120) << "each step draws one token beside those that were guessed";
  EXPECT_LE(stats.num_accepted_tokens, stats.num_draft_tokens);
  EXPECT_GE(stats.num_draft_tokens, stats.num_drafts);
  EXPECT_EQ(stats.num_blocks_used, 0);
}

/// Arrivals, ends, cancels, new weights, blocks that are short, and all of it again without guesses.
TEST(Speculation, WhateverHappensTheTokensAreThoseOfEachRequestAlone) {
  std::int64_t num_accepted = 0, num_refused = 0, num_preemptions = 0, num_ahead = 0, num_hits = 0, num_of_model = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    CoreOptions options = with_drafts(1 + static_cast<std::int64_t>(rng.next_below(8)));
    options.block_size = 1 + static_cast<std::int64_t>(rng.next_below(4));
    options.num_blocks = (40 + static_cast<std::int64_t>(rng.next_below(60))) / options.block_size + 1;
    options.scheduler.max_num_seqs = 1 + static_cast<std::int64_t>(rng.next_below(6));
    options.scheduler.max_num_batched_tokens = 1 + static_cast<std::int64_t>(rng.next_below(20));
    if (seed % 3 == 0) options.scheduler.preempt_period = 2 + static_cast<std::int64_t>(rng.next_below(5));
    options.scheduler.drafts.from_completions = seed % 4 != 1;
    options.scheduler.drafts.max_stored_tokens = seed % 5 == 0 ? 50 : 100000;
    options.num_host_blocks = seed % 7 == 0 ? 20 : 0;
    options.scheduler.drafts.has_model = seed % 3 == 1;
    options.scheduler.drafts.most_tokens = 25;
    SmallWorld world(options, /*is_beside_host=*/seed % 2 == 1);
    std::vector<ResolvedRequest> requests;
    std::vector<std::shared_ptr<Collected>> got;
    std::set<std::size_t> cancelled;
    for (int round = 0; round < 200; ++round) {
      if (rng.next_below(3) == 0 && requests.size() < 30) {
        std::vector<std::int32_t> prompt(1 + rng.next_below(3), static_cast<std::int32_t>(rng.next_below(2)));
        auto request = few_tokens(std::move(prompt), 1 + static_cast<std::int64_t>(rng.next_below(30)), rng.next_below(3));
        if (rng.next_below(3) == 0) {
          request.stop_ids = {1};
          request.sampling.min_tokens = static_cast<std::int32_t>(rng.next_below(10));
        }
        if (rng.next_below(6) == 0) request.may_draft = false;
        requests.push_back(request);
        got.push_back(world.add(requests.size(), request));
      }
      if (rng.next_below(40) == 0 && !requests.empty()) {
        const std::size_t which = rng.next_below(requests.size());
        cancelled.insert(which);
        world.core->cancel(RequestId{which + 1});
      }
      if (rng.next_below(30) == 0) world.core->scheduler().reset_prefix_cache();
      world.core->step();
      world.core->scheduler().check_integrity();
    }
    world.drain();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      auto wanted = expected_output(requests[i], requests[i].seed, PolicyVersion{0}, kFewTokens);
      if (cancelled.contains(i) && got[i]->output.finish_reason == FinishReason::kAbort) wanted.resize(got[i]->output.token_ids.size());
      EXPECT_EQ(got[i]->output.token_ids, wanted) << i;
      EXPECT_EQ(got[i]->output.finish_reason == FinishReason::kStop, got[i]->output.stop_token_id == 1) << i;
    }
    const EngineStats stats = world.core->stats();
    EXPECT_EQ(stats.num_blocks_used, 0);
    if (options.scheduler.drafts.has_model) {
      num_of_model += stats.num_accepted_tokens;
      // It is the same hash: what is left are drafts behind the end of a text.
      EXPECT_LE(stats.num_draft_tokens - stats.num_accepted_tokens, stats.num_finished_stop * options.scheduler.drafts.num_tokens);
    }
    num_accepted += stats.num_accepted_tokens;
    num_refused += stats.num_draft_tokens - stats.num_accepted_tokens;
    num_preemptions += stats.num_preemptions;
    num_hits += stats.num_prefix_hit_tokens;
    num_ahead += world.runner->num_ahead;
  }
  EXPECT_GT(num_accepted, 500);
  EXPECT_GT(num_of_model, 500);
  EXPECT_GT(num_refused, 500);
  EXPECT_GT(num_preemptions, 50);
  EXPECT_GT(num_hits, 50);
  EXPECT_GT(num_ahead, 100) << "steps without guesses go on behind one another";
}

TEST(Speculation, ADraftModelReadsABlockOfTheCacheOnce) {
  CoreOptions options = with_drafts(3);
  options.scheduler.drafts.has_model = true;
  options.scheduler.drafts.most_tokens = 200;
  options.scheduler.drafts.adapts = false;
  SmallWorld world(options);
  const std::vector<std::int32_t> prompt(41, 1);  // ten blocks of 4 tokens, and one more
  const auto read = [&](std::uint64_t id) {
    const std::int64_t before = world.draft_model->num_read_tokens();
    const auto request = few_tokens(prompt, 12, id);
    const auto got = world.add(id, request);
    world.drain();
    EXPECT_EQ(got->output.token_ids, expected_output(request, id, PolicyVersion{0}, kFewTokens));
    return world.draft_model->num_read_tokens() - before;
  };
  const std::int64_t first = read(1);
  EXPECT_GE(first, 41);
  EXPECT_EQ(read(2), first - 40);
}

TEST(Speculation, NewWeightsBetweenTwoStepsChangeTheTokensBehindThem) {
  SmallWorld world(with_drafts(8));
  auto request = few_tokens({0, 1}, 60, 1);
  world.add(1, request);
  world.drain();
  const auto got = world.add(2, request);
  for (int i = 0; i < 6; ++i) world.core->step();
  const std::size_t num_before = got->output.token_ids.size();
  ASSERT_GT(num_before, 6u) << "some were guessed";
  world.core->update_weights(fake_weights(1));
  world.drain();
  std::uint64_t state = 0;
  for (const std::int32_t token : request.prompt_ids) state = testing::extend(state, token);
  for (std::size_t i = 0; i < 60; ++i) {
    const PolicyVersion version{i < num_before ? 0 : 1};
    const std::int32_t token = testing::draw(state, 1, static_cast<std::int64_t>(i), version, kFewTokens);
    ASSERT_EQ(got->output.token_ids[i], token) << i;
    ASSERT_EQ(got->output.versions[i], version.value) << i;
    state = testing::extend(state, token);
  }
}

TEST(Speculation, ABlockWithAGuessThatFailedIsNeverFound) {
  // Blocks of one token, and requests that continue what others wrote: FakeRunner refuses to read what is not their prefix.
  CoreOptions options = with_drafts(6);
  options.block_size = 1;
  options.num_blocks = 400;
  SmallWorld world(options);
  std::vector<std::int32_t> prompt = {0, 1};
  for (std::uint64_t turn = 1; turn < 20; ++turn) {
    const auto request = few_tokens(prompt, 12, turn);
    const auto got = world.add(2 * turn, request), other = world.add(2 * turn + 1, few_tokens(prompt, 12, turn + 1));
    world.drain();
    EXPECT_EQ(got->output.token_ids, expected_output(request, turn, PolicyVersion{0}, kFewTokens));
    const std::int64_t num_computed = turn > 1 ? std::ssize(prompt) - 1 : 0;
    EXPECT_EQ(got->output.num_cached_tokens, num_computed);
    prompt.insert(prompt.end(), got->output.token_ids.begin(), got->output.token_ids.end());
  }
  EXPECT_GT(world.core->stats().num_draft_tokens, world.core->stats().num_accepted_tokens);
}

TEST(Speculation, GuessesTakeNoBudgetAndNoBlockThatOthersNeed) {
  CoreOptions options = with_drafts(8);
  options.scheduler.max_num_batched_tokens = 6;
  options.num_blocks = 24;  // of 4 tokens: 4 sequences of 4 + 20
  options.scheduler.drafts.max_stored_tokens = 0;
  options.scheduler.enable_prefix_caching = false;
  const auto run = [&](std::int64_t num_drafts) {
    options.scheduler.drafts.num_tokens = num_drafts;
    SmallWorld world(options);
    world.runner->before_run = [](const StepPlan& plan) {
      EXPECT_LE(plan.num_tokens, 6);
      std::int64_t num_tokens = 0;
      for (const PlanRow& row : plan.rows) {
        num_tokens += row.num_tokens;
        EXPECT_LE(row.num_drafts, 8);
        EXPECT_TRUE(row.num_drafts == 0 || row.is_sampled);
        EXPECT_LE(row.output_idx() + row.num_drafts, 19) << "nothing is guessed behind a request's end";
      }
      EXPECT_EQ(plan.num_tokens, num_tokens);
    };
    for (std::uint64_t i = 1; i <= 4; ++i) world.add(i, few_tokens({0, 1, 0, static_cast<std::int32_t>(i % 2)}, 20, i));
    world.drain();
    return world.core->stats();
  };
  const EngineStats with = run(8), without = run(0);
  EXPECT_GT(with.num_draft_tokens, 0);
  EXPECT_EQ(with.num_preemptions, 0);
  EXPECT_EQ(without.num_preemptions, 0);
  EXPECT_EQ(without.num_draft_tokens, 0);
}

TEST(Speculation, WhereGuessesFailADeviceGoesOnBesideTheHost) {
  CoreOptions options = with_drafts(4);
  options.scheduler.drafts.min_ngram = 2;
  constexpr std::int32_t kMany = 1000;  // tokens that never repeat
  auto owned = std::make_unique<FakeRunner>(64, 4, kMany);
  FakeRunner* const runner = owned.get();
  runner->is_beside_host = true;
  EngineCore core(options, std::move(owned));
  Collected collected;
  const auto request = few_tokens({1, 2, 3}, 100, 1);
  core.add(RequestId{1}, request, [&](const StepEvent& event) { collected.on_event(event); });
  while (core.step()) {
  }
  EXPECT_EQ(collected.output.token_ids, expected_output(request, 1, PolicyVersion{0}, kMany));
  EXPECT_EQ(core.stats().num_draft_tokens, 0);
  EXPECT_EQ(runner->num_ahead, 99) << "as without guesses";
}

TEST(Speculation, AFailedRowEndsItsRequestBehindTheTokensBefore) {
  SmallWorld world(with_drafts(4));
  const auto request = few_tokens({0, 1, 1}, 40, 1);
  world.add(1, request);
  world.drain();
  int num_rows = 0;
  world.runner->fail_row = [&](const PlanRow& row) { return row.num_drafts > 0 && ++num_rows == 3; };
  const auto got = world.add(2, request);
  world.drain();
  EXPECT_EQ(got->output.finish_reason, FinishReason::kError);
  auto wanted = expected_output(request, 1, PolicyVersion{0}, kFewTokens);
  wanted.resize(got->output.token_ids.size());
  EXPECT_EQ(got->output.token_ids, wanted);
  EXPECT_EQ(world.core->stats().num_blocks_used, 0);
}

constexpr std::int64_t kSmallVocab = 24;

struct SpeculationKind {
  const char* family;
  DType compute;
  std::int64_t window = 0;
  std::int64_t head_dim = 16;
};

/// A real model of few tokens, with and without guesses.
class SpeculationModel : public ::testing::TestWithParam<SpeculationKind> {
 protected:
  SpeculationModel() : session_(make_cpu_runtime(), 2) {
    const std::string family = GetParam().family;
    config_ = nn::make_model_config({.family = family.substr(0, family.find("_latents")),
                                     .vocab_size = kSmallVocab,
                                     .hidden_size = 64,
                                     .intermediate_size = 96,
                                     .num_layers = 2,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = GetParam().head_dim,
                                     .max_position = 512,
                                     .sliding_window = GetParam().window,
                                     .num_experts = 8,
                                     .num_active_experts = 2,
                                     .expert_size = 64});
    config_.attends_to_latents = family.ends_with("_latents");
    weights_ = weights(7, 1);
  }
  nn::WeightsPtr weights(std::uint64_t seed, std::int64_t version) {
    nn::Parameters parameters(session_.context().runtime, config_);
    parameters.init_random(seed, 0.2f);
    return nn::make_weights(session_.context(), parameters, GetParam().compute, PolicyVersion{version}, false, nullptr);
  }
  static EngineOptions options(std::int64_t num_drafts) {
    EngineOptions options;
    options.max_model_len = 200;
    options.num_blocks = 160;
    options.max_num_seqs = 16;
    options.num_threads = 2;
    options.drafts.num_tokens = num_drafts;
    options.drafts.min_ngram = 1;
    options.num_state_snapshots = 4;
    return options;
  }
  std::unique_ptr<EngineCore> core(const EngineOptions& options, std::int64_t preempt_period = 0) {
    check_options(options, config_);
    CoreOptions core;
    core.num_blocks = options.num_blocks;
    core.block_size = options.block_size;
    core.scheduler.max_num_seqs = options.max_num_seqs;
    core.scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
    core.scheduler.enable_prefix_caching = options.enable_prefix_caching;
    core.scheduler.drafts = {options.drafts};
    core.scheduler.preempt_period = preempt_period;
    if (!config_.linear.layers.empty()) core.scheduler.num_state_snapshots = options.num_state_snapshots;
    return std::make_unique<EngineCore>(core, std::make_unique<PagedRunner>(session_.context().runtime, options, weights_));
  }
  /// Every way of sampling; prompts are shared by several.
  static std::vector<wire::GenerateRequest> requests() {
    std::vector<wire::GenerateRequest> all;
    const float temperatures[] = {0.0f, 1.0f, 0.3f, 0.7f};
    for (std::uint64_t i = 0; i < 28; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 7);
      for (std::uint64_t n = 0; n < 3 + (i % 7) * 11; ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kSmallVocab))));
      wire::SamplingParams& s = request.sampling;
      s.max_tokens = static_cast<std::int32_t>(1 + (i * 13) % 60);
      s.seed = i / 2;
      s.temperature = temperatures[i % 4];
      s.ignore_eos = i % 3 != 0;
      if (i % 5 == 1) s.top_p = 0.8f;
      if (i % 5 == 2) s.top_k = 5;
      if (i % 5 == 3) s.min_p = 0.05f;
      if (i % 4 == 0) s.logprobs = 3;
      if (i % 9 == 4) s.logprob_token_ids = {3, 5, 7};
      if (i % 6 == 5) {
        s.stop_token_ids = {2, 4};
        s.min_tokens = std::min<std::int32_t>(*s.max_tokens, 6);
      }
      if (i % 10 == 7) s.logit_bias = {{3, 2.5f}, {8, -4.0f}};
      if (i % 11 == 3) s.repetition_penalty = 1.3f;
      if (i % 11 == 6) s.bad_sequences = {{1}, {4, 5}};
      if (i % 11 == 9) s.bad_sequences = {{6}};
      if (i % 8 == 2) {
        s.prompt_logprobs = 2;
        s.prompt_ranks = true;
      }
      all.push_back(std::move(request));
    }
    return all;
  }
  /// Adds all of them `num_rounds` times, one round when the one before is over, so that the later ones are guessed well.
  std::vector<wire::GenerateOutput> run(EngineCore& core, const EngineOptions& options, int num_rounds,
                                        const std::vector<wire::GenerateRequest>& all) {
    std::vector<std::shared_ptr<Collected>> got;
    std::uint64_t id = 0;
    for (int round = 0; round < num_rounds; ++round) {
      for (wire::GenerateRequest request : all) {
        if (round > 1) request.sampling.seed = *request.sampling.seed + static_cast<std::uint64_t>(100 * round);  // others, later
        got.push_back(std::make_shared<Collected>());
        core.add(RequestId{++id}, resolved(request, options), [into = got.back()](const StepEvent& event) { into->on_event(event); });
      }
      while (core.step()) core.scheduler().check_integrity();
    }
    std::vector<wire::GenerateOutput> outputs;
    for (const auto& one : got) outputs.push_back(one->output);
    return outputs;
  }
  ResolvedRequest resolved(const wire::GenerateRequest& request, const EngineOptions& options) const {
    ResolvedRequest resolved = resolve_request(request, options, config_);
    resolved.seed = request.sampling.seed.value_or(0);
    return resolved;
  }
  static std::vector<std::uint32_t> bits(const std::vector<float>& values) {
    std::vector<std::uint32_t> out;
    for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
    return out;
  }
  using Lists = std::vector<std::vector<wire::TopLogprob>>;
  static std::vector<std::pair<std::int32_t, std::uint32_t>> bits(const Lists& lists) {
    std::vector<std::pair<std::int32_t, std::uint32_t>> out;
    for (const auto& list : lists)
      for (const wire::TopLogprob& entry : list) out.emplace_back(entry.id, std::bit_cast<std::uint32_t>(entry.logprob));
    return out;
  }
  static void expect_same(const std::vector<wire::GenerateOutput>& found, const std::vector<wire::GenerateOutput>& wanted) {
    ASSERT_EQ(found.size(), wanted.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      SCOPED_TRACE(i);
      const wire::GenerateOutput &a = found[i], &b = wanted[i];
      EXPECT_EQ(a.error, "");
      EXPECT_EQ(a.token_ids, b.token_ids);
      EXPECT_EQ(bits(a.logprobs), bits(b.logprobs));
      EXPECT_EQ(bits(a.top_logprobs), bits(b.top_logprobs));
      EXPECT_EQ(a.versions, b.versions);
      EXPECT_EQ(a.finish_reason, b.finish_reason);
      EXPECT_EQ(a.stop_token_id, b.stop_token_id);
      EXPECT_EQ(bits(a.prompt_logprobs), bits(b.prompt_logprobs));
      EXPECT_EQ(bits(a.prompt_top_logprobs), bits(b.prompt_top_logprobs));
      EXPECT_EQ(a.prompt_ranks, b.prompt_ranks);
    }
  }

  ops::OpSession session_;
  nn::ModelConfig config_;
  nn::WeightsPtr weights_;
};

TEST_P(SpeculationModel, EveryWayOfSamplingGivesTheSameBits) {
  const EngineOptions plain = options(0);
  const auto wanted = run(*core(plain), plain, 3, requests());
  for (const auto& [num_drafts, budget, num_blocks, period, from_completions] : {std::tuple{4, 2048, 160, 0, true},
                                                                                 {15, 2048, 160, 0, true},
                                                                                 {3, 40, 160, 0, true},
                                                                                 {8, 2048, 40, 3, true},
                                                                                 {6, 33, 160, 2, false}}) {
    SCOPED_TRACE(fmt::format("{} drafts, {} tokens a step, {} blocks, period {}", num_drafts, budget, num_blocks, period));
    EngineOptions guessing = options(num_drafts);
    guessing.max_num_batched_tokens = budget;
    guessing.num_blocks = num_blocks;
    guessing.drafts.from_completions = from_completions;
    const auto engine = core(guessing, period);
    expect_same(run(*engine, guessing, 3, requests()), wanted);
    const EngineStats stats = engine->stats();
    EXPECT_GT(stats.num_accepted_tokens, from_completions ? 300 : 5);
    EXPECT_GT(stats.num_draft_tokens, stats.num_accepted_tokens);
    EXPECT_EQ(stats.num_preemptions > 0, period > 0);
  }
}

TEST_P(SpeculationModel, WeightsThatChangeInTheMiddleChangeTheSameTokens) {
  const nn::WeightsPtr later = weights(8, 2);
  wire::GenerateRequest request = requests()[5];
  request.sampling = {};
  request.sampling.max_tokens = 60;
  request.sampling.seed = 3;
  request.sampling.temperature = 0.5f;
  request.sampling.ignore_eos = true;
  // The step at which the weights change is that behind `num_before` tokens; 0: behind the sixth step.
  const auto run_with = [&](const EngineOptions& of_engine, std::size_t& num_before) {
    const auto engine = core(of_engine);
    Collected first, got;
    engine->add(RequestId{1}, resolved(request, of_engine), [&](const StepEvent& event) { first.on_event(event); });
    while (engine->step()) {
    }
    engine->add(RequestId{2}, resolved(request, of_engine), [&](const StepEvent& event) { got.on_event(event); });
    for (int i = 0; num_before == 0 ? i < 6 : got.output.token_ids.size() < num_before; ++i) engine->step();
    num_before = got.output.token_ids.size();
    engine->update_weights(later);
    while (engine->step()) {
    }
    return got.output;
  };
  std::size_t num_before = 0;
  const auto found = run_with(options(6), num_before);
  EXPECT_GT(num_before, 8u) << "some were guessed";
  ASSERT_LT(num_before, 50u);
  const auto wanted = run_with(options(0), num_before);
  EXPECT_EQ(wanted.versions[num_before - 1], 1);
  EXPECT_EQ(wanted.versions[num_before], 2);
  expect_same({found}, {wanted});
}

INSTANTIATE_TEST_SUITE_P(Families, SpeculationModel,
                         ::testing::Values(SpeculationKind{"llama", DType::kF32}, SpeculationKind{"qwen3", DType::kBF16},
                                           SpeculationKind{"mistral", DType::kBF16, 24}, SpeculationKind{"qwen3_moe", DType::kBF16},
                                           SpeculationKind{"deepseek_v3", DType::kBF16, 0, 64},
                                           SpeculationKind{"deepseek_v3_latents", DType::kBF16, 0, 64},
                                           SpeculationKind{"qwen3_next", DType::kBF16, 0, 64}, SpeculationKind{"nemotron_h", DType::kF32}),
                         [](const auto& kind) {
                           return std::string(kind.param.family) + (kind.param.compute == DType::kBF16 ? "_bf16" : "_f32") +
                                  (kind.param.window > 0 ? "_window" : "");
                         });

}  // namespace
}  // namespace prl::engine
