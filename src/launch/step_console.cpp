#include "launch/step_console.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/value.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "dashboard/line_reader.hpp"
#include "launch/rl_progress.hpp"
#include "launch/run_folder.hpp"

namespace prl::launch {
namespace json = boost::json;
namespace {

constexpr std::chrono::milliseconds kInterval{200};
constexpr std::uint64_t kMaxPart = 4 << 20;
constexpr std::size_t kMaxLine = 1 << 20;

class Reader {
 public:
  Reader(std::filesystem::path metrics, std::uint64_t begin, std::optional<std::int64_t> max_steps, std::int64_t first_step)
      : begin_(begin),
        lines_(std::move(metrics)),
        progress_(max_steps, first_step, [](const std::string& line) { log::step("{}", line); }) {}

  void read() {
    const dashboard::LineReader::Sink sink{// A file that a role replaced holds rows that were shown, and steps tell which.
                                           .restart = [this] { line_.clear(); },
                                           .piece =
                                               [this](std::string_view piece) {
                                                 if (line_.size() < kMaxLine) line_ += piece;
                                               },
                                           .end_line =
                                               [this](std::uint64_t offset, std::uint64_t) {
                                                 if (offset >= begin_) take(std::exchange(line_, {}));
                                                 line_.clear();
                                               }};
    while (lines_.read(sink, kMaxPart)) {
    }
  }
  void finish() { progress_.finish(); }

 private:
  void take(const std::string& line) {
    std::error_code error;
    const json::value row = json::parse(line, error);
    if (error || !row.is_object()) return;
    const json::object& fields = row.get_object();
    const json::value *step = fields.if_contains("step"), *role = fields.if_contains("role");
    if (step == nullptr || !step->is_int64() || role == nullptr || !role->is_string()) return;
    monitor::Metrics metrics;
    for (const auto& [key, value] : fields)
      if (value.is_number()) metrics[std::string(key)] = value.to_number<double>();
    if (role->get_string() == kOrchestratorRows) progress_.add_orchestrator(step->get_int64(), metrics);
    if (role->get_string() != kTrainerRows || step->get_int64() <= last_shown_) return;
    last_shown_ = step->get_int64();
    progress_.add_trainer(last_shown_, metrics, RlProgress::Clock::now());
  }

  const std::uint64_t begin_;
  dashboard::LineReader lines_;
  RlProgress progress_;
  std::string line_;
  std::int64_t last_shown_ = 0;
};

}  // namespace

std::uint64_t end_of_file(const std::filesystem::path& path) {
  std::error_code none;
  const std::uintmax_t size = std::filesystem::file_size(path, none);
  return none ? 0 : size;
}

StepConsole::StepConsole(std::filesystem::path metrics, std::uint64_t begin, std::optional<std::int64_t> max_steps, std::int64_t first_step)
    : thread_([reader = std::make_unique<Reader>(std::move(metrics), begin, max_steps, first_step)](const std::stop_token& stop) {
        std::mutex mutex;
        std::condition_variable_any changed;
        std::unique_lock lock(mutex);
        while (!changed.wait_for(lock, stop, kInterval, [] { return false; }) && !stop.stop_requested()) reader->read();
        reader->read();
        reader->finish();
      }) {}

StepConsole::~StepConsole() = default;

}  // namespace prl::launch
