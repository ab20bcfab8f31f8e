// Several runs on one base model: each is what it would be alone, and they share the device by weight.
#include "trainer/run_set.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <sstream>

#include "base/files.hpp"
#include "comm/testing/ranks.hpp"
#include "nn/adapter.hpp"
#include "trainer/fake_rollouts.hpp"
#include "trainer/metrics.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

/// Fake samples, `num_steps` of them; a run of seed 13 fails at step 3.
class Samples final : public rollouts::SampleReceiver {
 public:
  Samples(std::int64_t first, std::int64_t num_steps, std::uint64_t seed)
      : next_(first),
        last_(num_steps),
        fails_(seed == 13),
        fake_(make_fake_rollouts({.num_micro_batches = 1 + static_cast<std::int64_t>(seed % 2),
                                  .seq_len = 48,
                                  .vocab_size = 96,
                                  .generate_samples = true,
                                  .first_step = first,
                                  .rank = seed})) {}
  std::optional<rollouts::RankBatch> pop(std::chrono::milliseconds timeout) override {
    if (is_closed()) return std::nullopt;
    if (fails_ && next_ == 3) fail(ErrorCode::kCorrupt, "a damaged batch");
    ++next_;
    return fake_->pop(timeout);
  }
  bool is_closed() const override { return next_ > last_; }
  std::string describe() const override { return "a test"; }

 private:
  std::int64_t next_, last_;
  bool fails_;
  std::unique_ptr<rollouts::SampleReceiver> fake_;
};

class Runs : public ::testing::Test {
 protected:
  void SetUp() override {
    nn::init_model(tiny_model(), scratch_.path / "model");
    base_ = load_base_model(make_cpu_runtime(), options(4, 1));
  }

  PolicyOptions options(int rank, std::uint64_t seed) const {
    PolicyOptions options;
    options.model = scratch_.path / "model";
    options.num_threads = 1;
    options.seed = seed;
    options.lora = nn::AdapterConfig{.rank = rank,
                                     .alpha = 8,
                                     .dropout = 0.1,
                                     .target_modules = {"q_proj", "v_proj", "down_proj"},
                                     .modules_to_save = {},
                                     .rank_pattern = {},
                                     .alpha_pattern = {},
                                     .base_model = "tiny"};
    return options;
  }

  SharedRun make(const std::string& name, int rank, std::uint64_t seed, std::int64_t num_steps, double lr = 1e-2) const {
    SharedRun run;
    run.name = name;
    run.policy = std::make_unique<Policy>(base_, options(rank, seed));
    run.monitor = std::make_unique<monitor::Monitor>(trainer_metrics());
    config::AdamWConfig adamw;
    adamw.lr = lr;
    run.options.step.optim = adamw;
    run.options.step.max_steps = num_steps;
    run.options.seq_len = 48;
    run.options.checkpoint.emplace();
    run.options.checkpoint->checkpoints = scratch_.path / name / "checkpoints";
    run.options.checkpoint->weights = scratch_.path / name / "weights";
    run.options.checkpoint->save_weights = false;
    run.make_receiver = [=](std::int64_t first) { return std::make_unique<Samples>(first, num_steps, seed); };
    return run;
  }

  /// The run's last checkpoint, byte for byte.
  std::string saved(const std::string& name, std::int64_t step) const {
    const fs::path folder = scratch_.path / name / "checkpoints" / fmt::format("step_{}", step) / "trainer";
    return read_file(folder / "model.safetensors") + read_file(folder / "optimizer.safetensors");
  }

  /// The same run alone, over a base of its own.
  std::string alone(int rank, std::uint64_t seed, std::int64_t num_steps, double lr) {
    SharedRun run = make("alone", rank, seed, num_steps, lr);
    run.policy = std::make_unique<Policy>(make_cpu_runtime(), options(rank, seed));
    fs::remove_all(scratch_.path / "alone");
    monitor::Monitor monitor(trainer_metrics());
    run_rl_trainer(run.options, *run.policy, run.make_receiver, nullptr, monitor, {});
    return saved("alone", num_steps);
  }

  Scratch scratch_{"run-set"};
  BaseModel base_;
};

TEST_F(Runs, EachIsWhatItIsAloneWhoeverComesGoesOrFails) {
  const std::string wanted_a = alone(4, 1, 6, 1e-2), wanted_c = alone(8, 2, 4, 3e-2);
  RunSet set(2);
  EXPECT_EQ(set.add(make("a", 4, 1, 6)), 0);
  EXPECT_EQ(set.add(make("bad", 2, 13, 6)), 1);
  EXPECT_FALSE(set.has_room());
  std::map<std::string, RunEnd> ends;
  bool has_c = false;
  while (set.num_runs() > 0) {
    const auto stepped = set.step();
    ASSERT_TRUE(stepped.has_value());
    if (stepped->end) ends.emplace(stepped->name, *stepped->end);
    if (set.has_room() && ends.contains("bad") && !std::exchange(has_c, true)) {
      EXPECT_EQ(set.add(make("c", 8, 2, 4, 3e-2)), 1);
    }
  }
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_THAT(ends.at("bad").error.value_or(Error(ErrorCode::kIo, "none")).what(), ::testing::HasSubstr("a damaged batch"));
  EXPECT_EQ(ends.at("bad").result.last_step, 2);
  EXPECT_EQ(ends.at("bad").result.last_checkpoint, 2) << "what was good of it is not saved";
  EXPECT_FALSE(ends.at("a").error || ends.at("c").error);
  EXPECT_EQ(ends.at("a").result.last_step, 6);
  EXPECT_EQ(saved("a", 6), wanted_a);
  EXPECT_EQ(saved("c", 4), wanted_c);
}

/// A run that the ranks of a test share, as its description names it: "name rank seed num_steps lr".
struct Described {
  std::string name;
  int rank = 0;
  std::uint64_t seed = 0;
  std::int64_t num_steps = 0;
  double lr = 0;
  explicit Described(std::string_view text) {
    std::istringstream in{std::string(text)};
    in >> name >> rank >> seed >> num_steps >> lr;
  }
};

class RunsOnRanks : public Runs {
 protected:
  SharedRun make_on(const BaseModel& base, comm::Mesh& mesh, std::string_view description, bool resumes = false) const {
    const Described given(description);
    if (mesh.world().rank() != 0 && description.ends_with("too_large_for_others")) fail(ErrorCode::kOutOfMemory, "no room");
    SharedRun run = make(given.name, given.rank, given.seed, given.num_steps, given.lr);
    PolicyOptions of_policy = options(given.rank, given.seed);
    of_policy.share = {.rank = mesh.world().rank(), .num_ranks = mesh.world().size(), .divides_grads = true};
    run.policy = std::make_unique<Policy>(base, of_policy);
    run.options.step.mesh = &mesh;
    run.options.checkpoint->may_write = mesh.world().rank() == 0;
    run.options.checkpoint->interval = 2;
    if (resumes) run.options.resume.emplace();
    return run;
  }

  /// `lead` at rank 0; the other ranks follow until it has ended. An error of any rank is thrown.
  void on_ranks(int size, bool resumes,
                const std::function<void(RunSet&, const std::function<void(const std::string&)>& add)>& lead) const {
    comm::testing::run_threads("threads", size, [&](comm::Communicator& given) {
      std::vector<int> all;
      for (int rank = 0; rank < size; ++rank) all.push_back(rank);
      comm::Mesh mesh(given.subgroup(all, "runs", 0));
      const BaseModel base = load_base_model(make_cpu_runtime(), options(4, 1));
      RunSet set(2, &mesh.world());
      const auto make_one = [&](std::string_view description) { return make_on(base, mesh, description, resumes); };
      if (mesh.world().rank() != 0) {
        while (set.follow(make_one, false)) {
        }
        EXPECT_EQ(set.num_runs(), 0) << "rank " << mesh.world().rank();
        return;
      }
      lead(set, [&](const std::string& description) { set.add(make_one(description), description); });
      set.dismiss();
    });
  }

  /// Masters and optimizer of a run's checkpoint, whoever wrote it, as the bits that one rank goes on with.
  std::string state(const std::string& name, int rank, std::uint64_t seed, std::int64_t step) const {
    Policy policy(base_, options(rank, seed));
    GradientStepOptions of_step;
    of_step.optim = config::AdamWConfig{};
    GradientStep gradient_step(policy, of_step);
    restore(scratch_.path / name / "checkpoints", step, {}, policy, gradient_step);
    std::string bytes;
    for (const Optimizer::StatePart& part : gradient_step.optimizer().state_parts())
      bytes.append(static_cast<const char*>(part.tensor.data()), part.tensor.num_bytes());
    const Tensor& values = policy.parameters().held_values();
    return bytes.append(static_cast<const char*>(values.data()), values.num_bytes());
  }
};

TEST_F(RunsOnRanks, EachIsWhatItIsAloneOnOneRank) {
  alone(4, 1, 6, 1e-2);
  const std::string wanted_a = state("alone", 4, 1, 6);
  alone(8, 2, 4, 3e-2);
  const std::string wanted_c = state("alone", 8, 2, 4);
  for (const int size : {2, 3}) {
    for (const char* name : {"a", "bad", "wild", "full", "c"}) fs::remove_all(scratch_.path / name);
    std::map<std::string, RunEnd> ends;
    on_ranks(size, false, [&](RunSet& set, const auto& add) {
      add("a 4 1 6 1e-2");
      // Samples of which rank 0 alone sees the damage, weights that diverge in a row of one rank, no room for a checkpoint.
      std::vector<std::string> next{"c 8 2 4 3e-2", "full 2 4 2 1e-2", "wild 2 2 6 1e30", "bad 2 13 6 1e-2"};
      while (set.num_runs() > 0 || !next.empty()) {
        if (set.has_room() && !next.empty()) {
          add(next.back());
          if (next.back().starts_with("full")) write_file_atomic(scratch_.path / "full", "a file where the run's folder should be");
          next.pop_back();
        }
        const auto stepped = set.step();
        ASSERT_TRUE(stepped.has_value());
        if (stepped->end) ends.emplace(stepped->name, *stepped->end);
      }
    });
    ASSERT_EQ(ends.size(), 5u) << size;
    const auto why = [&](const std::string& name) { return std::string(ends.at(name).error.value_or(Error(ErrorCode::kIo, "")).what()); };
    EXPECT_EQ(why("a") + why("c"), "");
    EXPECT_THAT(why("bad"), ::testing::HasSubstr("a damaged batch"));
    EXPECT_EQ(ends.at("bad").result.last_checkpoint, 2);
    EXPECT_EQ(ends.at("wild").error.value().code(), ErrorCode::kNonFinite) << why("wild");
    EXPECT_NE(why("full"), "");
    EXPECT_TRUE(state("a", 4, 1, 6) == wanted_a) << size << " ranks";
    EXPECT_TRUE(state("c", 8, 2, 4) == wanted_c) << size << " ranks";
  }
}

TEST_F(RunsOnRanks, OneThatResumesOnAnotherNumberOfRanksGoesOnBitForBit) {
  alone(4, 1, 6, 1e-2);
  const std::string wanted = state("alone", 4, 1, 6);
  on_ranks(3, false, [](RunSet& set, const auto& add) {
    add("a 4 1 6 1e-2");
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(set.step().has_value());
    EXPECT_EQ(set.end("a").result.last_checkpoint, 3);
  });
  on_ranks(2, true, [](RunSet& set, const auto& add) {
    add("a 4 1 6 1e-2");
    EXPECT_EQ(set.views().at(0).step, 3);
    while (set.num_runs() > 0) ASSERT_TRUE(set.step().has_value());
  });
  EXPECT_TRUE(state("a", 4, 1, 6) == wanted);
}

TEST_F(RunsOnRanks, OneThatARankCannotMakeIsRefusedByAll) {
  on_ranks(2, false, [](RunSet& set, const auto& add) {
    add("a 4 1 2 1e-2");
    try {
      add("b 4 1 2 1e-2 too_large_for_others");
      ADD_FAILURE() << "a run of which rank 1 has no part";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1: no room"));
    }
    EXPECT_EQ(set.num_runs(), 1);
    while (set.num_runs() > 0) ASSERT_TRUE(set.step().has_value());
  });
}

TEST_F(Runs, OneThatResumesGoesOnBitForBit) {
  const std::string wanted = alone(4, 1, 6, 1e-2);
  RunSet first(1);
  first.add(make("a", 4, 1, 6));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(first.step().has_value());
  EXPECT_EQ(first.end("a").result.last_checkpoint, 3);
  EXPECT_EQ(first.num_runs(), 0);
  RunSet second(1);
  SharedRun again = make("a", 4, 1, 6);
  again.options.resume.emplace();
  second.add(std::move(again));
  EXPECT_EQ(second.views().at(0).step, 3);
  while (second.num_runs() > 0) ASSERT_TRUE(second.step().has_value());
  EXPECT_EQ(saved("a", 6), wanted);
}

TEST_F(Runs, TheyShareTheDeviceByWeightAndAPausedOneStandsStill) {
  RunSet set(3);
  constexpr std::int64_t kEndless = 1000;
  SharedRun heavy = make("heavy", 2, 3, kEndless);
  heavy.weight = 3;
  set.add(make("light", 2, 1, kEndless));
  set.add(std::move(heavy));
  const auto tokens = [&](std::size_t i) { return static_cast<double>(set.views().at(i).total_tokens); };
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(set.step().has_value());
  EXPECT_NEAR(tokens(1) / tokens(0), 3.0, 0.3);
  // One that joins takes its share from now on and makes up for nothing.
  const double before = tokens(0) + tokens(1);
  set.add(make("late", 2, 5, kEndless));
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(set.step().has_value());
  EXPECT_NEAR(tokens(2) / (tokens(0) + tokens(1) - before), 0.25, 0.06);
  set.set_paused("heavy", true);
  const auto step = set.views().at(1).step;
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(set.step().has_value());
  EXPECT_EQ(set.views().at(1).step, step);
  set.set_paused("light", true);
  set.set_paused("late", true);
  EXPECT_FALSE(set.step().has_value()) << "a paused run was stepped";
  set.set_paused("heavy", false);
  ASSERT_TRUE(set.step().has_value());
  EXPECT_EQ(set.views().at(1).step, step + 1);
}

TEST_F(Runs, NothingIsWrittenForOneWhoseFolderIsGone) {
  bool is_there = true;
  RunSet set(1);
  SharedRun run = make("gone", 4, 1, 6);
  run.is_there = [&] { return is_there; };
  set.add(std::move(run));
  ASSERT_TRUE(set.step().has_value());
  is_there = false;
  const auto left = set.step();
  ASSERT_TRUE(left && left->end);
  EXPECT_TRUE(left->end->is_gone);
  EXPECT_FALSE(left->end->error.has_value());
  EXPECT_EQ(set.num_runs(), 0);
  EXPECT_FALSE(fs::exists(scratch_.path / "gone")) << "its folder was made again";
}

}  // namespace
}  // namespace prl::trainer
