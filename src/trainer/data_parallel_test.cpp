// The same bits on any number of ranks: weights, optimizer state, losses and checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "comm/testing/ranks.hpp"
#include "io/safetensors.hpp"
#include "trainer/agreement.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/memory.hpp"
#include "trainer/test_support.hpp"
#include "trainer/trace_test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(DataParallel, EveryOptimizerGivesTheSameBitsOnAnyNumberOfRanks) {
  Scratch scratch("dp-optim");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const config::OptimConfig& optim : {with_lr<config::AdamWConfig>(1e-2), with_lr<config::SgdConfig>(1e-1),
                                           with_lr<config::SignSgdConfig>(1e-3), with_lr<config::MuonConfig>(1e-2)})
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const TrainingCase run{.optim = optim, .compute = compute};
      const Trace alone = train(run, scratch.path, nullptr);
      EXPECT_NE(alone.losses.front(), alone.losses.back());
      EXPECT_EQ(alone.share, 1);
      for (const int size : {2, 3, 4}) {
        double held = 0;
        for (const Trace& trace : train_on(size, run, scratch.path)) {
          expect_equal(trace, alone, fmt::format("{} ranks, optimizer {}, {}", size, optim.index(), to_string(compute)));
          held += trace.share;
        }
        EXPECT_DOUBLE_EQ(held, 1) << "each master is held once";
      }
    }
}

TEST(DataParallel, SendingWhileTheBackwardPassGoesOnChangesNoBit) {
  Scratch scratch("dp-overlap");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const Trace alone = train({.compute = compute}, scratch.path, nullptr);
    for (const int size : {2, 3, 4})
      for (const Trace& trace : train_on(size, {.compute = compute, .overlaps = true}, scratch.path))
        expect_equal(trace, alone, fmt::format("{} ranks, {}", size, to_string(compute)));
  }
}

// Who computes with a layer before it was joined computes with spoilt values. One row: all ranks but the first have none, and nothing may
// wait for what they do not join.
TEST(DataParallel, NewWeightsArriveUnderTheNextForwardPass) {
  Scratch scratch("dp-late");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const config::OptimConfig& optim : {with_lr<config::AdamWConfig>(1e-2), with_lr<config::MuonConfig>(1e-2)})
    for (const DType compute : {DType::kF32, DType::kBF16})
      for (const int num_rows : {1, 5}) {
        TrainingCase run{.optim = optim, .compute = compute, .num_rows = num_rows};
        const Trace alone = train(run, scratch.path, nullptr);
        run.overlaps = true;
        for (const auto& [size, replicas] : {std::pair{2, 1}, {3, 1}, {4, 2}}) {
          run.num_replicas = replicas;
          for (const Trace& trace : train_on(size, run, scratch.path, num_rows > 1))
            expect_equal(trace, alone, fmt::format("{} rows, {} ranks, {}", num_rows, size, to_string(compute)));
        }
      }
}

// Weights of which each rank has a part of each layer: those that are whole on each, bit for bit.
TEST(GatheredLayers, FamiliesAndPrecisionsGiveTheBitsOfWholeWeights) {
  for (const std::string family : {"qwen3", "qwen2", "llama", "smollm3", "olmo2", "phi3", "gpt_oss", "minimax_m2", "afmoe", "deepseek_v3",
                                   "gemma3_text"})  // qwen2 has biases, which are here always
    for (const bool is_tied : {false, true}) {
      Scratch scratch(fmt::format("dp-layers-{}-{}", family, is_tied));
      nn::InitModelOptions model = model_of_several_chunks();
      model.family = family;
      model.num_layers = 3;
      model.hidden_size = 96;  // a layer of several chunks
      model.intermediate_size = 640;
      model.tie_word_embeddings = is_tied;
      nn::init_model(model, scratch.path);
      for (const DType compute : {DType::kF32, DType::kBF16}) {
        if (family != "qwen3" && is_tied != (compute == DType::kF32)) continue;  // neither has to do with the other
        const Trace alone = train({.compute = compute, .num_steps = 2}, scratch.path, nullptr);
        for (const int size : family == "qwen3" ? std::vector{1, 2, 3, 4} : std::vector{3})
          for (const Trace& trace :
               train_on(size, {.compute = compute, .num_steps = 2, .overlaps = size != 2, .gathers_layers = true}, scratch.path))
            expect_equal(trace, alone, fmt::format("{}, tied {}, {} ranks, {}", family, is_tied, size, to_string(compute)));
      }
    }
}

TEST(GatheredLayers, OptimizersCopiesRecomputationAndFewRowsChangeNoBit) {
  Scratch scratch("dp-layers-kinds");
  nn::InitModelOptions model = model_of_several_chunks();
  model.num_layers = 5;
  nn::init_model(model, scratch.path);
  const auto expect_alike = [&](TrainingCase run, int size, const std::string& what) {
    run.num_steps = 2;
    TrainingCase whole = run;
    whole.num_replicas = 1;
    const Trace alone = train(whole, scratch.path, nullptr);
    run.gathers_layers = true;
    for (const Trace& trace : train_on(size, run, scratch.path)) expect_equal(trace, alone, what);
  };
  expect_alike({.optim = with_lr<config::MuonConfig>(1e-2)}, 3, "Muon: whole matrices at a rank");
  expect_alike({.num_rows = 1}, 3, "ranks without a row");
  expect_alike({.num_rows = 4, .overlaps = true}, 3, "ranks without a row in the second round");
  expect_alike({.num_replicas = 2}, 4, "two copies");
  expect_alike({.offloads_masters = true}, 3, "masters in host memory");
  expect_alike({.compute = DType::kBF16, .overlaps = true, .checkpointing = {1}}, 2, "whole layers again");
  expect_alike({.overlaps = true, .checkpointing = {2}}, 2, "every second layer again");
  expect_alike({.overlaps = true, .checkpointing = {1, {true, true, true}}}, 3, "parts of layers again");
  const TrainingCase fast{.optim = with_lr<config::SgdConfig>(1e-2), .num_rows = 4, .reduce = Reduce::kFast};
  TrainingCase fast_by_layer = fast;
  fast_by_layer.gathers_layers = true;
  expect_equal(train_on(3, fast_by_layer, scratch.path)[1], train_on(3, fast, scratch.path)[1], "fast sums");
}

nn::AdapterConfig small_adapter(double dropout = 0) {
  return {.rank = 4,
          .alpha = 8,
          .dropout = dropout,
          .target_modules = {"q_proj", "v_proj", "o_proj", "down_proj"},
          .modules_to_save = {},
          .rank_pattern = {},
          .alpha_pattern = {},
          .base_model = "base"};
}

// Of a base of which each rank has a part of each layer, and none a gradient.
TEST(GatheredLayers, AdaptersOfThemHaveTheBitsOfThoseOfWholeWeights) {
  for (const std::string family : {"qwen3", "deepseek_v3"}) {
    Scratch scratch("dp-layers-lora-" + family);
    nn::InitModelOptions model = model_of_several_chunks();
    model.family = family;
    model.num_layers = 3;
    nn::init_model(model, scratch.path);
    const auto expect_alike = [&](TrainingCase run, int size, const std::string& what) {
      run.num_steps = 2;
      TrainingCase whole = run;
      whole.num_replicas = 1;
      const Trace alone = train(whole, scratch.path, nullptr);
      run.gathers_layers = true;
      for (const Trace& trace : train_on(size, run, scratch.path, run.overlaps)) expect_equal(trace, alone, family + ", " + what);
    };
    expect_alike({.lora = small_adapter()}, 2, "two ranks");
    const double dropout = family == "qwen3" ? 0.2 : 0;  // adapters of experts have none
    expect_alike({.compute = DType::kBF16, .overlaps = true, .lora = small_adapter(dropout)}, 3, "three ranks in bfloat16");
    expect_alike({.num_rows = 1, .lora = small_adapter()}, 3, "ranks without a row");
    expect_alike({.num_replicas = 2, .checkpointing = {1}, .lora = small_adapter()}, 4, "two copies, whole layers again");
  }
}

// A layer is in memory while it is computed with, and its neighbour.
TEST(GatheredLayers, ARankHoldsTwoLayersAndItsShare) {
  Scratch scratch("dp-layers-bytes");
  nn::InitModelOptions model = model_of_several_chunks();
  model.hidden_size = 128;
  model.intermediate_size = 512;
  model.num_layers = 12;
  nn::init_model(model, scratch.path);
  const auto bytes_of = [&](bool gathers_layers, const std::optional<nn::AdapterConfig>& lora = {}) {
    std::atomic<std::size_t> most{0};
    comm::testing::run_threads("threads", 4, [&](comm::Communicator& group) {
      comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1, 2, 3}, "train", 0));
      const auto runtime = make_cpu_runtime();
      PolicyOptions options;
      options.model = scratch.path;
      options.num_threads = 1;
      options.gathers_layers = gathers_layers;
      options.lora = lora;
      options.share = {group.rank(), 4, false, true};
      Policy policy(runtime, options);
      GradientStepOptions of_step;
      of_step.mesh = &mesh;
      GradientStep step(policy, of_step);
      step.run(cross_entropy_rows(1, 4), PolicyVersion{1});
      const std::size_t bytes = runtime->bytes_in_use();
      for (std::size_t seen = most; bytes > seen && !most.compare_exchange_weak(seen, bytes);) {
      }
    });
    return static_cast<double>(most);
  };
  const nn::ModelConfig config = nn::load_model_config(scratch.path);
  const auto table = nn::make_tensor_table(config);
  double of_layers = 0;
  for (const nn::GradSection& section : nn::grad_sections(*table))
    if (section.layer >= 0) of_layers += static_cast<double>(section.range.count()) * sizeof(float);
  // Packed forms for forward and backward of twelve layers, in the new version and in that of the last pass, which stays until the next;
  // against two layers' forms and values, and a quarter of all values.
  const double saved = of_layers * (2 * 2.0 - 2.0 * 2 / 12 - 2.0 / 12 - 0.25);
  EXPECT_NEAR(bytes_of(false) - bytes_of(true), saved, 0.1 * saved);
  // Of an adapter's base there is one version: forms of ten layers, less two layers' values, the head's once more, and the largest share,
  // which is more than a quarter.
  EXPECT_GT(bytes_of(false, small_adapter()) - bytes_of(true, small_adapter()), 0.9 * of_layers);
}

// What is made for one rank and for one of three, next to what the plan says of both.
TEST(DataParallel, ThePlanKnowsWhatARankHolds) {
  Scratch scratch("dp-bytes");
  nn::InitModelOptions model = model_of_several_chunks();
  model.vocab_size = 12'000;  // several chunks for each of three ranks
  nn::init_model(model, scratch.path);
  for (const config::OptimConfig& optim : {with_lr<config::AdamWConfig>(1e-2), with_lr<config::MuonConfig>(1e-2)}) {
    const auto options_of = [&](int rank, int size) {
      PolicyOptions options;
      options.model = scratch.path;
      options.num_threads = 1;
      options.share = {rank, size, keeps_whole_blocks(optim), divides_grads(size, Reduce::kExact)};
      return options;
    };
    const auto measure = [&](int rank, int size, comm::Mesh* mesh) {
      const auto runtime = make_cpu_runtime();
      Policy policy(runtime, options_of(rank, size));
      EXPECT_EQ(policy.parameters().holds_all(), size == 1) << "masters are never whole";
      GradientStepOptions options;
      options.optim = optim;
      options.mesh = mesh;
      const GradientStep step(policy, options);
      return static_cast<double>(runtime->bytes_in_use());
    };
    const auto leaf_bytes = [&](int size) {
      const auto table = nn::make_tensor_table(nn::load_model_config(scratch.path));
      std::int64_t of_layers = 0, others = 0;
      for (const nn::GradSection& section : nn::grad_sections(*table))
        (section.layer >= 0 && size > 1 ? of_layers : others) =
            section.layer >= 0 && size > 1 ? std::max(of_layers, section.range.count()) : others + section.range.count();
      return sizeof(float) * static_cast<std::size_t>(of_layers + others);
    };
    const auto planned = [&](int size) {
      GradientStepOptions options;
      options.optim = optim;
      options.num_ranks = size;
      const TrainingBytes bytes = training_bytes(nn::load_model_config(scratch.path), options_of(0, size), options);
      EXPECT_GT(bytes.gradients, leaf_bytes(size)) << "sums and buckets, which come with the first row";
      return static_cast<double>(bytes.masters + bytes.optimizer + leaf_bytes(size));
    };
    const double alone = measure(0, 1, nullptr);
    double most = 0;
    std::mutex mutex;
    comm::testing::run_threads("threads", 3, [&](comm::Communicator& group) {
      comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1, 2}, "train", 0));
      const double bytes = measure(group.rank(), 3, &mesh);
      const std::lock_guard lock(mutex);
      most = std::max(most, bytes);
    });
    const double saved = planned(1) - planned(3);
    EXPECT_GT(saved, 0.2 * planned(1));
    // Muon keeps one state of a matrix and two of everything else; the plan takes them as spread alike.
    EXPECT_NEAR(alone - most, saved, 0.05 * saved) << "optimizer " << optim.index();
  }
}

TEST(DataParallel, FewerRowsThanRanksAndNone) {
  Scratch scratch("dp-few");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const int num_rows : {1, 3}) {
    const TrainingCase run{.num_rows = num_rows};
    const Trace alone = train(run, scratch.path, nullptr);
    for (const Trace& trace : train_on(4, run, scratch.path)) expect_equal(trace, alone, fmt::format("{} rows", num_rows));
  }
}

TEST(DataParallel, CopiesOfTheStateGiveTheSameBits) {
  Scratch scratch("dp-copies");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const config::OptimConfig& optim : {with_lr<config::AdamWConfig>(1e-2), with_lr<config::MuonConfig>(1e-2)})
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const TrainingCase run{.optim = optim, .compute = compute};
      const Trace alone = train(run, scratch.path, nullptr);
      for (const auto& [size, num_replicas] : {std::pair(4, 2), std::pair(2, 2), std::pair(3, 3)}) {
        double held = 0;
        for (const Trace& trace : train_on(size, {.optim = optim, .compute = compute, .num_replicas = num_replicas}, scratch.path)) {
          expect_equal(trace, alone, fmt::format("{} ranks, {} copies, optimizer {}", size, num_replicas, optim.index()));
          held += trace.share;
        }
        EXPECT_DOUBLE_EQ(held, num_replicas);
      }
    }
  const TrainingCase fast{.optim = with_lr<config::SgdConfig>(1e-2), .reduce = Reduce::kFast, .num_replicas = 2};
  const std::vector<Trace> traces = train_on(4, fast, scratch.path);
  for (std::size_t rank = 1; rank < traces.size(); ++rank) expect_equal(traces[0], traces[rank], "fast");
}

TEST(DataParallel, MastersInHostMemoryGiveTheSameBits) {
  Scratch scratch("dp-host");
  nn::init_model(model_of_several_chunks(), scratch.path);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const Trace alone = train({.compute = compute}, scratch.path, nullptr);
    expect_equal(train({.compute = compute, .offloads_masters = true}, scratch.path, nullptr), alone, "one rank");
    for (const Trace& trace : train_on(3, {.compute = compute, .offloads_masters = true}, scratch.path))
      expect_equal(trace, alone, "three ranks");
  }
}

// Of several ranks the gradients of all layers lie in the same memory, and are sent off as the backward pass completes each.
TEST(DataParallel, GradientsOfLayersShareTheirMemory) {
  Scratch scratch("dp-sections");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const auto policy = make_policy(scratch.path, DType::kF32);
  nn::Parameters& parameters = policy->parameters();
  ASSERT_GE(policy->config().num_layers, 2);
  const std::vector<wire::MicroBatch> rows = cross_entropy_rows(1, 1);
  const auto backward = [&] {
    const std::vector<std::int32_t> targets = make_targets(rows[0]);
    policy->forward(rows[0], targets);
    policy->backward(std::vector<float>(targets.size(), -0.25f));
  };
  parameters.start_grads();
  backward();
  const auto* all = parameters.all_grads().as<float>();
  const std::vector<float> wanted(all, all + parameters.all_grads().num_elements());
  const std::size_t whole_bytes = policy->context().runtime->bytes_in_use();
  parameters.divide_grads(true);
  EXPECT_LT(policy->context().runtime->bytes_in_use(), whole_bytes);
  EXPECT_EQ(parameters.grad(nn::Block::kDown, 0).data(), parameters.grad(nn::Block::kDown, 1).data());
  std::vector<float> found(wanted.size());
  std::vector<std::int64_t> order;
  parameters.on_section([&](std::size_t section) {
    const nn::GradSection& of = parameters.sections()[section];
    order.push_back(of.layer);
    std::copy_n(parameters.section_grads(section).as<float>(), of.range.count(), found.begin() + of.range.begin);
  });
  parameters.start_grads();
  backward();
  std::vector<std::int64_t> wanted_order{nn::GradSection::kHead};
  for (std::int64_t layer = policy->config().num_layers - 1; layer >= 0; --layer) wanted_order.push_back(layer);
  wanted_order.push_back(nn::GradSection::kRest);
  EXPECT_EQ(order, wanted_order);
  EXPECT_TRUE(found == wanted);
  parameters.on_section({});
}

TEST(DataParallel, FastSumsAreCloseAndAlikeOnAllRanks) {
  Scratch scratch("dp-fast");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const TrainingCase run{.optim = with_lr<config::SgdConfig>(1e-2), .reduce = Reduce::kFast};
  const Trace alone = train(run, scratch.path, nullptr);
  const std::vector<Trace> traces = train_on(3, run, scratch.path);
  for (const int rank : {1, 2}) expect_equal(traces[0], traces[static_cast<std::size_t>(rank)], "ranks");
  for (std::size_t t = 0; t < alone.weights.size(); ++t)
    for (std::size_t i = 0; i < alone.weights[t].size(); ++i) ASSERT_NEAR(traces[0].weights[t][i], alone.weights[t][i], 1e-5);
}

TEST(DataParallel, TheGradientIsTheSumOfLeavesInTheOrderOfRows) {
  Scratch scratch("dp-leaves");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const auto policy = make_policy(scratch.path, DType::kF32);
  nn::Parameters& parameters = policy->parameters();
  const ShardPlan plan(*parameters.table(), 1, false);
  const auto alone = comm::make_local_communicator();
  GradientExchange exchange(policy->context(), parameters, *alone, plan);
  const std::vector<wire::MicroBatch> rows = cross_entropy_rows(1, 4);
  const auto backward = [&](const wire::MicroBatch& row) {
    const std::vector<std::int32_t> targets = make_targets(row);
    policy->forward(row, targets);
    std::vector<float> dlogp;
    for (std::size_t i = 0; i < targets.size(); ++i) dlogp.push_back(targets[i] >= 0 ? -0.25f - 0.01f * static_cast<float>(i) : 0.0f);
    policy->backward(dlogp);
  };
  std::vector<float> wanted(static_cast<std::size_t>(parameters.all_grads().num_elements()));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    parameters.zero_grads();
    backward(rows[r]);
    const auto* leaf = parameters.all_grads().as<float>();
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = r == 0 ? leaf[i] : wanted[i] + leaf[i];
  }
  exchange.begin(4);
  for (const wire::MicroBatch& row : rows) {
    exchange.begin_leaf();
    backward(row);
    exchange.end_round();
  }
  const Tensor sum = exchange.finish();
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), sum.as<float>()));
}

TEST(DataParallel, ARowThatIsNotFiniteIsLeftOutOnAllRanks) {
  Scratch scratch("dp-nan");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const auto run_one = [&](comm::Mesh* mesh, bool gathers_layers) {
    const auto policy = make_policy(scratch.path, DType::kF32, false, gathers_layers);
    GradientStepOptions options;
    options.mesh = mesh;
    options.skip_non_finite_rows = true;
    GradientStep step(*policy, options);
    std::vector<wire::MicroBatch> rows = cross_entropy_rows(1, 5);
    rows[3].ce_weights.back() = std::numeric_limits<float>::quiet_NaN();
    const GradientStepResult result = step.run(rows, PolicyVersion{1});
    EXPECT_EQ(result.num_non_finite_rows, 1);
    return masters(*policy, step);
  };
  const auto alone = run_one(nullptr, false);
  for (const bool gathers_layers : {false, true}) {
    const auto store = comm::make_memory_store();
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 3; ++rank)
      threads.emplace_back([&, rank] {
        comm::Mesh mesh(comm::make_threads_communicator({.rank = rank, .size = 3, .store = store}));
        EXPECT_EQ(difference(run_one(&mesh, gathers_layers), alone), "");
      });
  }
}

/// What each of three ranks meets when it steps over `rows`, told by `met`; then a step over sound rows, if the group is sound.
void step_on_three(const fs::path& model, const config::LossConfig& loss, std::vector<wire::MicroBatch> rows,
                   const std::function<void(const Error&)>& met, bool gathers_layers = false) {
  comm::testing::run_threads("threads", 3, [&](comm::Communicator& group) {
    comm::Mesh mesh(group.subgroup(std::vector<int>{0, 1, 2}, "train", 0));
    const auto policy = make_policy(model, DType::kF32, false, gathers_layers);
    GradientStepOptions options;
    options.mesh = &mesh;
    options.loss = loss;
    GradientStep step(*policy, options);
    step.check_ranks();  // brings layers, which the checksum reads
    const std::uint64_t before = nn::checksum(*policy->weights()).combined;
    try {
      step.run(rows, PolicyVersion{1});
      ADD_FAILURE() << "a step over a row that is unsound";
    } catch (const SharedError& error) {
      met(error);
      EXPECT_EQ(nn::checksum(*policy->weights()).combined, before);
      EXPECT_TRUE(std::isfinite(step.run(cross_entropy_rows(1, 5), PolicyVersion{1}).loss)) << "the group goes on";
    } catch (const Error& error) {
      met(error);
    }
  });
}

TEST(DataParallel, ARowThatOneRankCannotTrainOnIsEveryRanksErrorAndTheGroupGoesOn) {
  Scratch scratch("dp-row");
  nn::init_model(model_of_several_chunks(), scratch.path);
  std::vector<wire::MicroBatch> rows = cross_entropy_rows(1, 5);
  rows[3].ce_weights.back() = std::numeric_limits<float>::quiet_NaN();
  std::atomic<int> num_met{0};
  for (const bool gathers_layers : {false, true})
    step_on_three(
        scratch.path, {}, rows,
        [&](const Error& error) {
          ++num_met;
          EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
          EXPECT_THAT(error.what(), HasSubstr("'env'"));
        },
        gathers_layers);
  EXPECT_EQ(num_met, 6);
  rows = cross_entropy_rows(1, 5);
  rows[2].input_ids.back() = 1 << 20;
  step_on_three(scratch.path, {}, rows, [&](const Error& error) {
    ++num_met;
    EXPECT_THAT(error.what(), HasSubstr("the vocabulary has"));
  });
  EXPECT_EQ(num_met, 9);
}

TEST(DataParallel, ADefectThatOneRankMeetsEndsTheGroupAndIsToldToTheOthers) {
  Scratch scratch("dp-error");
  nn::init_model(model_of_several_chunks(), scratch.path);
  std::atomic<int> num_own{0}, num_told{0};
  // One row, which rank 0 has, and no function that computes its loss.
  step_on_three(scratch.path, config::CustomLossConfig{}, cross_entropy_rows(1, 1), [&](const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("without the function"));
    ++(error.code() == ErrorCode::kPeerLost ? num_told : num_own);
  });
  EXPECT_EQ(num_own, 1);
  EXPECT_EQ(num_told, 2);
}

// Written by three ranks, read by one and by two: as if it had never stopped.
TEST(DataParallel, CheckpointsDoNotDependOnTheNumberOfRanks) {
  Scratch scratch("dp-ckpt");
  nn::init_model(model_of_several_chunks(), scratch.path / "model");
  for (const config::OptimConfig& optim : {with_lr<config::AdamWConfig>(1e-2), with_lr<config::MuonConfig>(1e-2)}) {
    const auto run_part = [&](int size, std::int64_t from, std::int64_t to, const std::string& name, bool gathers_layers = false) {
      std::vector<Weights> weights(static_cast<std::size_t>(size));
      comm::testing::run_threads("threads", size, [&](comm::Communicator& group) {
        std::vector<int> all;
        for (int r = 0; r < size; ++r) all.push_back(r);
        comm::Mesh mesh(group.subgroup(all, "train", 0));
        const auto policy = make_policy(scratch.path / "model", DType::kF32, false, gathers_layers);
        GradientStepOptions options;
        options.optim = optim;
        options.mesh = &mesh;
        GradientStep step(*policy, options);
        CheckpointOptions ckpt;
        ckpt.checkpoints = scratch.path / name / "checkpoints";
        ckpt.weights = scratch.path / name / "weights";
        ckpt.may_write = group.rank() == 0;
        group.barrier();
        TrainerCheckpoints checkpoints(ckpt);
        if (from > 0) (void)restore(ckpt.checkpoints, from, {}, *policy, step);
        for (std::int64_t i = from + 1; i <= to; ++i) step.run(cross_entropy_rows(i, 5), PolicyVersion{i});
        checkpoints.save(to, {}, *policy, step);
        checkpoints.finish();
        weights[static_cast<std::size_t>(group.rank())] = masters(*policy, step);
      });
      return weights;
    };
    const std::string tag = std::to_string(optim.index());
    const auto never_stopped = run_part(1, 0, 4, "whole" + tag);
    run_part(3, 0, 2, "cut" + tag);
    run_part(1, 0, 2, "one" + tag);
    run_part(3, 0, 2, "layers" + tag, true);
    const auto of = [&](const std::string& name) { return scratch.path / (name + tag) / "checkpoints/step_2/trainer"; };
    EXPECT_TRUE(fs::exists(of("cut") / "rank_2.safetensors"));
    EXPECT_FALSE(fs::exists(of("cut") / "model.safetensors"));
    EXPECT_EQ(read_file(of("cut") / "progress.json"), read_file(of("one") / "progress.json"));
    const auto table = nn::make_tensor_table(nn::load_model_config(scratch.path / "model"));
    expect_same_state(of("cut"), of("one"), *table);
    // The snapshot of three ranks: other files, the same tensors.
    const auto values = [&](const std::string& name) {
      const auto folder = io::SafetensorsFolder::open(scratch.path / (name + tag) / "weights/step_2");
      std::vector<std::pair<std::string, std::vector<std::byte>>> all;
      for (const auto& [tensor, ref] : folder.tensors()) {
        const auto bytes = ref.file->bytes(*ref.entry);
        all.emplace_back(tensor, std::vector<std::byte>(bytes.begin(), bytes.end()));
      }
      return all;
    };
    EXPECT_TRUE(fs::exists(scratch.path / ("cut" + tag) / "weights/step_2/model-00001-of-00002.safetensors"));
    EXPECT_TRUE(values("cut") == values("one"));
    EXPECT_TRUE(values("layers") == values("one"));
    expect_same_state(of("layers"), of("one"), *table);
    for (const char* name : {"cut", "one", "layers"})  // written by three ranks and by one
      for (const int size : {1, 2, 4}) {
        const auto resumed = run_part(size, 2, 4, name + tag, name == std::string("one") && size > 1);
        for (const Weights& weights : resumed) EXPECT_EQ(difference(weights, never_stopped[0]), "") << size << " ranks";
      }
  }
}

// The merged model and the adapter that ranks save whose base is divided are those of one rank; another number of them goes on.
TEST(GatheredLayers, WhatAdaptersOfThemSaveIsThatOfOneRank) {
  Scratch scratch("dp-layers-lora-ckpt");
  nn::init_model(model_of_several_chunks(), scratch.path / "model");
  const auto run_part = [&](int size, std::int64_t from, std::int64_t to, const std::string& name) {
    std::vector<Weights> weights(static_cast<std::size_t>(size));
    comm::testing::run_threads("threads", size, [&](comm::Communicator& group) {
      std::vector<int> all;
      for (int r = 0; r < size; ++r) all.push_back(r);
      comm::Mesh mesh(group.subgroup(all, "train", 0));
      const auto policy = make_policy(scratch.path / "model", DType::kBF16, false, size > 1, {}, false, small_adapter());
      GradientStepOptions options;
      options.optim = with_lr<config::AdamWConfig>(1e-2);
      options.mesh = &mesh;
      GradientStep step(*policy, options);
      CheckpointOptions ckpt;
      ckpt.checkpoints = scratch.path / name / "checkpoints";
      ckpt.weights = scratch.path / name / "weights";
      ckpt.save_adapter = true;
      ckpt.may_write = group.rank() == 0;
      group.barrier();
      TrainerCheckpoints checkpoints(ckpt);
      if (from > 0) (void)restore(ckpt.checkpoints, from, {}, *policy, step);
      for (std::int64_t i = from + 1; i <= to; ++i) step.run(cross_entropy_rows(i, 5), PolicyVersion{i});
      checkpoints.save(to, {}, *policy, step);
      checkpoints.finish();
      weights[static_cast<std::size_t>(group.rank())] = masters(*policy, step);
    });
    return weights;
  };
  const auto never_stopped = run_part(1, 0, 4, "whole");
  run_part(1, 0, 2, "one");
  run_part(3, 0, 2, "layers");
  const auto values = [&](const fs::path& of) {
    const auto folder = io::SafetensorsFolder::open(scratch.path / of);
    std::vector<std::pair<std::string, std::vector<std::byte>>> all;
    for (const auto& [tensor, ref] : folder.tensors()) {
      const auto bytes = ref.file->bytes(*ref.entry);
      all.emplace_back(tensor, std::vector<std::byte>(bytes.begin(), bytes.end()));
    }
    return all;
  };
  EXPECT_TRUE(values("layers/weights/step_2") == values("one/weights/step_2"));
  EXPECT_FALSE(values("layers/weights/step_2") == values("model")) << "the adapter is merged";
  const auto adapter = [&](const std::string& of) {
    return read_file(scratch.path / of / "weights/step_2/lora_adapters/adapter_model.safetensors");
  };
  EXPECT_EQ(adapter("layers"), adapter("one"));
  for (const auto& [name, size] : {std::pair{"one", 2}, {"layers", 1}, {"layers", 2}})
    for (const Weights& weights : run_part(size, 2, 4, name)) EXPECT_EQ(difference(weights, never_stopped[0]), "") << name << ", " << size;
}

TEST(ShardPlan, PartsFollowOneAnotherAndChunksDoNotDependOnThem) {
  for (const bool keeps_blocks : {false, true}) {
    nn::ModelConfig config;
    Scratch scratch("dp-plan");
    nn::init_model(model_of_several_chunks(), scratch.path);
    const auto table = nn::make_tensor_table(nn::load_model_config(scratch.path));
    const ShardPlan one(*table, 1, keeps_blocks);
    EXPECT_EQ(one.elements(0), ElementRanges(ElementRange{0, table->num_master_elements()}));
    for (const int size : {2, 3, 8, 40}) {
      const ShardPlan plan(*table, size, keeps_blocks);
      EXPECT_TRUE(std::ranges::equal(plan.chunks(), one.chunks()));
      std::int64_t at = 0;
      for (const ShardPlan::Section& section : plan.sections()) {
        EXPECT_EQ(section.range.begin, at);
        ASSERT_EQ(section.parts.size(), static_cast<std::size_t>(size));
        for (int r = 0; r < size; ++r) {
          const ElementRange part = section.parts[static_cast<std::size_t>(r)];
          EXPECT_EQ(part.begin, at);
          EXPECT_TRUE(plan.elements(r).contains(part));
          at = part.end;
        }
        EXPECT_EQ(section.range.end, at);
      }
      std::vector<std::size_t> chunks_of_all;
      for (int r = 0; r < size; ++r) {
        std::int64_t of_chunks = 0;
        for (const std::size_t chunk : plan.chunks_of(r)) {
          chunks_of_all.push_back(chunk);
          of_chunks += plan.chunks()[chunk].count();
          EXPECT_TRUE(plan.elements(r).contains(plan.chunks()[chunk]));
        }
        EXPECT_EQ(of_chunks, plan.elements(r).count());
        if (!keeps_blocks) continue;
        for (const nn::BlockSpec& block : table->blocks()) {
          const ElementRange whole{block.offset, block.offset + block.shape.num_elements()};
          const std::int64_t part = plan.part(r, whole).count();
          EXPECT_TRUE(part == 0 || part == whole.count());
        }
      }
      EXPECT_EQ(at, table->num_master_elements());
      std::ranges::sort(chunks_of_all);
      EXPECT_TRUE(std::ranges::equal(chunks_of_all, one.chunks_of(0)));
    }
  }
}

// Of each layer, so that none sends nearly all of it to one: an exchange takes as long as the largest part.
TEST(ShardPlan, EachRankOwnsAboutAsMuchOfEachSection) {
  nn::ModelConfig config;
  Scratch scratch("dp-even");
  nn::InitModelOptions model = tiny_model();
  model.hidden_size = 256;
  model.intermediate_size = 1024;
  model.num_heads = 8;
  model.num_layers = 3;
  model.vocab_size = 4000;
  nn::init_model(model, scratch.path);
  const auto table = nn::make_tensor_table(nn::load_model_config(scratch.path));
  for (const int size : {2, 3, 4, 8}) {
    const ShardPlan plan(*table, size, false);
    ASSERT_EQ(plan.sections().size(), 5u) << "the embedding, the layers, the head";
    for (const nn::GradSection& section : nn::grad_sections(*table))
      for (int r = 0; r < size; ++r)
        EXPECT_NEAR(static_cast<double>(plan.part(r, section.range).count()), static_cast<double>(section.range.count()) / size,
                    static_cast<double>(ShardPlan::kChunkElements))
            << size << " ranks";
    EXPECT_LE(plan.longest(), table->num_master_elements() / size + 5 * ShardPlan::kChunkElements);
  }
}

TEST(BalancedOrder, CostliestFirstAndEqualOnesInTheirOrder) {
  Scratch scratch("dp-order");
  nn::init_model(model_of_several_chunks(), scratch.path);
  const nn::ModelConfig config = nn::load_model_config(scratch.path);
  std::vector<wire::MicroBatch> rows = cross_entropy_rows(1, 6);
  rows[5] = rows[2];
  const std::vector<std::size_t> order = balanced_order(config, rows);
  std::vector<double> costs;
  for (const std::size_t i : order) costs.push_back(training_flops(config, rows[i], make_targets(rows[i])));
  EXPECT_TRUE(std::ranges::is_sorted(costs, std::greater<>()));
  EXPECT_LT(std::ranges::find(order, 2u), std::ranges::find(order, 5u));
}

}  // namespace
}  // namespace prl::trainer
