#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace prl::launch {

/// Folder of the trace that the processes of one run write together.
inline constexpr const char* kTraceVariable = "PRL_TRACE_FOLDER";
/// Name of a process among those of its run, as its launcher calls it: "trainer", "trainer_rank_1", "inference_1".
inline constexpr const char* kProcessVariable = "PRL_PROCESS";

/// The name that a launcher gave this process; `otherwise` if none did.
std::string process_name(const std::string& otherwise);

/// What this process did and when (base/spans.hpp), from here until the end of the scope: into the run's folder, and into a trace if there
/// is to be one.
class RunSpans {
 public:
  /// `run_folder`: empty: that of the launcher's run, if one started this process. `trace`: none: as the launcher says.
  RunSpans(const std::string& role, const std::filesystem::path& run_folder, const std::optional<std::filesystem::path>& trace);
  ~RunSpans();
  RunSpans(const RunSpans&) = delete;
  RunSpans& operator=(const RunSpans&) = delete;
};

/// Lives around the processes of a run: the constructor removes the trace of an earlier run from the folder, the destructor merges what the
/// processes wrote, killed ones included.
class TraceOfProcesses {
 public:
  explicit TraceOfProcesses(const std::optional<std::filesystem::path>& folder);
  ~TraceOfProcesses();
  TraceOfProcesses(const TraceOfProcesses&) = delete;
  TraceOfProcesses& operator=(const TraceOfProcesses&) = delete;
  /// For kTraceVariable; empty: no trace.
  std::string folder() const { return folder_ ? folder_->string() : std::string(); }

 private:
  std::optional<std::filesystem::path> folder_;
};

}  // namespace prl::launch
