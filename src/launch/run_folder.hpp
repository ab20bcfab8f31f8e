#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/orchestrator_config.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"

namespace prl::launch {

using config::kRunFolderVariable;
/// Whether the process was started by a launcher that has made this folder ready.
bool is_folder_prepared(const std::filesystem::path& output_dir);

/// Whether broadcasts/ in the folder of a run holds a step, whole: of `prl sft` one that waits for its evaluation.
bool holds_broadcasts(const std::filesystem::path& output_dir);

/// Roles of the rows in metrics.jsonl; orchestrator/metrics.hpp has two more.
inline constexpr const char* kTrainerRows = "trainer";
inline constexpr const char* kOrchestratorRows = "orchestrator";
inline constexpr const char* kSftRows = "sft";
inline constexpr const char* kEvalRows = "eval";

/// What became of an output folder.
struct PreparedFolder {
  std::vector<std::string> notes;  ///< for the run's log, which is opened afterwards
  bool is_finished = false;        ///< the checkpoint is of the last step already: nothing was touched and nothing is to do
};

/// Makes output_dir ready by the rules of OutputFolder. Refuses first and touches afterwards: whoever calls it has checked the rest of
/// the configuration (start_checks.hpp) and holds the RunLock.
///
/// A fresh run removes nothing unless clean_output_dir asks for it, and is refused where any command left records. A resumed one takes
/// over from its checkpoint and drops what came after it; a benchmark's records give way to any run.
/// Settles ckpt.resume_step: -1 becomes the step that was found, or nothing, so that all roles start from the same one.
/// Error{kAlreadyExists} naming the folder, whose it is and the ways out; Error{kInvalidArgument} for a step beyond max_steps; what
/// trainer::find_resume_step throws.
/// `begins_again`: whatever the configuration says, from the newest checkpoint, or from the start if there is none.
PreparedFolder prepare_run_folder(config::RlConfig& config, bool begins_again = false);
/// The same for `prl sft`.
PreparedFolder prepare_run_folder(config::SftConfig& config);
/// The same for a role that was started alone. Trainer and orchestrator share the folder and may start in any order: what a fresh
/// role would overwrite of its own is refused, and a resumed one drops only what is its own.
PreparedFolder prepare_run_folder(config::TrainerConfig& config);
PreparedFolder prepare_run_folder(config::OrchestratorConfig& config);

}  // namespace prl::launch
