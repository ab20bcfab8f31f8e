// Rows that several ranks share: the bits of one rank that has whole rows cut into as many leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <thread>

#include "base/rng.hpp"
#include "comm/testing/ranks.hpp"
#include "trainer/context_group.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

constexpr int kVocabulary = 300;

/// Rows of several sequences and of lengths that are no multiple of anything.
std::vector<wire::MicroBatch> rows_of(std::int64_t step, int num_rows) {
  std::vector<wire::MicroBatch> rows;
  for (int r = 0; r < num_rows; ++r) {
    Rng rng(mix_seed(23, static_cast<std::uint64_t>(step)), static_cast<std::uint64_t>(r));
    wire::MicroBatch row;
    for (int s = 0; s < 3; ++s) {
      const auto n = static_cast<std::int32_t>(5 + rng.next_below(20));
      for (std::int32_t i = 0; i < n; ++i) {
        row.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(kVocabulary)));
        row.position_ids.push_back(i);
      }
      row.sequence_lengths.push_back(n);
      row.env_names.emplace_back("env");
    }
    const std::size_t size = row.input_ids.size();
    row.temperatures.assign(size, 1.0f);
    row.loss_mask.assign(size, 1);
    row.advantages.assign(size, 0.0f);
    row.inference_logprobs.assign(size, 0.0f);
    row.rl_weights.assign(size, 0.0f);
    row.ce_weights.assign(size, 1.0f);
    rows.push_back(std::move(row));
  }
  return rows;
}

struct Case {
  DType compute = DType::kF32;
  nn::ActivationCheckpointing checkpointing = {};
  Reduce reduce = Reduce::kExact;
  int num_rows = 3, num_leaves = 4;
  bool overlaps = false;
  std::optional<nn::AdapterConfig> lora = {};
  std::optional<DType> adapter_dtype = {};
  bool is_rl = false;  ///< else cross entropy
};

nn::AdapterConfig adapter_of(double dropout, std::vector<std::string> saved = {}) {
  return {.rank = 4,
          .alpha = 8,
          .dropout = dropout,
          .target_modules = {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"},
          .modules_to_save = std::move(saved),
          .rank_pattern = {},
          .alpha_pattern = {},
          .base_model = "tiny"};
}

/// The same tokens, as samples of a policy that was a little other than the one that is trained.
void as_rollouts(std::vector<wire::MicroBatch>& rows) {
  for (wire::MicroBatch& row : rows)
    for (std::size_t i = 0; i < row.input_ids.size(); ++i) {
      row.ce_weights[i] = 0.0f;
      row.rl_weights[i] = 1.0f;
      row.advantages[i] = i % 3 == 0 ? -1.0f : 0.5f;
      row.inference_logprobs[i] = -5.0f - 0.01f * static_cast<float>(i % 7);
    }
}

struct ContextTrace {
  std::vector<std::vector<float>> weights;
  std::vector<double> numbers;  ///< losses and norms of the steps
};

ContextTrace train_parts(const Case& run, const std::filesystem::path& folder, int ranks_per_row, comm::Mesh* mesh) {
  PolicyOptions of_policy;
  of_policy.model = folder;
  of_policy.compute = run.compute;
  of_policy.num_threads = 1;
  of_policy.checkpointing = run.checkpointing;
  of_policy.lora = run.lora;
  of_policy.adapter_dtype = run.adapter_dtype;
  const auto policy = std::make_unique<Policy>(make_cpu_runtime(), of_policy);
  GradientStepOptions options;
  options.optim = config::AdamWConfig{.lr = 1e-2};
  options.mesh = mesh;
  options.reduce = run.reduce;
  options.overlaps_exchange = run.overlaps;
  options.cut = {.num_leaves = run.num_leaves, .num_ranks = ranks_per_row};
  GradientStep step(*policy, options);
  ContextTrace trace;
  for (std::int64_t i = 1; i <= 3; ++i) {
    std::vector<wire::MicroBatch> rows = rows_of(i, run.num_rows);
    if (run.is_rl) as_rollouts(rows);
    const GradientStepResult result = step.run(rows, PolicyVersion{i});
    trace.numbers.insert(trace.numbers.end(), {result.loss, result.grad_norm.value_or(0)});
    EXPECT_EQ(result.pool.values("loss").size(), static_cast<std::size_t>(run.num_rows)) << "each row is reported once";
  }
  trace.weights = masters(*policy, step);
  return trace;
}

std::vector<ContextTrace> train_parts_on(int size, int ranks_per_row, const Case& run, const std::filesystem::path& folder) {
  std::vector<ContextTrace> traces(static_cast<std::size_t>(size));
  comm::testing::run_threads("threads", size, [&](comm::Communicator& given) {
    std::vector<int> all(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) all[static_cast<std::size_t>(r)] = r;
    comm::Mesh mesh(given.subgroup(all, "mesh", given.generation()));
    traces[static_cast<std::size_t>(given.rank())] = train_parts(run, folder, ranks_per_row, &mesh);
  });
  return traces;
}

std::string difference_of_parts(const ContextTrace& a, const ContextTrace& b) {
  for (std::size_t t = 0; t < a.weights.size(); ++t)
    for (std::size_t i = 0; i < a.weights[t].size(); ++i)
      if (std::bit_cast<std::uint32_t>(a.weights[t][i]) != std::bit_cast<std::uint32_t>(b.weights[t][i]))
        return fmt::format("element {} of tensor {}: {} and {}", i, t, a.weights[t][i], b.weights[t][i]);
  for (std::size_t i = 0; i < a.numbers.size(); ++i)
    if (a.numbers[i] != b.numbers[i]) return fmt::format("number {}: {} and {}", i, a.numbers[i], b.numbers[i]);
  return {};
}

nn::InitModelOptions model_of(const std::string& family, bool is_tied) {
  nn::InitModelOptions options = tiny_model();
  options.family = family;
  options.vocab_size = kVocabulary;
  options.num_heads = options.num_kv_heads = 4;
  options.head_dim = 16;
  options.sliding_window = family == "mistral" || family == "gpt_oss" || family == "afmoe" ? 5 : 0;
  options.tie_word_embeddings = is_tied;
  return options;
}

class ContextParallel : public ::testing::Test {
 protected:
  void expect_the_bits_of_one_rank(const Case& run, const std::filesystem::path& folder, const std::string& what) {
    const ContextTrace alone = train_parts(run, folder, 1, nullptr);
    EXPECT_NE(alone.numbers.front(), alone.numbers[alone.numbers.size() - 2]) << "nothing was learnt";
    const std::pair<int, int> shapes[] = {{2, 1}, {2, 2}, {4, 2}, {4, 4}};
    for (const auto& [size, ranks_per_row] : shapes)
      for (const ContextTrace& trace : train_parts_on(size, ranks_per_row, run, folder))
        EXPECT_EQ(difference_of_parts(trace, alone), "") << what << ", " << size << " ranks, " << ranks_per_row << " to a row";
  }
};

TEST_F(ContextParallel, FamiliesGiveTheBitsOfOneRank) {
  for (const std::string family :
       {"qwen3", "qwen2", "llama", "smollm3", "olmo2", "phi3", "mistral", "gpt_oss", "minimax_m2", "afmoe", "deepseek_v3", "gemma3_text"})
    for (const bool is_tied : {false, true}) {
      Scratch scratch(fmt::format("cp-{}-{}", family, is_tied));
      nn::init_model(model_of(family, is_tied), scratch.path);
      expect_the_bits_of_one_rank({}, scratch.path, fmt::format("{}, tied {}", family, is_tied));
    }
}

TEST_F(ContextParallel, PrecisionsAndRecomputationGiveTheBitsOfOneRank) {
  Scratch scratch("cp-kinds");
  nn::init_model(model_of("qwen3", true), scratch.path);
  expect_the_bits_of_one_rank({.compute = DType::kBF16}, scratch.path, "bf16");
  expect_the_bits_of_one_rank({.checkpointing = {1}}, scratch.path, "whole layers again");
  expect_the_bits_of_one_rank({.checkpointing = {1, {true, true, true}}}, scratch.path, "parts of layers again");
  expect_the_bits_of_one_rank({.num_rows = 1}, scratch.path, "one row");
  expect_the_bits_of_one_rank({.overlaps = true}, scratch.path, "sent while the pass goes on");
}

// A mask of dropout is of the whole row, whoever holds which part of it; embedding and head in one are added in two passes.
TEST_F(ContextParallel, AdaptersGiveTheBitsOfOneRank) {
  Scratch scratch("cp-lora");
  nn::init_model(model_of("qwen3", true), scratch.path);
  for (const DType compute : {DType::kF32, DType::kBF16})
    for (const bool is_rl : {false, true})
      expect_the_bits_of_one_rank({.compute = compute, .lora = adapter_of(0), .is_rl = is_rl}, scratch.path,
                                  fmt::format("{}, RL {}", to_string(compute), is_rl));
  const Case with_dropout{.lora = adapter_of(0.2)};
  EXPECT_NE(difference_of_parts(train_parts(with_dropout, scratch.path, 1, nullptr),
                                train_parts({.lora = adapter_of(0)}, scratch.path, 1, nullptr)),
            "");
  expect_the_bits_of_one_rank(with_dropout, scratch.path, "dropout");
  expect_the_bits_of_one_rank({.checkpointing = {1}, .lora = adapter_of(0.2)}, scratch.path, "dropout, whole layers again");
  expect_the_bits_of_one_rank({.overlaps = true, .lora = adapter_of(0, {"embed_tokens"})}, scratch.path, "the tied matrix too");
  expect_the_bits_of_one_rank({.lora = adapter_of(0, {"embed_tokens", "norm"})}, scratch.path, "the tied matrix and norms too");
  Scratch untied("cp-lora-untied");
  nn::init_model(model_of("qwen2", false), untied.path);
  expect_the_bits_of_one_rank({.lora = adapter_of(0, {"lm_head"})}, untied.path, "the head too");
}

// More leaves are another order of sums: other bits, the same gradients otherwise.
TEST_F(ContextParallel, LeavesAreTheGradientsOfTheRow) {
  Scratch scratch("cp-leaves");
  nn::init_model(model_of("qwen3", true), scratch.path);
  const ContextTrace one = train_parts({.num_leaves = 1}, scratch.path, 1, nullptr),
                     eight = train_parts({.num_leaves = 8}, scratch.path, 1, nullptr);
  ASSERT_EQ(one.numbers.size(), eight.numbers.size());
  EXPECT_NE(difference_of_parts(one, eight), "");
  for (std::size_t i = 0; i < one.numbers.size(); ++i) EXPECT_NEAR(one.numbers[i], eight.numbers[i], 1e-4 * std::abs(one.numbers[i]));
  const ContextTrace fast = train_parts_on(2, 2, {.reduce = Reduce::kFast, .num_leaves = 2}, scratch.path).front();
  for (std::size_t i = 0; i < one.numbers.size(); ++i) EXPECT_NEAR(one.numbers[i], fast.numbers[i], 1e-4 * std::abs(one.numbers[i]));
  const Case whole{.num_leaves = 1, .lora = adapter_of(0)}, cut{.num_leaves = 8, .lora = adapter_of(0)};
  const ContextTrace of_adapter = train_parts(whole, scratch.path, 1, nullptr), in_leaves = train_parts(cut, scratch.path, 1, nullptr);
  EXPECT_NE(difference_of_parts(of_adapter, in_leaves), "");
  for (std::size_t i = 0; i < of_adapter.numbers.size(); ++i)
    EXPECT_NEAR(of_adapter.numbers[i], in_leaves.numbers[i], 1e-4 * std::abs(of_adapter.numbers[i]));
}

TEST_F(ContextParallel, WhatDoesNotDivideIsRefusedByName) {
  nn::ModelConfig model;
  model.num_heads = 6;
  model.num_kv_heads = 2;
  check_row_cut(model, {.num_leaves = 4, .num_ranks = 2});
  const auto error_of = [&](const RowCut& cut) -> std::string {
    try {
      check_row_cut(model, cut);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(error_of({.num_leaves = 4, .num_ranks = 4}), HasSubstr("6 query heads and 2 key-value heads"));
  EXPECT_THAT(error_of({.num_leaves = 2, .num_ranks = 4}), HasSubstr("model.leaves_per_row"));
  EXPECT_THAT(error_of({.num_leaves = 6, .num_ranks = 2}), HasSubstr("powers of two"));
  EXPECT_EQ(fitting_context({.num_leaves = 4, .num_ranks = 4}, 6), 2);
  EXPECT_EQ(fitting_context({.num_leaves = 4, .num_ranks = 4}, 3), 1);
}

}  // namespace
}  // namespace prl::trainer
