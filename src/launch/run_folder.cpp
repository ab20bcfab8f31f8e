#include "launch/run_folder.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/run_lock.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

void remove_steps_after(const fs::path& folder, std::int64_t step) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (parse_step_dir(entry.path().filename().string()) > step || (step == 0 && entry.is_directory()))
      fs::remove_all(entry.path(), ignored);
}

/// Whether there is a step_N below `folder`, or a step_N/<unit> if a unit is given.
bool has_steps(const fs::path& folder, const std::string& unit = {}) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (parse_step_dir(entry.path().filename().string()) >= 0 && (unit.empty() || fs::exists(entry.path() / unit, ignored))) return true;
  return false;
}

/// Empties `folder`, but for the lock that this process holds.
void clean_folder(const fs::path& folder) {
  if (!fs::exists(folder)) return;
  if (std::getenv("NEVER_CLEAN")) {
    log::warning("NEVER_CLEAN is set: {} is not emptied", folder.string());
    return;
  }
  const fs::path absolute = fs::weakly_canonical(folder);
  if (absolute == absolute.root_path() || absolute == fs::current_path())
    fail(ErrorCode::kInvalidArgument, "clean_output_dir would empty {}; choose an --output-dir below it", absolute.string());
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != RunLock::kFileName) fs::remove_all(entry.path());
}

[[noreturn]] void refuse(const fs::path& folder, const char* what, const char* to_remove) {
  fail(ErrorCode::kAlreadyExists, "{} holds {} of another run. Continue it with --ckpt.resume-step -1, {}, or choose another --output-dir",
       folder.string(), what, to_remove);
}

constexpr const char* kCleanFlag = "remove it (--clean-output-dir empties output_dir)";

/// Of a fresh run. `saved` holds the folders that a trainer saves into.
void refuse_other_run(const fs::path& saved, const std::string& unit, const char* to_remove) {
  if (has_steps(saved / "checkpoints", unit)) refuse(saved / "checkpoints", "checkpoints", to_remove);
  if (has_steps(saved / "weights")) refuse(saved / "weights", "weights", to_remove);
}

fs::path saved_folder(const std::optional<config::TrainerCkptConfig>& ckpt, const fs::path& output_dir) {
  return ckpt && ckpt->output_dir ? *ckpt->output_dir : output_dir;
}

}  // namespace

bool is_folder_prepared(const fs::path& output_dir) {
  const char* prepared = std::getenv(kRunFolderVariable);
  return prepared != nullptr && fs::weakly_canonical(prepared) == fs::weakly_canonical(output_dir);
}

void prepare_run_folder(config::RlConfig& config) {
  const fs::path& folder = config.output_dir;
  const bool is_resume = config.trainer.ckpt && config.trainer.ckpt->resume_step;
  if (config.clean_output_dir && !is_resume) clean_folder(folder);
  if (!is_resume) refuse_other_run(checkpoints_folder(config.orchestrator).parent_path(), {}, kCleanFlag);
  const std::int64_t step = orchestrator_resume_step(config.orchestrator);
  if (is_resume) {
    const std::optional<int> settled = step > 0 ? std::optional<int>(static_cast<int>(step)) : std::nullopt;
    config.trainer.ckpt->resume_step = settled;
    if (config.orchestrator.ckpt) config.orchestrator.ckpt->resume_step = settled;
  }
  remove_steps_after(folder / "rollouts", step);
  remove_steps_after(folder / "broadcasts", step);
  if (!is_resume) {
    std::error_code ignored;
    fs::remove(folder / config.trainer.file_monitor.path, ignored);
    fs::remove_all(folder / "logs", ignored);
  }
  fs::create_directories(folder / "logs");
}

void prepare_run_folder(const config::SftConfig& config) {
  if (config.bench) return;
  const bool is_resume = config.ckpt && config.ckpt->resume_step;
  if (!is_resume) {
    if (config.clean_output_dir) clean_folder(config.output_dir);
    refuse_other_run(saved_folder(config.ckpt, config.output_dir), {}, kCleanFlag);
    std::error_code ignored;
    fs::remove(config.output_dir / config.file_monitor.path, ignored);
    fs::remove(config.output_dir / "logs" / "sft.log", ignored);
  }
  fs::create_directories(config.output_dir / "logs");
}

void prepare_run_folder(const config::TrainerConfig& config) {
  const bool is_resume = config.ckpt && config.ckpt->resume_step;
  if (config.bench || is_resume) return;
  refuse_other_run(saved_folder(config.ckpt, config.output_dir), "trainer", "remove it");
  if (has_steps(config.output_dir / "broadcasts")) refuse(config.output_dir / "broadcasts", "weights", "remove it");
}

void prepare_run_folder(const config::OrchestratorConfig& config) {
  if (config.bench || (config.ckpt && config.ckpt->resume_step)) return;
  const fs::path checkpoints = checkpoints_folder(config);
  if (has_steps(checkpoints, "orchestrator")) refuse(checkpoints, "checkpoints", "remove it");
}

}  // namespace prl::launch
