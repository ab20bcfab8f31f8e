#include "launch/run_folder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/output_folder.hpp"
#include "launch/results_folder.hpp"

namespace prl::launch {
namespace {
namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OneRunFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            fmt::format("prl-run-folder-{}-{}", ::getpid(), ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
    ::unsetenv("NEVER_CLEAN");
  }
  void TearDown() override {
    ::unsetenv("NEVER_CLEAN");
    fs::remove_all(root_);
  }

  void put(const std::string& name, const std::string& text = "x") {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::app) << text;
  }
  void save(std::int64_t step, std::initializer_list<const char*> units = {"trainer", "orchestrator"}) {
    for (const char* unit : units) {
      io::CheckpointWriter writer(root_ / "checkpoints", step, unit);
      write_file_atomic(writer.folder() / "state", "of " + std::to_string(step));
      writer.commit();
    }
  }
  void row(std::int64_t step, const char* role) {
    put("metrics.jsonl", fmt::format("{{\"step\": {}, \"role\": \"{}\", \"time\": 1.0}}\n", step, role));
  }
  /// A run of `prl rl` up to step 6, with checkpoints of 2, 4 and 6.
  void make_rl_run() {
    prepare_run_folder(rl_config_);
    for (std::int64_t step = 1; step <= 6; ++step) {
      put(fmt::format("rollouts/step_{}/train_rollouts.jsonl", step));
      row(step, "orchestrator");
      row(step, "trainer");
      if (step % 2 != 0) continue;
      save(step);
      put(fmt::format("weights/step_{}/config.json", step));
    }
    put("logs/rl.log");
    put("configs/rl.toml", "# Made by a run\n");
    put("configs/rl.json");
  }
  config::RlConfig rl() {
    config::RlConfig config;
    config.output_dir = config.trainer.output_dir = config.orchestrator.output_dir = root_;
    config.trainer.ckpt.emplace();
    config.orchestrator.ckpt.emplace();
    return config;
  }
  config::RlConfig rl_resumed(int step) {
    config::RlConfig config = rl();
    config.trainer.ckpt->resume_step = config.orchestrator.ckpt->resume_step = step;
    return config;
  }
  config::SftConfig sft() {
    config::SftConfig config;
    config.output_dir = root_;
    return config;
  }
  /// Names and contents of everything below the folder.
  std::map<std::string, std::string> bytes() const {
    std::map<std::string, std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(root_))
      out[fs::relative(entry.path(), root_).string()] = entry.is_regular_file() ? read_file(entry.path()) : "";
    return out;
  }
  std::string refusal(const std::function<void()>& start) {
    const auto before = bytes();
    try {
      start();
    } catch (const Error& error) {
      EXPECT_EQ(bytes(), before) << "what is refused must leave every byte as it was";
      return error.what();
    }
    ADD_FAILURE() << "not refused";
    return {};
  }
  std::vector<std::string> names(const std::string& folder) const {
    std::vector<std::string> out;
    if (fs::exists(root_ / folder))
      for (const auto& entry : fs::directory_iterator(root_ / folder)) out.push_back(entry.path().filename().string());
    std::ranges::sort(out);
    return out;
  }

  fs::path root_;
  config::RlConfig rl_config_ = [] { return config::RlConfig(); }();
};

class RunFolderOfRl : public OneRunFolder {
 protected:
  void SetUp() override {
    OneRunFolder::SetUp();
    rl_config_ = rl();
    make_rl_run();
  }
};

TEST_F(RunFolderOfRl, AFreshRunOfAnyKindIsRefused) {
  config::RlConfig again = rl();
  EXPECT_THAT(refusal([&] { prepare_run_folder(again); }),
              AllOf(HasSubstr("another run (of `prl rl`)"), HasSubstr("--ckpt.resume-step -1"), HasSubstr("--clean-output-dir")));
  config::SftConfig other = sft();
  EXPECT_THAT(refusal([&] { prepare_run_folder(other); }), AllOf(HasSubstr("another run (of `prl rl`)"), Not(HasSubstr("resume-step"))));
  other.ckpt.emplace().resume_step = -1;
  EXPECT_THAT(refusal([&] { prepare_run_folder(other); }), HasSubstr("which `prl sft` cannot continue"));
}

TEST_F(RunFolderOfRl, MetricsAloneAreARecordToo) {
  fs::remove_all(root_ / "checkpoints");
  fs::remove_all(root_ / "weights");
  fs::remove_all(root_ / "rollouts");
  config::RlConfig again = rl();
  again.trainer.ckpt.reset();
  again.orchestrator.ckpt.reset();
  EXPECT_THAT(refusal([&] { prepare_run_folder(again); }), HasSubstr("metrics.jsonl"));
}

TEST_F(RunFolderOfRl, CleaningRemovesOurNamesAlone) {
  const fs::path elsewhere = root_.string() + "-elsewhere";
  fs::create_directories(elsewhere / "step_9");
  fs::create_directory_symlink(elsewhere, root_ / "broadcasts");
  for (const char* mine :
       {"logs/mine.log", "rollouts/mine/notes.txt", "configs/mine.toml", "configs/sft.toml", "weights/best/model.bin", "README"})
    put(mine, "mine");
  put("logs/attempt_3/trainer/rank_1.log");
  fs::create_symlink("attempt_3", root_ / "logs/latest");
  fs::create_symlink("latest/trainer", root_ / "logs/trainer");
  put("evals/sums--m/0123abcd/results.jsonl");
  put("checkpoints/step_8.tmp-77-0/half");
  config::RlConfig again = rl();
  again.clean_output_dir = true;
  // A folder that is a link is nothing we made; what it holds still stands in the way.
  EXPECT_THAT(refusal([&] { prepare_run_folder(again); }), HasSubstr("is a link"));
  fs::remove(root_ / "broadcasts");
  EXPECT_TRUE(fs::exists(elsewhere / "step_9"));
  fs::remove_all(elsewhere);
  prepare_run_folder(again);
  for (const char* gone : {"attempt_3", "latest", "trainer"}) EXPECT_FALSE(fs::exists(fs::symlink_status(root_ / "logs" / gone))) << gone;
  std::vector<std::string> left;
  for (const auto& [name, text] : bytes())
    if (!text.empty()) left.push_back(name);
  EXPECT_THAT(left, ElementsAre("README", "configs/mine.toml", "configs/sft.toml", "logs/mine.log", "rollouts/mine/notes.txt", "run.json",
                                "weights/best/model.bin"));
}

TEST_F(OneRunFolder, WhatHasNoMarkIsNotOurs) {
  put("rollouts/step_1/a", "mine");
  put("logs/rl.log", "mine");
  config::RlConfig config = rl();
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }), HasSubstr("rollouts of another run"));
  config.clean_output_dir = true;
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }), HasSubstr("no run.json"));
  fs::remove_all(root_ / "rollouts" / "step_1");
  put("rollouts/mine/a", "mine");
  prepare_run_folder(config);
  EXPECT_EQ(read_file(root_ / "rollouts/mine/a"), "mine");
  EXPECT_EQ(read_file(root_ / "logs/rl.log"), "mine");
}

TEST_F(OneRunFolder, AnEvaluationsFolderIsRefusedAndAFailedStartIsNoRecord) {
  OutputFolder(root_).claim("eval");
  put("logs/eval.log");
  config::RlConfig config = rl();
  prepare_run_folder(config);  // it evaluated nothing
  EXPECT_THAT(OutputFolder(root_).owner(), HasSubstr("prl rl"));
  put("configs/rl.json");
  prepare_run_folder(config);  // nor did the run before get anywhere
  OutputFolder(root_).claim("eval");
  put("evals/sums--m/0123abcd/results.jsonl");
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }), AllOf(HasSubstr("evals"), HasSubstr("`prl rl`, `prl eval`")));
}

TEST_F(OneRunFolder, WeightsThatWaitForAnEvaluationOutliveAResume) {
  config::SftConfig config;
  config.output_dir = root_;
  config.max_steps = 6;
  config.ckpt.emplace();
  config.eval.emplace();
  prepare_run_folder(config);
  for (std::int64_t step = 1; step <= 6; ++step) row(step, "sft");
  for (const std::int64_t step : {2, 4, 6}) row(step, "eval");
  save(4, {"trainer"});
  for (const char* step : {"step_2", "step_4", "step_6"}) put(fmt::format("broadcasts/{}/STABLE", step));
  config.ckpt->resume_step = 4;
  EXPECT_FALSE(prepare_run_folder(config).is_finished);
  EXPECT_THAT(names("broadcasts"), ElementsAre("step_2", "step_4"));
  std::string rows = read_file(root_ / "metrics.jsonl");
  EXPECT_THAT(rows, HasSubstr(R"({"step": 4, "role": "eval")"));
  EXPECT_EQ(rows.find("\"step\": 6"), std::string::npos) << rows;
  // Asked for, the evaluation of the step itself is made again.
  config.eval->skip_eval_on_resume = false;
  prepare_run_folder(config);
  rows = read_file(root_ / "metrics.jsonl");
  EXPECT_EQ(rows.find(R"("step": 4, "role": "eval")"), std::string::npos) << rows;
  EXPECT_THAT(rows, HasSubstr(R"({"step": 4, "role": "sft")"));
  // After the last step there is something to do only while weights wait.
  config.max_steps = 4;
  EXPECT_FALSE(prepare_run_folder(config).is_finished);
  fs::remove_all(root_ / "broadcasts");
  EXPECT_TRUE(prepare_run_folder(config).is_finished);
}

TEST_F(RunFolderOfRl, NeverCleanKeepsEverything) {
  ::setenv("NEVER_CLEAN", "1", 1);
  config::RlConfig again = rl();
  again.clean_output_dir = true;
  EXPECT_THAT(refusal([&] { prepare_run_folder(again); }), HasSubstr("another run (of `prl rl`)"));
}

TEST_F(RunFolderOfRl, AnOlderStepMovesTheAbandonedBranchAway) {
  put("broadcasts/step_4/STABLE");
  put("broadcasts/step_6/STABLE");
  save(8, {"trainer"});
  config::RlConfig config = rl_resumed(4);
  const PreparedFolder prepared = prepare_run_folder(config);
  EXPECT_EQ(config.trainer.ckpt->resume_step, 4);
  EXPECT_EQ(config.orchestrator.ckpt->resume_step, 4);
  EXPECT_THAT(names("checkpoints"), ElementsAre("step_2", "step_4"));
  EXPECT_THAT(names("weights"), ElementsAre("step_2", "step_4"));
  EXPECT_THAT(names("rollouts"), ElementsAre("step_1", "step_2", "step_3", "step_4"));
  EXPECT_THAT(names("broadcasts"), IsEmpty()) << "the trainer publishes step 4 anew: what is there may be damaged";
  EXPECT_THAT(names("abandoned_after_step_4/checkpoints"), ElementsAre("step_6"));
  EXPECT_THAT(names("abandoned_after_step_4/rollouts"), ElementsAre("step_5", "step_6"));
  EXPECT_EQ(read_file(root_ / "metrics.jsonl").find("\"step\": 5"), std::string::npos);
  EXPECT_THAT(read_file(root_ / "abandoned_after_step_4/metrics.jsonl"), HasSubstr("\"step\": 5"));
  EXPECT_THAT(prepared.notes,
              ElementsAre(AllOf(HasSubstr("resuming after step 4"), HasSubstr("moved to"), HasSubstr("checkpoints 6"),
                                HasSubstr("incomplete checkpoints 8"), HasSubstr("rollouts 5 and 6"), HasSubstr("4 rows"))));
  config::RlConfig latest = rl_resumed(-1);
  EXPECT_THAT(prepare_run_folder(latest).notes, IsEmpty());
  EXPECT_EQ(latest.trainer.ckpt->resume_step, 4) << "not the branch that was left";
}

TEST_F(RunFolderOfRl, AResumeAfterADeathRemovesWhatIsHalf) {
  save(8, {"orchestrator"});
  put("rollouts/step_7/rank_0.bin");
  put("rollouts/END", "6");
  row(7, "orchestrator");
  row(7, "online_eval");
  row(7, "eval");  // of `prl eval`
  put("checkpoints/step_8.tmp-77-0/half");
  put("checkpoints/step_6/trainer.tmp-77-1/half");
  put("configs/rl.json.tmp-77", "half");
  put("rollouts/END.tmp-77", "half");
  put("metrics.jsonl", "{\"step\": 8, \"ro");
  config::RlConfig config = rl_resumed(-1);
  const PreparedFolder prepared = prepare_run_folder(config);
  EXPECT_EQ(config.trainer.ckpt->resume_step, 6);
  EXPECT_THAT(names("checkpoints"), ElementsAre("step_2", "step_4", "step_6"));
  EXPECT_THAT(names("checkpoints/step_6"), ElementsAre("orchestrator", "trainer"));
  EXPECT_THAT(names("configs"), ElementsAre("rl.json", "rl.toml"));
  EXPECT_THAT(names(""), Not(Contains(HasSubstr("abandoned"))));
  for (const char* marker : {"END", "END.tmp-77"}) EXPECT_FALSE(fs::exists(root_ / "rollouts" / marker)) << marker;
  const std::string rows = read_file(root_ / "metrics.jsonl");
  EXPECT_THAT(rows, AllOf(HasSubstr("{\"step\": 7, \"role\": \"eval\""), Not(HasSubstr("\"step\": 7, \"role\": \"o")),
                          Not(HasSubstr("step\": 8"))));
  EXPECT_THAT(prepared.notes, ElementsAre(AllOf(HasSubstr("removed"), HasSubstr("incomplete checkpoints 8"), HasSubstr("1 damaged"))));
}

TEST_F(RunFolderOfRl, AStepThatIsMissingNamesThoseThereAre) {
  config::RlConfig config = rl_resumed(5);
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }), AllOf(HasSubstr("step 5"), HasSubstr("2, 4, 6")));
}

TEST_F(RunFolderOfRl, MaxStepsBelowTheCheckpointIsAnError) {
  config::RlConfig config = rl_resumed(-1);
  config.trainer.max_steps = 5;
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }), AllOf(HasSubstr("is 5"), HasSubstr("step 6"), HasSubstr("2, 4 and 6")));
  config.trainer.max_steps = 6;
  const auto before = bytes();
  const PreparedFolder prepared = prepare_run_folder(config);
  EXPECT_TRUE(prepared.is_finished);
  EXPECT_THAT(prepared.notes, ElementsAre(AllOf(HasSubstr("nothing to do"), HasSubstr("step 6"))));
  EXPECT_EQ(bytes(), before);
  fs::create_directories(root_ / "recovery/step_5");  // of a launcher that was killed when all was done
  prepare_run_folder(config);
  EXPECT_TRUE(fs::exists(root_ / "recovery/step_5")) << "what is not ours stays";
  fs::remove(root_ / "recovery/step_5");
  prepare_run_folder(config);
  EXPECT_FALSE(fs::exists(root_ / "recovery"));
}

TEST_F(RunFolderOfRl, AWeightsOnlyRunCannotBeResumed) {
  fs::remove_all(root_ / "checkpoints");
  config::RlConfig config = rl_resumed(-1);
  config.trainer.ckpt->weights_only = true;
  EXPECT_THAT(refusal([&] { prepare_run_folder(config); }),
              AllOf(HasSubstr("only weights of steps 2, 4 and 6"), HasSubstr("weights/step_6"), HasSubstr("--clean-output-dir")));
}

TEST_F(OneRunFolder, TheFirstStartOfALoopThatResumesIsFresh) {
  config::RlConfig config = rl_resumed(-1);
  prepare_run_folder(config);
  EXPECT_EQ(config.trainer.ckpt->resume_step, std::nullopt);
  // Killed before its first checkpoint: it starts over, without the rows of the first try.
  row(1, "trainer");
  put("rollouts/step_1/rank_0.bin");
  config = rl_resumed(-1);
  prepare_run_folder(config);
  EXPECT_THAT(names("rollouts"), IsEmpty());
  EXPECT_EQ(read_file(root_ / "metrics.jsonl"), "");
}

TEST_F(OneRunFolder, ABenchmarksRecordsGiveWay) {
  config::RlConfig config = rl();
  config.trainer.bench.emplace();
  for (int i = 0; i < 2; ++i) {
    prepare_run_folder(config);
    row(1, "trainer");
  }
  config.trainer.bench.reset();
  prepare_run_folder(config);
  EXPECT_FALSE(fs::exists(root_ / "metrics.jsonl"));
}

TEST_F(OneRunFolder, ABenchmarksTableReplacesNoFile) {
  config::RlConfig rl_run = rl();
  config::SftConfig sft_run;
  config::TrainerConfig trainer = rl_run.trainer;
  sft_run.output_dir = trainer.output_dir = root_;
  const fs::path table = root_ / "mine.json";
  write_file_atomic(table, "mine");
  config::OrchestratorConfig orchestrator = rl_run.orchestrator;
  orchestrator.output_dir = root_;
  config::RlConfig rl_orchestrator = rl_run;
  rl_orchestrator.trainer.bench.emplace();
  const auto all = {&rl_run.trainer.bench, &rl_orchestrator.orchestrator.bench, &sft_run.bench, &trainer.bench, &orchestrator.bench};
  for (std::optional<config::BenchModeConfig>* bench : all) bench->emplace().output_json = table;
  EXPECT_THAT(refusal([&] { prepare_run_folder(rl_run); }), AllOf(HasSubstr("mine.json exists already"), HasSubstr("--bench.overwrite")));
  EXPECT_THAT(refusal([&] { prepare_run_folder(sft_run); }), HasSubstr("mine.json exists already"));
  EXPECT_THAT(refusal([&] { prepare_run_folder(trainer); }), HasSubstr("mine.json exists already"));
  EXPECT_THAT(refusal([&] { prepare_run_folder(orchestrator); }), HasSubstr("mine.json exists already"));
  EXPECT_THAT(refusal([&] { prepare_run_folder(rl_orchestrator); }), HasSubstr("mine.json exists already"));
  EXPECT_EQ(read_file(table), "mine");
  for (std::optional<config::BenchModeConfig>* bench : all) (*bench)->overwrite = true;
  prepare_run_folder(sft_run);
  prepare_run_folder(trainer);
  prepare_run_folder(rl_run);
  EXPECT_EQ(read_file(table), "mine") << "until the table is there";
}

TEST_F(OneRunFolder, ResultsBelongToOneAtATime) {
  const fs::path folder = root_ / "results";
  auto lock = claim_results_folder(folder, false, "save.disk.path", "");
  EXPECT_THROW(claim_results_folder(folder, true, "resume_path", ""), Error);
  put("results/results.jsonl", "{}\n");
  put("results/results.jsonl.tmp-77", "half");
  lock.reset();
  try {
    claim_results_folder(folder, false, "save.disk.path", ", or go on");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("save.disk.path"), HasSubstr("holds results already"), HasSubstr("or go on")));
  }
  lock = claim_results_folder(folder, true, "resume_path", "");
  EXPECT_THAT(names("results"), ElementsAre(".lock", "results.jsonl"));
}

}  // namespace
}  // namespace prl::launch
