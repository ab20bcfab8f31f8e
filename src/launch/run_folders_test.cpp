#include "launch/run_folders.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <mutex>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/output_folder.hpp"
#include "launch/run_admin.hpp"
#include "orchestrator/progress.hpp"

namespace prl::launch {
namespace {
namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kConfig = R"(max_steps = 7
seed = 11
seq_len = 128
[student.model]
name = "./base"
[student.model.lora]
name = "alpha"
rank = 4
[run]
weight = 2.0
[run.optim]
lr = 0.5
[[train.env]]
id = "reverse-text"
)";

class RunFolders : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("prl-run-folders-{}-{}", ::getpid(), ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
    shared_.model.name = "./base";
    shared_.model.seq_len = 256;
    shared_.model.lora.emplace();
    shared_.max_concurrent_runs = 3;
    shared_.output_dir = root_;
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const fs::path& name, const std::string& text = kConfig) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  RunFolder the_run() const {
    const std::vector<RunFolder> runs = find_run_folders(root_);
    if (runs.size() != 1) throw std::runtime_error(fmt::format("{} runs in place of one", runs.size()));
    return runs.front();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const RunFolder& run : find_run_folders(root_)) names.push_back(run.name);
    return names;
  }
  /// How the run trains with `text` as its configuration.
  config::TrainerConfig trained_with(const std::string& text) {
    put("run_a/configs/orch.toml", text);
    return trainer_config_of(shared_, the_run(), read_run_config(the_run()));
  }
  static std::string with(const std::string& from, const std::string& to) {
    std::string text = kConfig;
    return text.replace(text.find(from), from.size(), to);
  }
  std::string refusal_of(const std::string& text) {
    try {
      trained_with(text);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was refused";
  }
  std::string admin(config::RunsAction action, const std::string& run = {}, std::optional<double> weight = {}) {
    config::RunsToolConfig config;
    config.action = action;
    config.run = run;
    config.output_dir = root_;
    config.weight = weight;
    if (action == config::RunsAction::kAdd) config.config = root_ / "new.toml";
    return run_admin(config);
  }

  fs::path root_;
  config::TrainerConfig shared_;
};

TEST_F(RunFolders, AreThoseWithAConfigurationByName) {
  put("run_b/configs/orch.toml");
  put("run_a/configs/orch.toml");
  put("run_a/configs/orchestrator.toml");
  put("run_empty/notes.txt");
  put("other/configs/orch.toml");
  put("run_file");
  fs::create_directory_symlink(root_ / "run_a", root_ / "run_link");
  EXPECT_THAT(names(), ElementsAre("run_a", "run_b"));
  const RunFolder run = find_run_folders(root_).front();
  EXPECT_EQ(run.config.filename(), "orchestrator.toml") << "what the orchestrator has written goes before what a person wrote";
  EXPECT_THAT(find_run_folders(root_ / "nowhere"), IsEmpty());
}

TEST_F(RunFolders, AStampTellsAFolderAndItsConfigurationFromOthers) {
  put("run_a/configs/orch.toml");
  const RunFolder first = the_run();
  EXPECT_EQ(the_run().stamp, first.stamp);
  EXPECT_TRUE(first.is_there());
  put("run_a/configs/orch.toml", std::string(kConfig) + "# more\n");
  EXPECT_NE(the_run().stamp.config, first.stamp.config);
  EXPECT_EQ(the_run().stamp.folder, first.stamp.folder);
  EXPECT_TRUE(first.is_there());
  fs::rename(root_ / "run_a", root_ / "elsewhere");
  EXPECT_FALSE(first.is_there());
  put("run_a/configs/orch.toml");
  EXPECT_FALSE(first.is_there()) << "another folder of the same name";
  EXPECT_NE(to_string(the_run().stamp), to_string(first.stamp));
}

TEST_F(RunFolders, LeftoversOfARemovedRunGoAndNothingElse) {
  using namespace std::chrono_literals;
  put("run_a/configs/orch.toml");
  const RunFolder run = the_run();
  fs::remove_all(run.folder);
  const auto now = [] { return fs::file_time_type::clock::now(); };
  RunFolder::Written written{.first_step = 6, .last_step = 8, .since = now(), .until = {}};
  const auto write_all = [&] {
    for (const char* name : {"metrics.jsonl", "broadcasts/step_7/model.safetensors", "broadcasts/step_8.tmp-77/config.json",
                             "weights/step_6/model.safetensors", "checkpoints/step_6/trainer/manifest.json", "configs/error.txt"})
      put(fs::path("run_a") / name, "{}");
    fs::create_directories(run.folder / "broadcasts/step_6");
  };
  write_all();
  written.until = now() + 1h;
  run.remove_leftovers(written);
  EXPECT_FALSE(fs::exists(run.folder));
  // With one thing that is not what was written, all stays: another name, another role's or an earlier step's, an empty folder, a link.
  for (const char* name : {"thesis.txt", "weights/best/model.safetensors", "weights/step_5/model.safetensors", "weights/step_9/x",
                           "checkpoints/step_6/orchestrator/state.json", "rollouts/step_7/train_rollouts.jsonl", "weights/step_7"}) {
    write_all();
    put(fs::path("run_a") / name, "mine");
    run.remove_leftovers(written);
    EXPECT_TRUE(fs::exists(run.folder / name)) << name;
    EXPECT_TRUE(fs::exists(run.folder / "metrics.jsonl")) << name;
    fs::remove_all(run.folder);
  }
  write_all();
  for (const char* name : {"plots", "weights/best", "checkpoints/step_6/orchestrator"}) {
    fs::create_directories(run.folder / name);
    run.remove_leftovers(written);
    EXPECT_TRUE(fs::exists(run.folder / "metrics.jsonl")) << "beside the empty folder " << name;
    fs::remove(run.folder / name);
  }
  fs::remove_all(run.folder);
  put("elsewhere/model.safetensors", "mine");
  write_all();
  fs::create_directory_symlink(root_ / "elsewhere", run.folder / "weights/step_7");
  run.remove_leftovers(written);
  EXPECT_TRUE(fs::exists(run.folder / "weights/step_7")) << "a link";
  EXPECT_TRUE(fs::exists(root_ / "elsewhere/model.safetensors"));
  fs::remove_all(run.folder);
  // Files of our names that were there before, or came after: a copy that somebody puts back.
  for (const fs::file_time_type time : {written.since - 10s, written.until + 10s}) {
    write_all();
    fs::last_write_time(run.folder / "weights/step_6/model.safetensors", time);
    run.remove_leftovers(written);
    EXPECT_TRUE(fs::exists(run.folder / "weights/step_6/model.safetensors"));
    EXPECT_TRUE(fs::exists(run.folder / "metrics.jsonl"));
  }
  fs::remove_all(run.folder);
  write_all();
  put(fs::path("run_a") / OutputFolder::kMarkerName, "x");
  run.remove_leftovers(written);
  EXPECT_TRUE(fs::exists(run.folder)) << "a run that lost its configuration alone";
}

TEST_F(RunFolders, ARunTrainsWithItsOwnKeysAndElseWithTheTrainers) {
  std::get<config::AdamWConfig>(shared_.optim).lr = 0.25;
  shared_.model.lora->alpha = 48;
  const config::TrainerConfig own = trained_with(kConfig);
  EXPECT_EQ(own.output_dir, root_ / "run_a");
  EXPECT_EQ(own.max_concurrent_runs, 1);
  EXPECT_EQ(own.max_steps, 7);
  EXPECT_EQ(own.seed, 11u);
  EXPECT_EQ(own.model.lora->rank, 4);
  EXPECT_EQ(own.model.lora->alpha, 48);
  EXPECT_EQ(std::get<config::AdamWConfig>(own.optim).lr, 0.5);
  EXPECT_FALSE(own.ckpt);
  shared_.max_steps = 3;
  EXPECT_EQ(trained_with(with("max_steps = 7\n", "")).max_steps, 3);
  EXPECT_EQ(std::get<config::AdamWConfig>(trained_with(with("[run.optim]\nlr = 0.5\n", "")).optim).lr, 0.25);
  const config::TrainerConfig zmq = trained_with(with("[run]\n", "[rollout_transport]\ntype = \"zmq\"\nport = 6001\n[run]\n"));
  ASSERT_TRUE(std::holds_alternative<config::ZmqRollouts>(zmq.rollout_transport));
  EXPECT_EQ(std::get<config::ZmqRollouts>(zmq.rollout_transport).port, 6001);
}

TEST_F(RunFolders, ARunGoesOnFromACheckpointThatBothRolesHave) {
  const std::string text = with("[run]\n", "[ckpt]\ninterval = 2\n[run]\n");
  config::TrainerConfig own = trained_with(text);
  ASSERT_TRUE(own.ckpt);
  EXPECT_EQ(own.ckpt->interval, 2);
  EXPECT_FALSE(own.ckpt->resume_step);
  io::CheckpointWriter half(root_ / "run_a/checkpoints", 2, "trainer");
  half.commit();
  EXPECT_FALSE(trained_with(text).ckpt->resume_step) << "the orchestrator's part is not there";
  io::CheckpointWriter whole(root_ / "run_a/checkpoints", 2, orchestrator::kCheckpointUnit);
  whole.commit();
  EXPECT_EQ(trained_with(text).ckpt->resume_step, -1);
}

TEST_F(RunFolders, WhatDoesNotFitTheTrainerIsRefusedByItsKey) {
  EXPECT_THAT(refusal_of(with("name = \"alpha\"\n", "")), HasSubstr("student.model.lora.name"));
  EXPECT_THAT(refusal_of(with("seq_len = 128", "seq_len = 512")), AllOf(HasSubstr("seq_len"), HasSubstr("512"), HasSubstr("256")));
  EXPECT_THAT(refusal_of(with("[run]\n", "[rollout_transport]\ntype = \"zmq\"\nhost = \"*\"\n[run]\n")),
              HasSubstr("rollout_transport.host"));
  const std::string nccl = with("[run]\n", "[weight_broadcast]\ntype = \"nccl\"\nport = 6001\n[run]\n");
  EXPECT_THAT(refusal_of(nccl), AllOf(HasSubstr("weight_broadcast.type"), HasSubstr("the trainer's is filesystem")));
  auto& broadcast = shared_.weight_broadcast.emplace<config::NcclBroadcast>();
  broadcast.port = 6002;
  EXPECT_THAT(refusal_of(nccl), AllOf(HasSubstr("weight_broadcast.port"), HasSubstr("6001"), HasSubstr("6002")));
  EXPECT_THAT(refusal_of(kConfig), AllOf(HasSubstr("weight_broadcast.type"), HasSubstr("the trainer's is nccl")));
  broadcast.port = 6001;
  EXPECT_THAT(refusal_of(nccl), HasSubstr("nothing was refused"));
  shared_.weight_broadcast = config::FilesystemBroadcast{};
  fs::create_directories(root_ / "one");
  fs::create_directories(root_ / "other");
  for (const char* name : {"one", "other"}) put(fs::path(name) / "config.json", "{}");
  shared_.model.name = (root_ / "one").string();
  EXPECT_THAT(refusal_of(with("./base", (root_ / "other").string())), AllOf(HasSubstr("student.model.name"), HasSubstr("/other")));
  EXPECT_THAT(refusal_of(with("./base", (root_ / "one/../one").string())), HasSubstr("nothing was refused"));
  EXPECT_THAT(refusal_of("no_such_key = 1\n"), HasSubstr("no_such_key"));
}

TEST_F(RunFolders, PortsAreSharedByThoseOfOneMachineThatOverlap) {
  const auto zmq = [](const char* host, int port) -> config::RolloutTransport {
    config::ZmqRollouts one;
    one.host = host;
    one.port = port;
    return one;
  };
  EXPECT_TRUE(share_ports(zmq("localhost", 5555), zmq("127.0.0.1", 5555)));
  EXPECT_TRUE(share_ports(zmq("a", 5555), zmq("a", 5556))) << "each takes two";
  EXPECT_FALSE(share_ports(zmq("a", 5555), zmq("a", 5557)));
  EXPECT_FALSE(share_ports(zmq("a", 5555), zmq("b", 5555)));
  EXPECT_FALSE(share_ports(zmq("a", 5555), config::FilesystemRollouts{}));
}

TEST_F(RunFolders, AControlFileSaysWhatIsAskedAndABrokenOneIsNamed) {
  put("run_a/configs/orch.toml");
  const fs::path folder = root_ / "run_a";
  EXPECT_EQ(read_control(folder).state, RunState::kRun);
  EXPECT_FALSE(read_control(folder).weight);
  for (const RunState state : {RunState::kRun, RunState::kPause, RunState::kDrain, RunState::kStop}) {
    write_control(folder, {.state = state, .weight = 1.5});
    EXPECT_EQ(read_control(folder).state, state);
    EXPECT_EQ(read_control(folder).weight, 1.5);
  }
  for (const char* text : {"{", "[]", R"({"state":"halt"})", R"({"state":3})", R"({"weight":0})", R"({"weight":"much"})"}) {
    put("run_a/configs/control.json", text);
    try {
      read_control(folder);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      EXPECT_THAT(error.what(), HasSubstr("control.json")) << text;
    }
  }
}

TEST_F(RunFolders, AReportIsReadBackAndABrokenOneIsNamed) {
  EXPECT_THAT(read_runs_file(root_), IsEmpty());
  put(kRunsFile,
      R"({"runs":[{"name":"run_a","state":"training","slot":1,"step":4,"tokens":99,"weight":2.5},{"name":"run_b","detail":"why"}]})");
  const std::vector<RunReport> runs = read_runs_file(root_);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].slot, 1);
  EXPECT_EQ(runs[0].step, 4);
  EXPECT_EQ(runs[0].weight, 2.5);
  EXPECT_EQ(runs[1].state, "unknown");
  EXPECT_EQ(runs[1].detail, "why");
  EXPECT_FALSE(runs[1].slot);
  for (const char* text : {"", "{}", R"({"runs":3})", R"({"runs":[1]})"}) {
    put(kRunsFile, text);
    EXPECT_THROW(read_runs_file(root_), Error) << text;
  }
}

TEST_F(RunFolders, AProcessIsToldToStopOnceItsRunIsDrainedOrGone) {
  const auto reason_after = [&](const std::function<void()>& change) {
    put("run_a/configs/orch.toml");
    write_control(root_ / "run_a", {.state = RunState::kPause, .weight = {}});
    std::mutex mutex;
    std::condition_variable told;
    std::string reason;
    const RunControlWatch watch(root_ / "run_a", [&](const std::string& why) {
      const std::lock_guard lock(mutex);
      reason += why;
      told.notify_all();
    });
    change();
    std::unique_lock lock(mutex);
    told.wait_for(lock, std::chrono::seconds(60), [&] { return !reason.empty(); });
    return reason;
  };
  EXPECT_THAT(reason_after([&] { write_control(root_ / "run_a", {.state = RunState::kDrain, .weight = {}}); }), HasSubstr("says drain"));
  EXPECT_THAT(reason_after([&] { write_control(root_ / "run_a", {.state = RunState::kStop, .weight = {}}); }), HasSubstr("says stop"));
}

TEST_F(RunFolders, PrlRunsAddsListsAsksAndRemoves) {
  put("new.toml");
  EXPECT_THAT(admin(config::RunsAction::kAdd, "a", 2.0), AllOf(HasSubstr("added run_a"), HasSubstr("prl orchestrator @")));
  EXPECT_EQ(read_file(root_ / "run_a/configs/orch.toml", 1 << 20), kConfig);
  EXPECT_EQ(read_control(root_ / "run_a").weight, 2.0);
  EXPECT_THROW(admin(config::RunsAction::kAdd, "a"), Error) << "it is there";
  EXPECT_THROW(admin(config::RunsAction::kAdd, "../a"), Error) << "outside the folder";
  put("new.toml", "no_such_key = 1\n");
  EXPECT_THROW(admin(config::RunsAction::kAdd, "b"), Error);
  EXPECT_FALSE(fs::exists(root_ / "run_b")) << "a configuration that cannot be read makes no run";

  put(kRunsFile, R"({"runs":[{"name":"run_a","state":"training","slot":1,"step":4,"tokens":99,"weight":2.5}]})");
  EXPECT_THAT(admin(config::RunsAction::kList), AllOf(HasSubstr("run_a"), HasSubstr("training"), HasSubstr("99")));
  EXPECT_THAT(admin(config::RunsAction::kPause, "run_a"), HasSubstr("run_a: pause"));
  EXPECT_EQ(read_control(root_ / "run_a").weight, 2.0) << "a share that was set stays";
  EXPECT_THAT(admin(config::RunsAction::kList), HasSubstr("asked to pause"));
  admin(config::RunsAction::kResume, "a", 3.0);
  EXPECT_EQ(read_control(root_ / "run_a").state, RunState::kRun);
  EXPECT_EQ(read_control(root_ / "run_a").weight, 3.0);
  admin(config::RunsAction::kDrain, "a");
  EXPECT_EQ(read_control(root_ / "run_a").state, RunState::kDrain);
  admin(config::RunsAction::kStop, "a");
  EXPECT_EQ(read_control(root_ / "run_a").state, RunState::kStop);
  try {
    admin(config::RunsAction::kPause, "nobody");
    ADD_FAILURE() << "a run that is not there was paused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr("there are run_a"));
  }
  admin(config::RunsAction::kRemove, "a");
  EXPECT_THAT(names(), IsEmpty());
  EXPECT_FALSE(fs::exists(root_ / ".run_a.removed"));
}

}  // namespace
}  // namespace prl::launch
