#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <thread>

namespace prl::launch {

/// Where the rows that are there end: what a StepConsole need not show again.
std::uint64_t end_of_file(const std::filesystem::path& path);

/// Shows the step lines of a run whose roles are other processes: reads the rows that they append to metrics.jsonl, on a thread of its own,
/// so that the console is the same as that of a run in one process (RlProgress).
class StepConsole {
 public:
  /// From byte `begin` of the file on; `first_step` as of RlProgress.
  StepConsole(std::filesystem::path metrics, std::uint64_t begin, std::optional<std::int64_t> max_steps, std::int64_t first_step);
  /// Shows what is there, then ends.
  ~StepConsole();
  StepConsole(const StepConsole&) = delete;
  StepConsole& operator=(const StepConsole&) = delete;

 private:
  std::jthread thread_;
};

}  // namespace prl::launch
