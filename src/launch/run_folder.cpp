#include "launch/run_folder.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/output_file.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/output_folder.hpp"
#include "monitor/metrics_file.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/progress.hpp"
#include "rollouts/file_queue.hpp"
#include "trainer/checkpoint.hpp"
#include "weights/weight_channel.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTrainerUnit = "trainer";

/// What a command asks of its folder.
struct Start {
  std::string kind;                ///< of OutputFolder
  std::vector<std::string> units;  ///< roles whose parts make a checkpoint
  std::vector<std::string> roles;  ///< of the rows in metrics.jsonl
  std::optional<trainer::ResumeOptions> resume{};
  std::optional<std::int64_t> max_steps{};
  bool clean = false;
  bool is_bench = false;
  bool saves_weights_only = false;
  bool works_after_last_step = false;  ///< evaluations of the last policy may be left to do
  bool keeps_broadcast = false;        ///< of the step that it resumes from: an evaluation may be left to do
  bool is_alone = false;               ///< another role may be writing in the folder
};

/// Before the run, which the table at its end may follow by minutes.
void check_bench_output(const std::optional<config::BenchModeConfig>& bench) {
  if (bench && bench->output_json) refuse_overwrite(*bench->output_json, bench->overwrite, "--bench.overwrite");
}

bool may_clean(PreparedFolder& prepared, const fs::path& folder) {
  if (std::getenv("NEVER_CLEAN") == nullptr) return true;
  prepared.notes.push_back(fmt::format("NEVER_CLEAN is set: nothing is removed from {}", folder.string()));
  return false;
}

/// Of a fresh run over `found`. `can_clean`: the command has clean_output_dir.
[[noreturn]] void refuse(const OutputFolder& folder, const std::vector<std::string>& found, const std::string& kind, bool can_clean) {
  const bool can_resume = folder.may_be_of(kind) && !folder.is_bench();
  fail(ErrorCode::kAlreadyExists, "{} holds {} of {}. Ways out: {}{}, or choose another --output-dir", folder.root().string(),
       fmt::join(found, ", "), folder.owner(), can_resume ? "continue it with --ckpt.resume-step -1, " : "",
       !can_clean           ? "remove them"
       : folder.is_marked() ? "remove what that run wrote with --clean-output-dir"
                            : "remove them by hand");
}

void start_fresh(OutputFolder& folder, const Start& start, PreparedFolder& prepared) {
  if ((start.clean || folder.is_bench()) && !folder.records().empty() && may_clean(prepared, folder.root())) {
    const std::string owner = folder.owner();
    folder.clean();
    prepared.notes.push_back(fmt::format("removed the records of {} from {}", owner, folder.root().string()));
  }
  if (const auto found = folder.records(); !found.empty()) refuse(folder, found, start.kind, true);
  folder.claim(start.kind, start.is_bench);
  if (!start.is_alone) folder.remove_temporaries();
}

/// Of a resume that finds no checkpoint. A run that saves weights alone would begin again at every start of a loop that resumes.
void check_may_start_over(const OutputFolder& folder, const Start& start) {
  const std::vector<std::int64_t> snapshots = folder.snapshots();
  if (snapshots.empty() || !start.saves_weights_only) return;
  fail(ErrorCode::kNotFound,
       "ckpt.resume_step: there is no checkpoint under {} to resume from, only weights of steps {}: a run with ckpt.weights_only saves no "
       "optimizer state. Train on from {} with --model.name and another --output-dir, or start over with --clean-output-dir",
       folder.checkpoints().string(), list_of_steps(snapshots), io::checkpoint_folder(folder.weights(), snapshots.back()).string());
}

/// Error{kInvalidArgument} if the run would have ended before the checkpoint; true if it ended with it.
bool is_at_its_end(const OutputFolder& folder, const Start& start, std::int64_t step) {
  if (!start.max_steps || step < *start.max_steps) return false;
  if (step == *start.max_steps) return !start.works_after_last_step;
  fail(ErrorCode::kInvalidArgument,
       "max_steps: is {}, but the checkpoint to resume from is of step {}. Raise max_steps, or resume from an earlier step with "
       "--ckpt.resume-step; {} holds steps {}",
       *start.max_steps, step, folder.checkpoints().string(), list_of_steps(io::list_checkpoints(folder.checkpoints(), start.units)));
}

/// The step to go on from; nullopt for a start from scratch.
std::optional<std::int64_t> start_resumed(OutputFolder& folder, const Start& start, PreparedFolder& prepared) {
  const std::vector<std::string> found = folder.records();
  if (!found.empty() && !folder.may_be_of(start.kind))
    fail(ErrorCode::kAlreadyExists, "ckpt.resume_step: {} holds {} of {}, which `prl {}` cannot continue; choose another --output-dir",
         folder.root().string(), fmt::join(found, ", "), folder.owner(), start.kind);
  const std::optional<std::int64_t> step = trainer::find_resume_step(folder.checkpoints(), *start.resume);
  if (!step && !start.is_alone) check_may_start_over(folder, start);
  if (step && is_at_its_end(folder, start, *step)) {
    prepared.is_finished = true;
    // Of a launcher that was killed when all was done.
    if (!start.is_alone) orchestrator::drop_recovery(folder.root() / orchestrator::kRecoveryFolder);
    prepared.notes.push_back(fmt::format("nothing to do: {} is of step {}, which is max_steps; raise max_steps to train on",
                                         io::checkpoint_folder(folder.checkpoints(), *step).string(), *step));
    return step;
  }
  folder.claim(start.kind);
  const OutputFolder::Dropped dropped = start.is_alone
                                            ? folder.drop_own_after(step.value_or(0), start.units, start.roles)
                                            : folder.drop_after(step.value_or(0), start.units, start.roles, start.keeps_broadcast);
  if (!step)
    prepared.notes.push_back(fmt::format("no complete checkpoint under {}: the run starts from scratch", folder.checkpoints().string()));
  if (const std::string what = dropped.describe(); !what.empty()) {
    const std::string from = step ? fmt::format("resuming after step {}", *step) : std::string("starting from scratch");
    prepared.notes.push_back(dropped.moved_to.empty()
                                 ? fmt::format("{}: what came later was removed: {}", from, what)
                                 : fmt::format("{}: what came later was moved to {}: {}", from, dropped.moved_to.string(), what));
  }
  return step;
}

std::optional<std::int64_t> prepare(OutputFolder& folder, const Start& start, PreparedFolder& prepared) {
  std::optional<std::int64_t> step;
  if (start.resume)
    step = start_resumed(folder, start, prepared);
  else
    start_fresh(folder, start, prepared);
  return step;
}

fs::path saved_folder(const std::optional<config::TrainerCkptConfig>& ckpt) {
  return ckpt && ckpt->output_dir ? *ckpt->output_dir : fs::path();
}

std::optional<int> settled(const std::optional<std::int64_t>& step) {
  return step && *step > 0 ? std::optional<int>(static_cast<int>(*step)) : std::nullopt;
}

template <typename Ckpt>
std::optional<trainer::ResumeOptions> resume_of(const std::optional<Ckpt>& ckpt, std::vector<std::string> units) {
  if (!ckpt || !ckpt->resume_step) return std::nullopt;
  trainer::ResumeOptions resume;
  resume.step = *ckpt->resume_step;
  resume.units = std::move(units);
  return resume;
}

}  // namespace

bool is_folder_prepared(const fs::path& output_dir) {
  const char* prepared = std::getenv(kRunFolderVariable);
  return prepared != nullptr && fs::weakly_canonical(prepared) == fs::weakly_canonical(output_dir);
}

bool holds_broadcasts(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder / "broadcasts", ignored))
    if (parse_step_dir(entry.path().filename().string()) >= 0 && fs::exists(entry.path() / "STABLE", ignored)) return true;
  return false;
}

PreparedFolder prepare_run_folder(config::RlConfig& config, bool begins_again) {
  check_bench_output(config.trainer.bench);
  check_bench_output(config.orchestrator.bench);
  OutputFolder folder(config.output_dir, saved_folder(config.trainer.ckpt), config.trainer.file_monitor.path);
  Start start{.kind = "rl",
              .units = {kTrainerUnit, orchestrator::kCheckpointUnit},
              .roles = {kTrainerRows, kOrchestratorRows, orchestrator::kOnlineEvalRows, orchestrator::kValidationRows}};
  const bool has_state = config.orchestrator.ckpt && !config.orchestrator.ckpt->skip_progress;
  start.resume = resume_of(config.trainer.ckpt, has_state ? start.units : std::vector<std::string>{kTrainerUnit});
  if (begins_again) {
    start.resume.emplace();
    start.resume->step = -1;
    start.resume->units = has_state ? start.units : std::vector<std::string>{kTrainerUnit};
  }
  if (start.resume && config.trainer.ckpt && !config.orchestrator.ckpt)
    fail(ErrorCode::kInvalidArgument,
         "trainer.ckpt.resume_step: the orchestrator has no checkpoints (orchestrator.ckpt is off), so it cannot go on "
         "from that step; set ckpt.resume_step for both");
  start.max_steps = config.trainer.max_steps;
  start.clean = config.clean_output_dir && !begins_again;
  start.is_bench = config.trainer.bench.has_value();
  start.saves_weights_only = config.trainer.ckpt && config.trainer.ckpt->weights_only;
  start.works_after_last_step = config.orchestrator.eval.has_value();
  PreparedFolder prepared;
  const std::optional<std::int64_t> step = prepare(folder, start, prepared);
  if (start.resume && config.trainer.ckpt) {
    config.trainer.ckpt->resume_step = settled(step);
    config.orchestrator.ckpt->resume_step = settled(step);
    // An evaluation that is made again writes its row again.
    if (step && config.orchestrator.eval && !config.orchestrator.eval->skip_eval_on_resume) {
      const std::string roles[] = {orchestrator::kOnlineEvalRows};
      monitor::trim_rows(folder.metrics(), roles, *step - 1);
    }
  }
  return prepared;
}

PreparedFolder prepare_run_folder(config::SftConfig& config) {
  PreparedFolder prepared;
  check_bench_output(config.bench);
  if (config.bench) return prepared;
  OutputFolder folder(config.output_dir, saved_folder(config.ckpt), config.file_monitor.path);
  Start start{.kind = "sft", .units = {kTrainerUnit}, .roles = {kSftRows, kEvalRows}};
  start.resume = resume_of(config.ckpt, start.units);
  start.max_steps = config.max_steps;
  start.clean = config.clean_output_dir;
  start.saves_weights_only = config.ckpt && config.ckpt->weights_only;
  // Weights that are evaluated are removed: those that are there wait for it.
  start.keeps_broadcast = config.eval.has_value();
  start.works_after_last_step = config.eval && holds_broadcasts(config.output_dir);
  const std::optional<std::int64_t> step = prepare(folder, start, prepared);
  if (start.resume) config.ckpt->resume_step = settled(step);
  // An evaluation that is made again writes its row again.
  if (start.resume && step && config.eval && !config.eval->skip_eval_on_resume) {
    const std::string roles[] = {kEvalRows};
    monitor::trim_rows(folder.metrics(), roles, *step - 1);
  }
  return prepared;
}

PreparedFolder prepare_run_folder(config::TrainerConfig& config) {
  PreparedFolder prepared;
  check_bench_output(config.bench);
  if (config.bench) return prepared;
  OutputFolder folder(config.output_dir, saved_folder(config.ckpt), config.file_monitor.path);
  Start start{.kind = "rl", .units = {kTrainerUnit}, .roles = {kTrainerRows}, .is_alone = true};
  if (config.data.is_sent()) start.units.emplace_back(orchestrator::kCheckpointUnit);
  start.resume = resume_of(config.ckpt, start.units);
  start.max_steps = config.max_steps;
  if (start.resume) {
    config.ckpt->resume_step = settled(prepare(folder, start, prepared));
    return prepared;
  }
  // The orchestrator may have begun: only what this role would overwrite stands in its way.
  std::vector<std::string> found;
  if (folder.holds_unit(kTrainerUnit)) found.emplace_back("checkpoints");
  for (const std::string& record : folder.records())
    if (record == "weights" || record == "broadcasts") found.push_back(record);
  if (monitor::has_rows_of(folder.metrics(), kTrainerRows)) found.push_back(config.file_monitor.path.string());
  if (!found.empty()) refuse(folder, found, "rl", false);
  folder.claim("rl");
  return prepared;
}

PreparedFolder prepare_run_folder(config::OrchestratorConfig& config) {
  PreparedFolder prepared;
  check_bench_output(config.bench);
  if (config.bench) return prepared;
  OutputFolder folder(config.output_dir, checkpoints_folder(config).parent_path(), config.file_monitor.path);
  const std::string roles[] = {kOrchestratorRows, orchestrator::kOnlineEvalRows, orchestrator::kValidationRows};
  if (config.ckpt && config.ckpt->resume_step) {
    const std::int64_t step = orchestrator_resume_step(config);
    config.ckpt->resume_step = settled(step);
    monitor::trim_rows(folder.metrics(), roles, step);
    if (config.run) {
      // The trainer of several runs goes back to the same step once it sees the configuration of this start.
      weights::remove_broadcasts_after(config.output_dir / "broadcasts", step);
      rollouts::clean_file_queue(config.output_dir / "rollouts", step + 1);
    }
  } else {
    std::vector<std::string> found;
    if (folder.holds_unit(orchestrator::kCheckpointUnit)) found.emplace_back("checkpoints");
    if (monitor::has_rows_of(folder.metrics(), kOrchestratorRows)) found.push_back(config.file_monitor.path.string());
    if (!found.empty()) refuse(folder, found, "rl", false);
  }
  folder.claim("rl");
  return prepared;
}

}  // namespace prl::launch
