#include "trainer/rl_trainer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/files.hpp"
#include "base/rng.hpp"
#include "io/checkpoint_dir.hpp"
#include "rollouts/local_queue.hpp"
#include "trainer/fake_rollouts.hpp"
#include "trainer/metrics.hpp"
#include "trainer/test_support.hpp"
#include "wire/packing.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

GradientStepOptions step_options(std::int64_t max_steps) {
  config::AdamWConfig adamw;
  adamw.lr = 1e-3;
  config::LinearScheduler linear;
  linear.warmup_steps = 2, linear.decay_steps = 3;
  GradientStepOptions options;
  options.optim = adamw;
  options.scheduler = linear;
  options.max_steps = max_steps;
  return options;
}

RlRunOptions run_options(const fs::path& root, std::int64_t max_steps) {
  RlRunOptions options;
  options.step = step_options(10);
  options.step.max_steps = max_steps;
  options.seq_len = 48;
  options.checkpoint.emplace();
  options.checkpoint->checkpoints = root / "checkpoints";
  options.checkpoint->weights = root / "weights";
  return options;
}

ReceiverFactory fake_data(bool documents = false) {
  return [=](std::int64_t first_step) {
    return make_fake_rollouts(
        {.num_micro_batches = 2, .seq_len = 48, .vocab_size = 96, .generate_samples = documents, .first_step = first_step, .rank = 0});
  };
}

/// A monitor with the declared metrics and what it saw.
struct Recorder {
  monitor::Monitor monitor{trainer_metrics()};
  std::vector<monitor::Metrics> steps;
  Recorder() {
    monitor.add_sink(monitor::make_callback_sink([this](std::int64_t, const monitor::Metrics& m) { steps.push_back(m); }));
  }
};

rollouts::RankBatch make_batch(std::int64_t step, std::vector<wire::MicroBatch> rows) {
  rollouts::RankBatch batch;
  batch.step = step;
  batch.micro_batches = std::move(rows);
  return batch;
}

TEST(RlTrainer, ResumeEqualsUninterruptedBitForBit) {
  for (const bool is_async : {false, true}) {
    Scratch scratch("resume");
    const auto whole = make_tiny_policy(scratch.path / "model");
    Recorder one, two, three;
    RlRunOptions options = run_options(scratch.path / "a", 10);
    run_rl_trainer(options, *whole, fake_data(true), nullptr, one.monitor, {});

    options = run_options(scratch.path / "b", 10);
    options.checkpoint->interval = 5;
    options.checkpoint->save_async = is_async;
    // The first half ends as a killed run would: after the checkpoint of step 5, with max_steps still 10.
    std::stop_source stop;
    auto first = make_tiny_policy(scratch.path / "model");
    two.monitor.add_sink(monitor::make_callback_sink([&](std::int64_t step, const monitor::Metrics&) {
      if (step == 5) stop.request_stop();
    }));
    const TrainRunResult half = run_rl_trainer(options, *first, fake_data(true), nullptr, two.monitor, stop.get_token());
    EXPECT_TRUE(half.was_stopped);
    EXPECT_EQ(half.last_checkpoint, 5);
    first.reset();

    const auto second = make_tiny_policy(scratch.path / "model");
    options.resume.emplace();
    const TrainRunResult rest = run_rl_trainer(options, *second, fake_data(true), nullptr, three.monitor, {});
    EXPECT_EQ(rest.last_step, 10);
    EXPECT_EQ(masters(*whole), masters(*second));
    ASSERT_EQ(three.steps.size(), 5u);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(one.steps[5 + i].at("loss/mean"), three.steps[i].at("loss/mean"));
      EXPECT_EQ(one.steps[5 + i].at("optim/lr"), three.steps[i].at("optim/lr"));
      EXPECT_EQ(one.steps[5 + i].at("progress/total_tokens"), three.steps[i].at("progress/total_tokens"));
    }
    // The snapshot is the trained policy, and serves as a model.
    const auto served = make_tiny_policy(scratch.path / "b" / "weights" / "step_10");
    EXPECT_EQ(nn::checksum(*served->weights()).combined, nn::checksum(*second->weights()).combined);
  }
}

TEST(RlTrainer, RecomputedActivationsChangeNoBit) {
  Scratch scratch("ac");
  RlRunOptions options = run_options(scratch.path, 3);
  options.step.scheduler = config::ConstantScheduler{};
  options.checkpoint.reset();
  const auto trained = [&](const nn::ActivationCheckpointing& checkpointing) {
    const auto policy = make_tiny_policy(scratch.path / "model", DType::kF32, checkpointing);
    Recorder recorder;
    run_rl_trainer(options, *policy, fake_data(), nullptr, recorder.monitor, {});
    return masters(*policy);
  };
  const auto plain = trained({});
  EXPECT_EQ(trained({1}), plain);
  EXPECT_EQ(trained({1, {.norm = true, .attn_proj = true, .mlp = true}}), plain);
}

/// A row whose sampler log-probabilities are the policy's own.
wire::MicroBatch on_policy_row(Policy& policy, std::uint64_t seed, std::vector<std::int32_t> lengths, float advantage) {
  Rng rng(seed);
  wire::MicroBatch row;
  for (const std::int32_t n : lengths) {
    row.sequence_lengths.push_back(n);
    row.env_names.push_back("env");
    for (std::int32_t p = 0; p < n; ++p) {
      row.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(96)));
      row.loss_mask.push_back(p >= 3);
      row.position_ids.push_back(p);
      row.advantages.push_back(p % 2 == 0 ? advantage : -advantage);
      row.temperatures.push_back(0.8f);
    }
  }
  row.inference_logprobs.assign(row.input_ids.size(), 0.0f);
  const nn::TokenStats stats = policy.evaluate(row, make_targets(row));
  for (std::size_t i = 1; i < row.input_ids.size(); ++i)
    if (row.loss_mask[i] != 0) row.inference_logprobs[i] = stats.logp_T[i - 1];
  return row;
}

TEST(RlTrainer, MismatchIsExactlyZeroInLockStep) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    Scratch scratch("lockstep");
    const auto policy = make_tiny_policy(scratch.path / "model", compute);
    RlTrainer trainer(*policy, step_options(10), 64, 0);
    for (std::int64_t step = 1; step <= 3; ++step) {
      // Sampled alone, trained in one row with others.
      wire::MicroBatch row = on_policy_row(*policy, static_cast<std::uint64_t>(step), {20, 13, 9}, 1.0f);
      std::size_t first = 0;
      for (const std::int32_t n : row.sequence_lengths) {
        wire::MicroBatch alone = on_policy_row(*policy, 1, {n}, 1.0f);
        std::copy_n(row.input_ids.begin() + static_cast<std::ptrdiff_t>(first), n, alone.input_ids.begin());
        const nn::TokenStats stats = policy->evaluate(alone, make_targets(alone));
        for (std::int32_t i = 3; i < n; ++i)
          row.inference_logprobs[first + static_cast<std::size_t>(i)] = stats.logp_T[static_cast<std::size_t>(i) - 1];
        first += static_cast<std::size_t>(n);
      }
      const monitor::Metrics metrics = trainer.step(make_batch(step, {row}));
      EXPECT_EQ(metrics.at("mismatch_kl/all/max"), 0.0) << "step " << step;
      EXPECT_EQ(metrics.at("mismatch_kl/env/mean"), 0.0);
      EXPECT_GT(metrics.at("entropy/all/mean"), 0.0);
      EXPECT_GT(metrics.at("optim/grad_norm"), 0.0);
    }
  }
}

// How sequences are split into rows does not change the step: same loss, same gradient norm up to rounding.
TEST(RlTrainer, SplittingRowsChangesNothing) {
  Scratch scratch("split");
  const auto a = make_tiny_policy(scratch.path / "model"), b = make_tiny_policy(scratch.path / "model");
  const wire::MicroBatch one = on_policy_row(*a, 1, {30}, 2.0f), two = on_policy_row(*a, 2, {7}, -1.0f);
  wire::MicroBatch both = one;
  const auto join = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  join(both.input_ids, two.input_ids), join(both.loss_mask, two.loss_mask), join(both.advantages, two.advantages),
      join(both.inference_logprobs, two.inference_logprobs);
  join(both.position_ids, two.position_ids), join(both.sequence_lengths, two.sequence_lengths), join(both.temperatures, two.temperatures),
      join(both.env_names, two.env_names);
  RlTrainer first(*a, step_options(10), 64, 0), second(*b, step_options(10), 64, 0);
  const monitor::Metrics x = first.step(make_batch(1, {one, two})), y = second.step(make_batch(1, {both}));
  EXPECT_NEAR(x.at("loss/mean"), y.at("loss/mean"), 1e-12);
  EXPECT_NEAR(x.at("optim/grad_norm"), y.at("optim/grad_norm"), 1e-5 * y.at("optim/grad_norm"));
}

// A rewarded sequence becomes likelier, a punished one less likely.
TEST(RlTrainer, StepsFollowTheAdvantage) {
  Scratch scratch("advantage");
  for (const float advantage : {1.0f, -1.0f}) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    GradientStepOptions options = step_options(10);
    options.scheduler = config::ConstantScheduler{};
    RlTrainer trainer(*policy, options, 64, 0);
    wire::MicroBatch row = on_policy_row(*policy, 5, {40}, 1.0f);
    std::fill(row.advantages.begin(), row.advantages.end(), advantage);
    const auto mean_logp = [&] {
      const nn::TokenStats stats = policy->evaluate(row, make_targets(row));
      double sum = 0;
      for (const float l : stats.logp_T) sum += l;
      return sum;
    };
    const double before = mean_logp();
    for (std::int64_t step = 1; step <= 5; ++step) trainer.step(make_batch(step, {row}));
    EXPECT_GT(advantage * (mean_logp() - before), 0.1);
  }
}

TEST(RlTrainer, RouterReplayNeedsTheExpertsOfSampledTokens) {
  Scratch scratch("replay");
  nn::InitModelOptions shape = tiny_model();
  shape.family = "qwen3_moe";
  shape.num_experts = 4;
  shape.num_active_experts = 2;
  shape.expert_size = 16;
  nn::init_model(shape, scratch.path / "model");
  PolicyOptions options;
  options.model = scratch.path / "model";
  options.num_threads = 1;
  options.replays_routes = true;
  Policy policy(make_cpu_runtime(), options);
  RlTrainer trainer(policy, step_options(10), 16, 0);
  const auto reason = [&](const wire::MicroBatch& row) -> std::string {
    try {
      trainer.step(make_batch(trainer.progress().step + 1, {row}));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  wire::MicroBatch row = on_policy_row(policy, 1, {10}, 1.0f);
  EXPECT_THAT(reason(row), ::testing::AllOf(HasSubstr("environment 'env'"), HasSubstr("enable_return_routed_experts")));
  const auto layers = static_cast<std::int64_t>(shape.num_layers);
  row.routed_experts = {.start = 0, .num_layers = layers, .top_k = 2, .ids = {}};
  row.routed_experts.resize(10);
  EXPECT_THAT(reason(row), HasSubstr("does not say which experts")) << "nothing is known of any token";
  for (std::size_t i = 0; i < row.routed_experts.ids.size(); ++i) row.routed_experts.ids[i] = static_cast<std::uint16_t>(i % 2 + 1);
  wire::MicroBatch wrong = row;
  wrong.routed_experts.ids[3] = 4;
  EXPECT_THAT(reason(wrong), HasSubstr("names expert 4, the model has 4"));
  wrong = row;
  wrong.routed_experts.num_layers *= 2;
  wrong.routed_experts.top_k = 1;
  EXPECT_THAT(reason(wrong), HasSubstr("1 experts per token in"));
  const auto before = masters(policy);
  EXPECT_EQ(reason(row), "accepted");
  EXPECT_NE(masters(policy), before);
  options.model = scratch.path / "dense";
  nn::init_model(tiny_model(), options.model);
  EXPECT_THROW(Policy(make_cpu_runtime(), options), Error) << "a model without routers";
}

TEST(Policy, BalancedRoutesGiveEachExpertAsManyTokens) {
  Scratch scratch("balanced");
  nn::InitModelOptions shape = tiny_model();
  shape.family = "qwen3_moe";
  shape.num_experts = 8;
  shape.num_active_experts = 2;
  shape.expert_size = 16;
  nn::init_model(shape, scratch.path / "model");
  PolicyOptions options;
  options.model = scratch.path / "model";
  options.num_threads = 1;
  Policy routed(make_cpu_runtime(), options);
  options.balances_routes = true;
  Policy policy(make_cpu_runtime(), options);
  const wire::MicroBatch row = on_policy_row(routed, 1, {9, 7}, 1.0f);  // 16 tokens of 2 experts each: 4 for each of 8
  const std::vector<std::int32_t> targets = make_targets(row);
  const auto counts = [&](Policy& of) {
    std::vector<std::vector<std::int64_t>> out;
    for (const autograd::ExpertLoad& load : of.forward(row, targets).expert_loads) out.push_back(load.tokens_of_expert);
    of.backward(std::vector<float>(targets.size(), 0.0f));
    return out;
  };
  const std::vector<std::vector<std::int64_t>> wanted(static_cast<std::size_t>(shape.num_layers), std::vector<std::int64_t>(8, 4));
  EXPECT_NE(counts(routed), wanted);
  EXPECT_EQ(counts(policy), wanted);
  const std::vector<float> trained = policy.forward(row, targets).logp_T;
  policy.backward(std::vector<float>(targets.size(), 0.0f));
  EXPECT_EQ(policy.evaluate(row, targets).logp_T, trained) << "a validation is of the same model";
  // A row that is cut in parts has the same experts as one that is whole.
  policy.share_rows({.num_leaves = 2, .num_ranks = 1}, nullptr);
  EXPECT_EQ(counts(policy), wanted);
}

TEST(RlTrainer, RefusesWrongBatches) {
  Scratch scratch("wrong");
  const auto policy = make_tiny_policy(scratch.path / "model");
  RlTrainer trainer(*policy, step_options(10), 16, 0);
  const wire::MicroBatch row = on_policy_row(*policy, 1, {10}, 1.0f);
  const auto reason = [&](rollouts::RankBatch batch) -> std::string {
    try {
      trainer.step(batch);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(reason(make_batch(2, {row})), HasSubstr("samples are of step 2"));
  EXPECT_THAT(reason(make_batch(1, {on_policy_row(*policy, 1, {17}, 1.0f)})), HasSubstr("17 tokens"));
  wire::MicroBatch broken = row;
  broken.advantages[5] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(reason(make_batch(1, {broken})), ::testing::AllOf(HasSubstr("step 1"), HasSubstr("'env'")));
  broken = row;
  broken.inference_logprobs[5] = 0.75f;
  EXPECT_THAT(reason(make_batch(1, {broken})),
              ::testing::AllOf(HasSubstr("inference_logprobs is 0.75 at token 5"), HasSubstr("'env'"), HasSubstr("at most 0")));
  broken = row;
  broken.inference_logprobs[5] = -1e5f;  // finite, but the ratio is not
  const auto before = masters(*policy);
  EXPECT_THAT(reason(make_batch(1, {broken})), ::testing::AllOf(HasSubstr("step 1"), HasSubstr("'env'"), HasSubstr("token 5")));
  EXPECT_EQ(masters(*policy), before) << "a failed step leaves the masters alone";
  EXPECT_EQ(reason(make_batch(1, {row})), "accepted");
}

TEST(RunRlTrainer, PublishesEveryVersionWithItsProof) {
  Scratch scratch("publish");
  const auto policy = make_tiny_policy(scratch.path / "model");
  const auto channel = weights::make_file_channel({.folder = scratch.path / "broadcasts", .keep_versions = 100, .keep_interval = {}});
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 6);
  options.broadcasts = scratch.path / "broadcasts";
  fs::create_directories(scratch.path / "broadcasts" / "step_4");
  write_file_atomic(scratch.path / "broadcasts" / "step_4" / "STABLE", "");  // of an earlier run
  run_rl_trainer(options, *policy, fake_data(), channel.get(), recorder.monitor, {});
  for (std::int64_t version = 0; version <= 6; ++version) {
    const fs::path folder = scratch.path / "broadcasts" / fmt::format("step_{}", version);
    ASSERT_TRUE(fs::exists(folder / "STABLE")) << version;
    const weights::WeightManifest manifest = weights::parse_manifest(read_file(folder / "manifest.json"), "test");
    EXPECT_EQ(manifest.version.value, version);
    // An engine that loads the folder computes the same checksum and probe.
    const auto engine = make_tiny_policy(folder);
    weights::WeightManifest own = engine->manifest();
    EXPECT_FALSE(weights::verify_proof(manifest, {manifest.version, own.checksum, own.probe_logprobs}).has_value()) << version;
    // One damaged weight is seen.
    engine->parameters().named()[3].value.as<float>()[0] += 0.5f;
    engine->refresh(PolicyVersion{version});
    own = engine->manifest();
    EXPECT_TRUE(weights::verify_proof(manifest, {manifest.version, own.checksum, own.probe_logprobs}).has_value());
  }
  EXPECT_EQ(recorder.steps.size(), 6u);
  EXPECT_GT(recorder.steps[0].at("time/broadcast_weights"), 0);
}

TEST(RunRlTrainer, LocalChannelHandsOverTheVeryWeights) {
  Scratch scratch("local");
  const auto policy = make_tiny_policy(scratch.path / "model");
  const auto channel = weights::make_local_channel();
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 5);
  options.checkpoint.reset();
  run_rl_trainer(options, *policy, fake_data(), channel.get(), recorder.monitor, {});
  const auto latest = channel->latest();
  ASSERT_TRUE(latest.has_value());
  EXPECT_EQ(latest->manifest.version.value, 5);
  EXPECT_EQ(latest->handle.get(), policy->weights().get());
  EXPECT_EQ(latest->manifest.checksum, nn::checksum(*policy->weights()).combined);
}

TEST(RunRlTrainer, AStopThatEndsTheSamplesBeforeTheTrainerLooksIsNoFailure) {
  /// The orchestrator is told to stop as the trainer is, and is the first to act on it.
  class Ending final : public rollouts::SampleReceiver {
   public:
    explicit Ending(std::stop_source& stop) : stop_(stop) {}
    std::optional<rollouts::RankBatch> pop(std::chrono::milliseconds) override {
      stop_.request_stop();
      return std::nullopt;
    }
    bool is_closed() const override { return stop_.stop_requested(); }
    std::string describe() const override { return "samples that end"; }

   private:
    std::stop_source& stop_;
  };
  Scratch scratch("ends");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  std::stop_source stop;
  const ReceiverFactory ending = [&](std::int64_t) { return std::make_unique<Ending>(stop); };
  const TrainRunResult result = run_rl_trainer(run_options(scratch.path, 9), *policy, ending, nullptr, recorder.monitor, stop.get_token());
  EXPECT_TRUE(result.was_stopped);
  EXPECT_TRUE(recorder.steps.empty());
}

TEST(RunRlTrainer, CheckpointsFollowIntervalAndRetention) {
  Scratch scratch("keep");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 9);
  options.checkpoint->interval = 1;
  options.checkpoint->keep_last = 2;
  options.checkpoint->keep_interval = 4;
  run_rl_trainer(options, *policy, fake_data(), nullptr, recorder.monitor, {});
  for (const char* root : {"checkpoints", "weights"}) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(scratch.path / root)) names.push_back(entry.path().filename().string());
    EXPECT_THAT(names, ::testing::UnorderedElementsAre("step_4", "step_8", "step_9")) << root;
  }
}

/// Notes for each row whether the checkpoint of its step counted when it came and when it was synced.
class RowBeforeCheckpoint final : public monitor::Sink {
 public:
  explicit RowBeforeCheckpoint(fs::path checkpoints) : checkpoints_(std::move(checkpoints)) {}
  void write(const monitor::Row& row) override {
    last_ = row.step;
    if (is_there(last_)) late.push_back(last_);
  }
  void sync() override { synced.emplace_back(last_, is_there(last_)); }
  std::vector<std::int64_t> late;
  std::vector<std::pair<std::int64_t, bool>> synced;

 private:
  bool is_there(std::int64_t step) const { return fs::exists(checkpoints_ / fmt::format("step_{}/trainer/manifest.json", step)); }
  fs::path checkpoints_;
  std::int64_t last_ = 0;
};

TEST(RunRlTrainer, ACheckpointNeverCountsBeforeItsRowIsOnDisk) {
  for (const bool is_async : {false, true}) {
    Scratch scratch("rows");
    const auto policy = make_tiny_policy(scratch.path / "model");
    monitor::Monitor monitor{trainer_metrics()};
    auto owned = std::make_unique<RowBeforeCheckpoint>(scratch.path / "checkpoints");
    RowBeforeCheckpoint& sink = *owned;
    monitor.add_sink(std::move(owned));
    RlRunOptions options = run_options(scratch.path, 5);
    options.checkpoint->interval = 2;
    options.checkpoint->save_async = is_async;
    run_rl_trainer(options, *policy, fake_data(), nullptr, monitor, {});
    EXPECT_THAT(sink.late, ::testing::IsEmpty());
    EXPECT_THAT(sink.synced, ::testing::ElementsAre(std::pair(2, false), std::pair(4, false), std::pair(5, false)));
  }
}

/// Notes what lies in the folder of snapshots when a row is synced, which is just before its checkpoint counts.
class SnapshotsBeforeCommit final : public monitor::Sink {
 public:
  explicit SnapshotsBeforeCommit(fs::path weights) : weights_(std::move(weights)) {}
  void write(const monitor::Row& row) override { last_ = row.step; }
  void sync() override {
    has_former.emplace_back(last_, fs::exists(weights_ / fmt::format("step_{}/model.safetensors", last_ - 2)));
    has_leftover = has_leftover || fs::exists(weights_ / fmt::format("step_{}/of a run that did not get as far as its checkpoint", last_));
  }
  std::vector<std::pair<std::int64_t, bool>> has_former;
  bool has_leftover = false;

 private:
  fs::path weights_;
  std::int64_t last_ = 0;
};

TEST(RunRlTrainer, NothingOlderGoesBeforeACheckpointCounts) {
  Scratch scratch("order");
  const auto policy = make_tiny_policy(scratch.path / "model");
  monitor::Monitor monitor{trainer_metrics()};
  auto owned = std::make_unique<SnapshotsBeforeCommit>(scratch.path / "weights");
  SnapshotsBeforeCommit& sink = *owned;
  monitor.add_sink(std::move(owned));
  RlRunOptions options = run_options(scratch.path, 6);
  options.checkpoint->interval = 2;
  options.checkpoint->keep_last = 1;
  fs::create_directories(scratch.path / "weights/step_2");
  write_file_atomic(scratch.path / "weights/step_2/of a run that did not get as far as its checkpoint", "x");
  run_rl_trainer(options, *policy, fake_data(), nullptr, monitor, {});
  EXPECT_THAT(sink.has_former, ::testing::ElementsAre(std::pair(2, false), std::pair(4, true), std::pair(6, true)));
  EXPECT_TRUE(sink.has_leftover) << "a snapshot of the same step is replaced, not removed";
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(scratch.path / "weights")) names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, ::testing::ElementsAre("step_6"));
}

// The orchestrator dies, and the stopping trainer saves its half of the last step.
TEST(RunRlTrainer, AHalfStepDoesNotPushOutTheLastWholeOne) {
  Scratch scratch("half");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 6);
  options.checkpoint->units = {"trainer", "orchestrator"};
  options.checkpoint->interval = 2;
  options.checkpoint->keep_last = 1;
  io::CheckpointWriter(scratch.path / "checkpoints", 2, "orchestrator").commit();
  run_rl_trainer(options, *policy, fake_data(), nullptr, recorder.monitor, {});
  EXPECT_EQ(io::list_checkpoints(scratch.path / "checkpoints", options.checkpoint->units), std::vector<std::int64_t>{2});
  ResumeOptions resume;
  resume.units = options.checkpoint->units;
  EXPECT_EQ(find_resume_step(scratch.path / "checkpoints", resume), 2);
  resume.step = 6;
  try {
    find_resume_step(scratch.path / "checkpoints", resume);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("step 6"), HasSubstr("lacks the part of: orchestrator"), HasSubstr("of steps 2")));
  }
}

TEST(RunRlTrainer, WeightsOnlyWritesNoState) {
  Scratch scratch("weights-only");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 5);
  options.checkpoint->weights_only = true;
  run_rl_trainer(options, *policy, fake_data(), nullptr, recorder.monitor, {});
  EXPECT_TRUE(fs::exists(scratch.path / "weights" / "step_5" / "model.safetensors"));
  EXPECT_FALSE(fs::exists(scratch.path / "checkpoints" / "step_5"));
}

TEST(RunRlTrainer, DamagedCheckpointIsNotPicked) {
  Scratch scratch("damaged");
  auto policy = make_tiny_policy(scratch.path / "model");
  Recorder a, b;
  RlRunOptions options = run_options(scratch.path, 6);
  options.checkpoint->interval = 2;
  run_rl_trainer(options, *policy, fake_data(), nullptr, a.monitor, {});
  fs::resize_file(scratch.path / "checkpoints" / "step_6" / "trainer" / "optimizer.safetensors", 100);
  EXPECT_EQ(find_resume_step(scratch.path / "checkpoints", {}), 4);
  ResumeOptions six;
  six.step = 6;
  EXPECT_THROW(find_resume_step(scratch.path / "checkpoints", six), Error);
  six.step = 7;
  EXPECT_THROW(find_resume_step(scratch.path / "checkpoints", six), Error);
  EXPECT_EQ(find_resume_step(scratch.path / "nothing", {}), std::nullopt);
  ResumeOptions both;
  both.units.emplace_back("orchestrator");
  EXPECT_EQ(find_resume_step(scratch.path / "checkpoints", both), std::nullopt) << "no step has that part: a fresh start";
  for (const char* step : {"step_2", "step_4"})
    fs::resize_file(scratch.path / "checkpoints" / step / "trainer" / "optimizer.safetensors", 100);
  EXPECT_THROW(find_resume_step(scratch.path / "checkpoints", {}), Error) << "never silently from scratch over damaged ones";
}

TEST(RunRlTrainer, SkipsWhatAResumeIsToldToSkip) {
  Scratch scratch("skip");
  auto policy = make_tiny_policy(scratch.path / "model");
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 5);
  run_rl_trainer(options, *policy, fake_data(), nullptr, recorder.monitor, {});
  const auto other = make_tiny_policy(scratch.path / "model");
  GradientStepOptions steps = step_options(20);
  GradientStep gradient_step(*other, steps);
  ResumeOptions resume;
  resume.skip_optimizer = resume.skip_scheduler = true;
  TrainProgress progress = restore(scratch.path / "checkpoints", 5, resume, *other, gradient_step);
  EXPECT_EQ(masters(*other), masters(*policy));
  EXPECT_EQ(progress.step, 5);
  EXPECT_EQ(gradient_step.optimizer().num_steps(), 0);
  EXPECT_EQ(gradient_step.num_scheduled(), 0);
  EXPECT_EQ(other->weights()->version.value, 5);
  resume.skip_progress = true;
  progress = restore(scratch.path / "checkpoints", 5, resume, *other, gradient_step);
  EXPECT_EQ(progress.step, 0);
  // So is state of another type, which is no damage.
  GradientStepOptions small = step_options(20);
  small.optimizer_memory.dtype = DType::kBF16;
  GradientStep in_bfloat16(*other, small);
  try {
    restore(scratch.path / "checkpoints", 5, {}, *other, in_bfloat16);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("another model.optimization_dtype or [optim]"));
  }
  // Another optimizer's state is refused by name.
  steps.optim = config::SgdConfig{};
  GradientStep sgd(*other, steps);
  try {
    restore(scratch.path / "checkpoints", 5, {}, *other, sgd);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("adamw"), HasSubstr("sgd")));
  }
}

TEST(RunRlTrainer, WaitHasADeadlineAndNamesTheOther) {
  Scratch scratch("wait");
  const auto policy = make_tiny_policy(scratch.path / "model");
  const rollouts::LocalSampleQueue queue(1, 2);
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 5);
  options.batch_timeout = 1ms;
  try {
    run_rl_trainer(options, *policy, [&](std::int64_t) { return queue.make_receiver(0); }, nullptr, recorder.monitor, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("step 1"), HasSubstr("orchestrator")));
  }
  queue.make_sender()->close();
  options.batch_timeout = 60s;
  try {
    run_rl_trainer(options, *policy, [&](std::int64_t) { return queue.make_receiver(0); }, nullptr, recorder.monitor, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.what(), HasSubstr("before step 1 of 5"));
  }
}

/// Sends steps 1 to `num_steps`, five samples of 12 tokens each.
void push_steps(rollouts::SampleSender& sender, std::int64_t num_steps) {
  Rng rng(2);
  for (std::int64_t step = 1; step <= num_steps; ++step) {
    std::vector<wire::TrainingSample> samples(5);
    for (wire::TrainingSample& s : samples) {
      s.env_name = "org/env";
      for (int i = 0; i < 12; ++i) {
        s.token_ids.push_back(static_cast<std::int32_t>(rng.next_below(96)));
        s.mask.push_back(i > 4);
        s.logprobs.push_back(i > 4 ? -4.0f : 0.0f);
        s.temperatures.push_back(1.0f);
        s.advantages.push_back(0.5f);
      }
    }
    wire::TrainingBatch batch;
    batch.step = step;
    batch.ranks = wire::pack(samples, {.seq_len = 48});
    ASSERT_TRUE(sender.push(batch, 1s));
  }
}

TEST(RunRlTrainer, TrainsOnPackedSamplesFromTheQueue) {
  Scratch scratch("queue");
  const auto policy = make_tiny_policy(scratch.path / "model");
  const rollouts::LocalSampleQueue queue(1, 4);
  const auto sender = queue.make_sender();
  push_steps(*sender, 2);
  sender->close();
  Recorder recorder;
  RlRunOptions options = run_options(scratch.path, 5);
  options.step.scheduler = config::ConstantScheduler{};
  options.step.max_steps.reset();  // until the samples end
  const TrainRunResult result =
      run_rl_trainer(options, *policy, [&](std::int64_t) { return queue.make_receiver(0); }, nullptr, recorder.monitor, {});
  EXPECT_EQ(result.last_step, 2);
  EXPECT_FALSE(result.was_stopped);
  EXPECT_EQ(result.last_checkpoint, 2);
  ASSERT_EQ(recorder.steps.size(), 2u);
  EXPECT_EQ(recorder.steps[1].at("progress/total_samples"), 10);
  EXPECT_EQ(recorder.steps[1].at("progress/total_tokens"), 120);
  EXPECT_TRUE(recorder.steps[0].contains("entropy/org/env/mean"));
}

TEST(RunRlTrainer, AStopStillTrainsOnWhatWasSentUpToALimit) {
  Scratch scratch("stop");
  std::stop_source stopped, aborted;
  stopped.request_stop();
  aborted.request_stop();
  const auto last_step = [&](std::int64_t limit, bool is_abort) {
    const auto policy = make_tiny_policy(scratch.path / "model");
    const rollouts::LocalSampleQueue queue(1, 4);
    const auto sender = queue.make_sender();
    push_steps(*sender, 3);
    if (limit > 3) sender->close();
    Recorder recorder;
    RlRunOptions options = run_options(scratch.path, 5);
    options.checkpoint.reset();
    options.max_steps_after_stop = limit;
    if (is_abort) options.abort = aborted.get_token();
    const auto result = run_rl_trainer(
        options, *policy, [&](std::int64_t) { return queue.make_receiver(0); }, nullptr, recorder.monitor, stopped.get_token());
    EXPECT_TRUE(result.was_stopped);
    return result.last_step;
  };
  EXPECT_EQ(last_step(0, false), 0);
  EXPECT_EQ(last_step(2, false), 2);
  EXPECT_EQ(last_step(4, false), 3);
  EXPECT_EQ(last_step(4, true), 0);
}

}  // namespace
}  // namespace prl::trainer
