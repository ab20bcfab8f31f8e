#include "launch/run_spans.hpp"

#include <cstdlib>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/spans.hpp"
#include "launch/run_folder.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

fs::path from_environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? fs::path(value) : fs::path();
}

}  // namespace

std::string process_name(const std::string& otherwise) {
  const std::string name = from_environment(kProcessVariable).string();
  return name.empty() ? otherwise : name;
}

RunSpans::RunSpans(const std::string& role, const fs::path& run_folder, const std::optional<fs::path>& trace) {
  spans::Options options;
  options.process = process_name(role);
  options.run_folder = run_folder.empty() ? from_environment(kRunFolderVariable) : run_folder;
  options.trace_folder = from_environment(kTraceVariable);
  if (options.trace_folder.empty() && trace) options.trace_folder = *trace;
  spans::setup(options);
}

RunSpans::~RunSpans() { spans::finish(); }

TraceOfProcesses::TraceOfProcesses(const std::optional<fs::path>& folder) {
  if (!folder) return;
  folder_ = fs::absolute(*folder);
  spans::clear_trace(*folder_);
}

TraceOfProcesses::~TraceOfProcesses() {
  if (!folder_) return;
  try {
    spans::merge_trace(*folder_);
    log::info("trace: {}, for ui.perfetto.dev or chrome://tracing", (*folder_ / "trace.json").string());
  } catch (const std::exception& error) {
    log::warning("the trace is not merged: {}", error.what());
  }
}

}  // namespace prl::launch
