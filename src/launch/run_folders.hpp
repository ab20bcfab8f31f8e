#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "config/orchestrator_config.hpp"
#include "config/trainer_config.hpp"

namespace prl::launch {

/// Folders of the runs that one trainer serves: <output_dir>/run_*, each with the configuration of its orchestrator and what a person
/// asks of it. docs/runs.md describes the files.

/// What tells a folder and a configuration from others that come to have the same names.
struct RunStamp {
  std::array<std::int64_t, 2> folder{};  ///< device and inode
  std::array<std::int64_t, 4> config{};  ///< inode, size, seconds and nanoseconds of the last change
  bool operator==(const RunStamp&) const = default;
};

std::string to_string(const RunStamp& stamp);

struct RunFolder {
  std::string name;  ///< "run_alpha"
  std::filesystem::path folder;
  std::filesystem::path config;  ///< configs/orchestrator.toml, which the orchestrator has written, or else configs/orch.toml
  RunStamp stamp;

  /// Whether the folder is still the one that was found, with a configuration in it.
  bool is_there() const;
  /// What this process has written to it since it was last seen to be there.
  struct Written {
    std::int64_t first_step = 0, last_step = 0;        ///< of what has a step
    std::filesystem::file_time_type since{}, until{};  ///< when it was last seen, and when the last writer had ended
  };
  /// Of one that is not there: removes the folder if all in it is what this process wrote while somebody else was removing it, by its
  /// place, its step and its time. If there is anything else, older or newer files of the same names too, nothing is removed.
  void remove_leftovers(const Written& written) const;
  std::filesystem::path error_file() const { return folder / "configs/error.txt"; }
};

inline constexpr const char* kRunPrefix = "run_";
/// All of them, by name. Folders without a configuration are no runs yet, and other names, links and files are none.
std::vector<RunFolder> find_run_folders(const std::filesystem::path& output_dir);

/// The orchestrator's configuration. ConfigError, or Error{kNotImplemented} for what it asks for and is not built.
config::OrchestratorConfig read_run_config(const RunFolder& run);
/// How `shared`, the trainer of several runs, trains this one, in the run's folder and from its newest checkpoint if it has one.
/// Error{kInvalidArgument} naming a key that does not fit.
config::TrainerConfig trainer_config_of(const config::TrainerConfig& shared, const RunFolder& run,
                                        const config::OrchestratorConfig& orchestrator);

/// Whether two runs send their samples through a port that can be only one's: each takes its port and the next one.
bool share_ports(const config::RolloutTransport& a, const config::RolloutTransport& b) noexcept;

/// What a person asks of a run, in <run>/configs/control.json.
enum class RunState {
  kRun,
  kPause,  ///< keeps its slot and is not stepped
  kDrain,  ///< no new rollouts; what was sent is trained on and saved, then the slot is free
  kStop,   ///< is saved after the step in hand, then the slot is free
};
std::string_view to_string(RunState state) noexcept;
struct RunControlFile {
  RunState state = RunState::kRun;
  std::optional<double> weight;  ///< instead of run.weight
};
std::filesystem::path control_file(const std::filesystem::path& run_folder);
/// The defaults if there is no file. Error{kCorrupt} naming the file and the key.
RunControlFile read_control(const std::filesystem::path& run_folder);
void write_control(const std::filesystem::path& run_folder, const RunControlFile& control);

/// <output_dir>/runs.json: how the trainer says its runs are.
inline constexpr const char* kRunsFile = "runs.json";
struct RunReport {
  std::string name;
  std::string state = "unknown";  ///< "training", "paused", "waiting", "refused", "failed", "ended"
  std::string detail;
  std::string adapter;
  std::string stamp;  ///< of what has ended
  std::optional<std::int64_t> slot, step, tokens;
  double weight = 1;
};
/// Empty if there is no such file. Error{kCorrupt}.
std::vector<RunReport> read_runs_file(const std::filesystem::path& output_dir);

/// Asks a process to stop when the control file of its run says drain or stop, or when the folder is taken away: a thread that looks
/// twice a second.
class RunControlWatch {
 public:
  /// `on_stop` is called at most once, on that thread, with the reason.
  RunControlWatch(std::filesystem::path run_folder, std::function<void(const std::string& reason)> on_stop);

 private:
  std::jthread thread_;
};

}  // namespace prl::launch
