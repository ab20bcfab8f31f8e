#include "orchestrator/step_recorder.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "monitor/sinks.hpp"
#include "net/io_runtime.hpp"
#include "orchestrator/testing/fakes.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;
using namespace testing;
namespace fs = std::filesystem;

struct RecorderFixture {
  fs::path folder = fs::temp_directory_path() / fmt::format("prl_step_recorder_{}", ::getpid());
  net::OffThread files;
  monitor::Monitor monitor;
  std::vector<std::pair<std::int64_t, bool>> rows;  ///< step, and whether its checkpoint counted already
  std::int64_t num_states = 0;                      ///< stands for the state: the tasks of the n-th are n
  std::optional<StepRecorder> recorder;
  net::IoRuntime io{1};

  static monitor::MetricSet declared() {
    monitor::MetricSet set;
    set.declare(metric_infos());
    return set;
  }
  explicit RecorderFixture(StepRecorder::Options options) : monitor(declared()) {
    fs::remove_all(folder);
    if (options.checkpoints) options.checkpoints->folder = folder;
    monitor.add_sink(
        monitor::make_callback_sink([this](std::int64_t step, const monitor::Metrics&) { rows.emplace_back(step, has_state(step)); }));
    recorder.emplace(std::move(options), std::vector<env::EnvironmentPtr>{tiny_environment()}, &monitor, files, [this] {
      OrchestratorState state;
      state.unfinished_tasks.assign(static_cast<std::size_t>(++num_states), TaskRef{0, 1});
      return state;
    });
  }
  ~RecorderFixture() { fs::remove_all(folder); }
  bool has_state(std::int64_t step) const { return fs::exists(folder / fmt::format("step_{}", step) / kCheckpointUnit / "state.json"); }
  void record(std::int64_t step) {
    auto batch = std::make_shared<CollectedBatch>();
    batch->rollouts.resize(3);
    for (ReadyRollout& rollout : batch->rollouts) rollout.episode.env_name = "reverse-text";
    batch->rollouts[0].group = GroupId{step};
    batch->rollouts[1].group = batch->rollouts[2].group = GroupId{100 + step};
    recorder->count(*batch, step);
    StepFacts facts;
    facts.step = step;
    io.run_blocking(recorder->record(batch, facts, {{"pool/reverse-text/easy", 7.0}}), 60s);
  }
  void save_last() { io.run_blocking(recorder->save_last(), 60s); }
};

TEST(StepRecorder, CountsRolloutsAndGroupsOfTheRun) {
  RecorderFixture f({.max_steps = 2});
  f.record(1);
  EXPECT_FALSE(f.recorder->is_done());
  f.record(2);
  EXPECT_TRUE(f.recorder->is_done());
  EXPECT_EQ(f.recorder->progress().total_samples, 6);
  EXPECT_EQ(f.recorder->progress().total_problems, 4);
  EXPECT_EQ(f.rows.size(), 2u);
}

TEST(StepRecorder, ARowGoesToDiskBeforeItsCheckpointCounts) {
  RecorderFixture f({.checkpoints = OrchestratorCheckpoints{{}, 2}, .max_steps = 4});
  for (std::int64_t step = 1; step <= 4; ++step) f.record(step);
  EXPECT_EQ(f.rows, (std::vector<std::pair<std::int64_t, bool>>{{1, false}, {2, false}, {3, false}, {4, false}}));
  EXPECT_TRUE(f.has_state(2));
  EXPECT_FALSE(f.has_state(4)) << "the last step is saved at the end";
  f.save_last();
  EXPECT_TRUE(f.has_state(4));
  const std::int64_t num_states = f.num_states;
  f.save_last();
  EXPECT_EQ(f.num_states, num_states) << "saved twice";
}

TEST(StepRecorder, LockStepKeepsTheStateAtTheShipAndOthersTheStateAtTheEnd) {
  for (const bool is_lock_step : {true, false}) {
    RecorderFixture f({.checkpoints = OrchestratorCheckpoints{{}, std::nullopt}, .is_lock_step = is_lock_step});
    f.record(1);
    f.num_states = 4;  // the run went on with the next batch and was stopped
    f.save_last();
    const auto state = load_state(f.folder, 1, {tiny_environment()});
    EXPECT_EQ(state.unfinished_tasks.size(), is_lock_step ? 1u : 5u);
    EXPECT_EQ(state.progress.step, 1);
  }
}

TEST(StepRecorder, ResumesWhatItSavedAndSavesNothingWithoutANewStep) {
  RecorderFixture first({.checkpoints = OrchestratorCheckpoints{{}, std::nullopt}});
  first.record(1);
  first.save_last();
  StepRecorder second({.checkpoints = OrchestratorCheckpoints{first.folder, std::nullopt}, .resume_step = 1}, {tiny_environment()}, nullptr,
                      first.files, [] { return OrchestratorState{}; });
  const auto state = second.resume(/*with_state=*/true);
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->unfinished_tasks.size(), 1u);
  EXPECT_EQ(second.progress().total_samples, 3);
  EXPECT_FALSE(second.resume(/*with_state=*/false).has_value());
  EXPECT_EQ(second.progress().step, 1);
  StepRecorder nowhere({.resume_step = 1}, {tiny_environment()}, nullptr, first.files, [] { return OrchestratorState{}; });
  EXPECT_THROW(nowhere.resume(true), Error);
}

}  // namespace
}  // namespace prl::orchestrator
