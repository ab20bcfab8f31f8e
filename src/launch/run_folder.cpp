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

bool has_steps(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (parse_step_dir(entry.path().filename().string()) >= 0) return true;
  return false;
}

}  // namespace

void prepare_run_folder(config::RlConfig& config) {
  const fs::path& folder = config.output_dir;
  const bool is_resume = config.trainer.ckpt && config.trainer.ckpt->resume_step;
  if (config.clean_output_dir && !is_resume && fs::exists(folder)) {
    if (std::getenv("NEVER_CLEAN")) {
      log::warning("NEVER_CLEAN is set: {} is not emptied", folder.string());
    } else {
      const fs::path absolute = fs::weakly_canonical(folder);
      if (absolute == absolute.root_path() || absolute == fs::current_path())
        fail(ErrorCode::kInvalidArgument, "clean_output_dir would empty {}; choose an --output-dir below it", absolute.string());
      for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().filename() != RunLock::kFileName) fs::remove_all(entry.path());
    }
  }
  const fs::path checkpoints = checkpoints_folder(config.orchestrator);
  if (!is_resume && has_steps(checkpoints))
    fail(ErrorCode::kAlreadyExists,
         "{} holds checkpoints of another run. Continue it with --ckpt.resume-step -1, remove it (--clean-output-dir empties output_dir), "
         "or "
         "choose another --output-dir",
         checkpoints.string());
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

}  // namespace prl::launch
