// What saves memory changes no bit of a run: on the CPU, and compiled a second time on a GPU with memory of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.hpp"
#include "device/testing/lazy_host_link.hpp"
#include "device/testing/test_runtime.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using testing_support::Scratch;

std::vector<float> to_host(const Tensor& tensor) {
  const std::int64_t n = tensor.num_elements();
  std::vector<float> out(static_cast<std::size_t>(n));
  if (tensor.dtype() == DType::kF32) {
    tensor.runtime()->copy_to_host(out.data(), tensor.data(), tensor.num_bytes());
    return out;
  }
  std::vector<std::uint16_t> halves(out.size());
  tensor.runtime()->copy_to_host(halves.data(), tensor.data(), tensor.num_bytes());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(halves[i]) << 16);
  return out;
}

/// Deep enough for layers to lose their place on the device.
void make_deep_model(const std::filesystem::path& folder) {
  nn::InitModelOptions options = testing_support::tiny_model();
  options.num_layers = 5;
  options.tie_word_embeddings = true;
  nn::init_model(options, folder);
}

/// A row of several sequences that all train.
wire::MicroBatch random_row(std::uint64_t seed) {
  Rng rng(seed);
  wire::MicroBatch row;
  for (const std::int32_t n : {20, 3, 41}) {
    row.sequence_lengths.push_back(n);
    row.env_names.emplace_back("env");
    for (std::int32_t p = 0; p < n; ++p) {
      row.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(96)));
      row.loss_mask.push_back(p >= 1);
      row.position_ids.push_back(p);
      row.advantages.push_back(static_cast<float>(rng.next_normal()));
      row.temperatures.push_back(1.0f);
      row.inference_logprobs.push_back(-4.5f);
    }
  }
  return row;
}

/// One training run whose memory is arranged in some way.
class TrainingRun {
 public:
  struct Options {
    config::OptimConfig optim = config::AdamWConfig{.lr = 1e-2};
    OptimizerMemory memory = {};
    PolicyOptions policy = {};
    bool offload_optimizer = false, is_lazy = false, offload_masters = false;
    int offload_inflight = 0;  ///< activations; 0: they stay
  };
  TrainingRun(const std::filesystem::path& folder, Options options) : runtime_(make_test_runtime()) {
    if (!std::filesystem::exists(folder / "config.json")) make_deep_model(folder);
    options.policy.model = folder;
    options.policy.compute = DType::kBF16;
    options.policy.num_threads = 1;
    if (options.offload_inflight > 0) options.policy.offload = {make_link(options.is_lazy), options.offload_inflight};
    if (options.offload_masters) options.policy.masters_host = make_link(options.is_lazy);
    policy_ = std::make_unique<Policy>(runtime_, options.policy);
    options.memory.holds_masters = options.offload_masters;
    if (options.offload_optimizer || options.offload_masters) options.memory.host = make_link(options.is_lazy);
    step_ = std::make_unique<GradientStep>(*policy_, GradientStepOptions{.optim = options.optim, .optimizer_memory = options.memory});
  }
  void train(int num_steps) {
    for (int i = 0; i < num_steps; ++i, ++done_) {
      const auto seed = static_cast<std::uint64_t>(10 * done_);
      const wire::MicroBatch rows[] = {random_row(seed), random_row(seed + 1)};
      losses_.push_back(static_cast<float>(step_->run(rows, PolicyVersion{done_ + 1}).loss));
    }
  }
  /// Losses, masters and optimizer state.
  std::vector<std::vector<float>> results() const {
    std::vector<std::vector<float>> all{losses_};
    for (const nn::NamedParameter& p : policy_->parameters().named()) all.push_back(to_host(p.value));
    for (const io::NamedTensor& s : step_->optimizer().state()) all.push_back(to_host(s.tensor));
    return all;
  }
  Policy& policy() { return *policy_; }
  GradientStep& step() { return *step_; }

 private:
  std::shared_ptr<HostLink> make_link(bool is_lazy) {
    if (is_lazy && !tests_gpu()) return std::make_shared<LazyHostLink>(runtime_);
    return make_host_link(runtime_, /*page_locked=*/true);
  }
  std::shared_ptr<DeviceRuntime> runtime_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<GradientStep> step_;
  std::int64_t done_ = 0;
  std::vector<float> losses_;
};

std::vector<std::vector<float>> trained(const std::filesystem::path& folder, const TrainingRun::Options& options) {
  TrainingRun run(folder, options);
  run.train(3);
  return run.results();
}

// Pieces of odd sizes, and copies that run as late as they may: a piece that is not waited for, or overwritten too early, shows.
TEST(MemoryOptions, OptimizerStateInHostMemoryChangesNoBit) {
  Scratch scratch("offload");
  const config::OptimConfig all[] = {config::AdamWConfig{.lr = 1e-2}, config::SgdConfig{.lr = 1e-2}, config::MuonConfig{.lr = 1e-2},
                                     config::SignSgdConfig{.lr = 1e-3}};
  for (const config::OptimConfig& optim : all)
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const bool has_bf16 = std::holds_alternative<config::AdamWConfig>(optim) || std::holds_alternative<config::SignSgdConfig>(optim);
      if (dtype == DType::kBF16 && !has_bf16) continue;
      TrainingRun::Options options{.optim = optim, .memory = {.dtype = dtype}};
      const auto wanted = trained(scratch.path / "model", options);
      for (const std::int64_t piece : {1000, 1 << 20})
        for (const bool is_lazy : {false, true}) {
          options = {.optim = optim, .memory = {.dtype = dtype, .piece_elements = piece}, .offload_optimizer = true, .is_lazy = is_lazy};
          EXPECT_TRUE(trained(scratch.path / "model", options) == wanted)
              << optim.index() << ' ' << to_string(dtype) << ", pieces of " << piece << (is_lazy ? ", late copies" : "");
        }
    }
}

TEST(MemoryOptions, MastersInHostMemoryChangeNoBit) {
  Scratch scratch("masters");
  for (const config::OptimConfig& optim :
       {config::OptimConfig(config::AdamWConfig{.lr = 1e-2}), config::OptimConfig(config::SgdConfig{.lr = 1e-2}),
        config::OptimConfig(config::SignSgdConfig{.lr = 1e-3})}) {
    const auto wanted = trained(scratch.path / "model", {.optim = optim});
    for (const bool is_lazy : {false, true}) {
      const TrainingRun::Options options{.optim = optim, .memory = {.piece_elements = 1000}, .is_lazy = is_lazy, .offload_masters = true};
      EXPECT_TRUE(trained(scratch.path / "model", options) == wanted) << optim.index() << (is_lazy ? ", late copies" : "");
    }
  }
  if (!tests_gpu()) return;  // a CPU counts what lies in host memory as its own
  const auto bytes_of = [&](bool offload_masters) {
    TrainingRun run(scratch.path / "model", {.memory = {.piece_elements = 1000}, .offload_masters = offload_masters});
    return run.policy().context().runtime->bytes_in_use();
  };
  const std::size_t masters = TrainingRun(scratch.path / "model", {}).policy().parameters().held_values().num_bytes();
  const std::size_t saved = bytes_of(false) - bytes_of(true);
  EXPECT_GE(saved, 3 * masters) << "masters and two moments";
  EXPECT_LT(saved, 3 * masters + 4096) << "what allocations are rounded up by";
}

TEST(MemoryOptions, RecomputedAndOffloadedActivationsChangeNoBit) {
  Scratch scratch("activations");
  const auto wanted = trained(scratch.path / "model", {});
  for (const nn::ActivationCheckpointing& checkpointing : {nn::ActivationCheckpointing{}, {1}, {2, {.norm = true, .mlp = true}}})
    for (const bool is_lazy : {false, true})
      for (const bool offload_optimizer : {false, true}) {
        TrainingRun::Options options{.memory = {.piece_elements = 3000}, .offload_optimizer = offload_optimizer, .is_lazy = is_lazy};
        options.policy.checkpointing = checkpointing;
        options.offload_inflight = 1;
        EXPECT_TRUE(trained(scratch.path / "model", options) == wanted)
            << "freq " << checkpointing.freq << (is_lazy ? ", late copies" : "") << (offload_optimizer ? ", all options" : "");
      }
}

// What a run reserves is what its steps use.
TEST(MemoryOptions, StepsOfReservedLengthTakeNoMoreMemory) {
  Scratch scratch("reserve");
  TrainingRun::Options options{.offload_optimizer = true, .offload_inflight = 2};
  options.policy.checkpointing = {1, {.norm = true}};
  TrainingRun run(scratch.path / "model", options);
  EXPECT_GT(run.policy().reserve(64), 0u);
  run.train(1);
  const std::size_t in_use = run.policy().context().runtime->bytes_in_use();
  run.train(2);
  EXPECT_EQ(run.policy().context().runtime->bytes_in_use(), in_use);
}

// The step that reserves is no larger than those it reserves for: a plan that fits must not fail on the way to its first step.
TEST(MemoryOptions, ReservingTakesLittleMoreThanItKeeps) {
  Scratch scratch("peak");
  for (const int freq : {0, 1}) {
    TrainingRun::Options options;
    options.policy.checkpointing = {freq, {}};
    TrainingRun run(scratch.path / "model", options);
    const DeviceRuntime& runtime = *run.policy().context().runtime;
    const std::size_t kept = run.policy().reserve(20000), peak = runtime.peak_bytes() - runtime.bytes_in_use();
    EXPECT_GT(kept, std::size_t{16} << 20) << "too little to tell";
    EXPECT_LT(peak, kept / 20) << "freq " << freq << ", of " << kept;
  }
}

TEST(MemoryOptions, StateInBf16TakesHalfAndFollowsTheRunInFp32) {
  Scratch scratch("bf16");
  TrainingRun wide(scratch.path / "model", {}), narrow(scratch.path / "model", {.memory = {.dtype = DType::kBF16}});
  EXPECT_EQ(2 * narrow.step().optimizer().state_bytes(), wide.step().optimizer().state_bytes());
  wide.train(5);
  narrow.train(5);
  const auto a = wide.results(), b = narrow.results();
  double moved = 0, apart = 0, count = 0;
  TrainingRun untrained(scratch.path / "model", {});
  const auto start = untrained.results();
  for (std::size_t t = 1; t <= wide.policy().parameters().named().size(); ++t)
    for (std::size_t i = 0; i < a[t].size(); ++i) {
      moved += std::abs(static_cast<double>(a[t][i]) - start[t][i]);
      apart += std::abs(static_cast<double>(a[t][i]) - b[t][i]);
      ++count;
    }
  EXPECT_GT(apart, 0) << "the state was not rounded";
  EXPECT_LT(apart, 0.05 * moved) << "over " << count << " masters";
}

TEST(MemoryOptions, StateInBf16IsForAdamW) {
  Scratch scratch("refuse");
  EXPECT_THROW(TrainingRun(scratch.path / "model", {.optim = config::MuonConfig{}, .memory = {.dtype = DType::kBF16}}), Error);
  EXPECT_THROW(TrainingRun(scratch.path / "model", {.optim = config::SgdConfig{}, .memory = {.dtype = DType::kBF16}}), Error);
}

/// What a kill leaves is removed by a resume, which goes by these names.
void expect_temporary_names(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const std::size_t mark = name.rfind(".tmp-");
    if (mark == std::string::npos) continue;
    EXPECT_EQ(name.find_first_not_of("0123456789-", mark + 5), std::string::npos) << name;
  }
}

TEST(MemoryOptions, ACheckpointOfOffloadedStateResumesBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Scratch scratch("resume");
    const TrainingRun::Options options{.memory = {.dtype = dtype, .piece_elements = 777}, .offload_optimizer = true};
    const auto wanted = trained(scratch.path / "model", options);
    CheckpointOptions checkpoint;
    checkpoint.checkpoints = scratch.path / "checkpoints";
    checkpoint.weights = scratch.path / "weights";
    for (const bool save_async : {false, true}) {
      checkpoint.save_async = save_async;
      TrainingRun first(scratch.path / "model", options), second(scratch.path / "model", options);
      first.train(2);
      second.train(1);  // what it holds now must not matter
      TrainerCheckpoints saver(checkpoint);
      saver.save(2, {}, first.policy(), first.step(), [&] {
        if (!save_async) expect_temporary_names(checkpoint.weights);
      });
      saver.finish();
      restore(checkpoint.checkpoints, 2, {}, second.policy(), second.step());
      first.train(1);
      second.train(0);
      const wire::MicroBatch rows[] = {random_row(20), random_row(21)};
      second.step().run(rows, PolicyVersion{3});
      auto got = second.results(), same = first.results();
      EXPECT_TRUE(same == wanted);
      got[0] = wanted[0];  // its losses are of fewer steps
      EXPECT_TRUE(got == wanted) << to_string(dtype) << (save_async ? " saved in the background" : "");
    }
  }
}

}  // namespace
}  // namespace prl::trainer
