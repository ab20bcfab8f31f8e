#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

/// What each part of a run did and when: spans of time on lanes ("trainer", "environment/gsm8k"). Beside the log the only process-wide
/// service, for the same reason. The run folder gets the coarse ones, a bounded number, which the page draws; a trace gets all, and
/// becomes one file that Perfetto and Chrome open.
namespace prl::spans {

using Clock = std::chrono::steady_clock;

enum class Detail {
  kCoarse,  ///< some per second: parts of steps
  kFine,    ///< any number: rows, steps of an engine, rollouts
};

struct Options {
  std::string process = {};                 ///< "trainer", "inference_1": names the files
  std::filesystem::path run_folder = {};    ///< gets spans/<process>.jsonl; empty: nothing is kept there
  std::filesystem::path trace_folder = {};  ///< gets the trace; empty: none
};
/// Opens the files, which replaces those of an earlier call. A folder that cannot be written is a warning. Before threads start.
void setup(const Options& options);
/// Writes what is left and merges the trace of all processes that have written to its folder so far: <trace_folder>/trace.json. The last
/// process of a run to end makes it whole.
void finish();
/// Cheap enough to ask anywhere.
bool is_on(Detail detail) noexcept;

struct Span {
  std::string_view lane;
  std::string_view name;
  Clock::time_point begin, end;
  std::int64_t step = -1;      ///< -1: of none
  std::string_view note = {};  ///< more about it, as members of a JSON object: R"("rows":3)"
  bool may_overlap = false;    ///< others of its lane may run at the same time, as rollouts do
};
/// Any thread. Does nothing unless is_on(detail).
void add(Detail detail, const Span& span);

/// The span of a scope.
class Scope {
 public:
  /// The texts must outlive it.
  Scope(Detail detail, std::string_view lane, std::string_view name, std::int64_t step = -1, bool may_overlap = false) : detail_(detail) {
    if (is_on(detail)) span_ = {.lane = lane, .name = name, .begin = Clock::now(), .end = {}, .step = step, .may_overlap = may_overlap};
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    if (span_.begin == Clock::time_point{}) return;
    span_.end = Clock::now();
    add(detail_, span_);
  }

 private:
  Detail detail_;
  Span span_;
};

/// Spans of one lane that follow each other: each lasts until the next begins. One thread.
class Phases {
 public:
  explicit Phases(std::string_view lane) : lane_(lane) {}
  ~Phases() { end(); }
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;
  /// A literal. Going to the phase that there is changes nothing.
  void go_to(std::string_view name, std::int64_t step = -1) {
    if (name == name_ && step == step_) return;
    end();
    name_ = name;
    step_ = step;
    begin_ = Clock::now();
  }
  void end() {
    if (!name_.empty()) add(Detail::kCoarse, {.lane = lane_, .name = name_, .begin = begin_, .end = Clock::now(), .step = step_});
    name_ = {};
  }

 private:
  std::string_view lane_, name_;
  std::int64_t step_ = -1;
  Clock::time_point begin_;
};

/// Merges the parts that processes left in a trace folder into trace.json. Moments of processes of one machine are compared by its steady
/// clock, those of different machines by their clocks of the day. Error{kIo}.
void merge_trace(const std::filesystem::path& trace_folder);
/// Removes what an earlier run left there, and nothing else. Error{kAlreadyExists} if another trace.json is in its place.
void clear_trace(const std::filesystem::path& trace_folder);

}  // namespace prl::spans
