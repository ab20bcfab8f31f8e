#include "launch/trackers.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "env/python/child_process.hpp"
#include "env/python/run_program.hpp"
#include "env/python/worker_files.hpp"
#include "launch/log_folder.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace python = env::python;
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kUnavailable = 3;                         // environment.py: starting it again would not help
constexpr std::chrono::milliseconds kFirstPause{1200};  // folders of a restarted client differ by the second
constexpr std::chrono::seconds kLongestRestartPause{30}, kWaitAtEnd{60}, kWaitAfterFailure{10};

std::vector<std::string> environment_with(const std::vector<std::string>& added) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('=') + 1);
    if (std::ranges::none_of(added, [&](const std::string& one) { return one.starts_with(name); })) out.emplace_back(text);
  }
  out.insert(out.end(), added.begin(), added.end());
  return out;
}

}  // namespace

/// One tracker's process, as often as it must be started. Its thread lives as long as the run: the kernel ends the process with it.
class Trackers::Process {
 public:
  Process(const TrackerPlan& plan, std::string kind)
      : kind_(std::move(kind)),
        folder_(plan.run_folder),
        settings_(plan.run_folder / std::string(plan.settings.at("state").as_string()) / (kind_ + ".json")) {
    fs::create_directories(settings_.parent_path());
    boost::json::object settings = plan.settings;
    const boost::json::value* role = plan.settings.if_contains("role");
    const std::string of_role = role != nullptr ? "_" + std::string(role->as_string()) : std::string();
    log_ = log_file(folder_, fmt::format("tracker_{}{}.log", kind_, of_role)).lexically_relative(folder_).string();
    settings["log"] = log_;
    write_file_atomic(settings_, boost::json::serialize(settings) + "\n");
    thread_ = std::jthread([this] { supervise(); });
  }

  /// Tells the process that the run has ended.
  void end(bool has_failed, Clock::time_point deadline) {
    std::lock_guard lock(mutex_);
    if (!deadline_) {
      word_ = has_failed ? 'f' : 'e';
      deadline_ = deadline;
    }
    changed_.notify_all();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  void supervise() {
    log::set_thread_role("");
    std::chrono::milliseconds pause = kFirstPause;
    while (true) {
      const Clock::time_point started = Clock::now();
      std::optional<int> status;
      try {
        status = run_once();
      } catch (const std::exception& error) {
        log::warning("tracker {}: {}; metrics.jsonl keeps everything", kind_, error.what());
        return;
      }
      if (status && WIFEXITED(*status) && (WEXITSTATUS(*status) == 0 || WEXITSTATUS(*status) == kUnavailable)) return;
      if (!status || is_late()) {
        log::warning(
            "tracker {} has not taken everything within the time that a run waits for it at its end; the rest is handed over by "
            "PYTHONPATH={} python3 -m prl_tracker {} {}, or when the run is resumed",
            kind_, module_folder_.string(), kind_, settings_.string());
        return;
      }
      if (has_progressed_ || Clock::now() - started > kLongestRestartPause) pause = kFirstPause;
      log::warning("tracker {} {}; it is started again in {:.1f} s, and nothing is lost ({})", kind_, python::describe_status(*status),
                   std::chrono::duration<double>(pause).count(), log_);
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, pause, [&] { return deadline_ && Clock::now() > *deadline_; });
      pause = std::min<std::chrono::milliseconds>(2 * pause, kLongestRestartPause);
    }
  }

  bool is_late() {
    std::lock_guard lock(mutex_);
    return deadline_ && Clock::now() > *deadline_;
  }

  /// The wait status; nullopt if it had to be killed because the time was up.
  std::optional<int> run_once() {
    const auto interpreter = python::find_program("python3");
    if (!interpreter) fail(ErrorCode::kNotFound, "there is no python3 in PATH, which trackers need");
    module_folder_ = python::unpack_worker(python::cache_folder());
    auto child = python::ChildProcess::start(
        {.name = "tracker " + kind_,
         .argv = {interpreter->string(), "-m", "prl_tracker", kind_, settings_.string()},
         .env = environment_with({"PYTHONPATH=" + module_folder_.string(), fmt::format("PRL_TRACKER_CONTROL={}", python::kConnectionFd)}),
         .folder = folder_,
         .limits = {},
         .isolate_network = false});
    const int control = child.release_connection(), output = child.release_output();
    const auto status = watch(child, control, output);
    ::close(control);
    ::close(output);
    return status;
  }

  std::optional<int> watch(python::ChildProcess& child, int control, int output) {
    std::string rest;
    has_progressed_ = false;
    bool is_told = false;  // whether it knows of the end
    while (true) {
      pollfd ready{output, POLLIN, 0};
      const bool is_readable = ::poll(&ready, 1, 100) > 0;
      char bytes[4096];
      const ssize_t n = is_readable ? ::read(output, bytes, sizeof bytes) : 0;
      if (n > 0) take_output(rest, {bytes, static_cast<std::size_t>(n)});
      if (const auto status = child.status(); status && n <= 0) return status;
      if (n == 0 && is_readable) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its end, seen before that of the process
      std::lock_guard lock(mutex_);
      if (deadline_ && !std::exchange(is_told, true)) (void)::send(control, &word_, 1, MSG_NOSIGNAL);  // one that is gone needs no word
      if (deadline_ && Clock::now() > *deadline_) return std::nullopt;                                 // killed by the destructor
    }
  }

  /// Its lines for the log: "INFO text", "WARNING text"; and "PROGRESS", with the first row that it has handed over.
  void take_output(std::string& rest, std::string_view bytes) {
    constexpr std::size_t kMaxLine = 4096;
    rest += bytes;
    for (std::size_t end = 0; (end = rest.find('\n')) != std::string::npos; rest.erase(0, end + 1)) {
      const std::string_view line = std::string_view(rest).substr(0, std::min(end, kMaxLine));
      if (line.starts_with("PROGRESS")) {
        has_progressed_ = true;
        continue;
      }
      const bool is_warning = line.starts_with("WARNING ");
      const std::string text = "tracker " + std::string(line.substr(std::min(line.find(' ') + 1, line.size())));
      log::write(is_warning ? log::Level::kWarning : log::Level::kInfo, {}, text);
    }
    if (rest.size() > kMaxLine) rest.clear();
  }

  const std::string kind_;
  const fs::path folder_, settings_;
  fs::path module_folder_;
  std::string log_;  ///< within the run's folder
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Clock::time_point> deadline_;
  char word_ = 'e';
  bool has_progressed_ = false;  ///< of the process that runs now, or ran last
  std::jthread thread_;
};

Trackers::Trackers(TrackerPlan plan) {
  for (const std::string& kind : plan.kinds) {
    try {
      processes_.push_back(std::make_unique<Process>(plan, kind));
    } catch (const std::exception& error) {
      log::warning("tracker {} cannot be started: {}", kind, error.what());
    }
  }
}

Trackers::~Trackers() { finish(true); }

void Trackers::finish(bool has_failed) {
  const Clock::time_point deadline = Clock::now() + (has_failed ? kWaitAfterFailure : kWaitAtEnd);
  for (const auto& process : processes_) process->end(has_failed, deadline);
  for (const auto& process : processes_) process->join();
  processes_.clear();
}

}  // namespace prl::launch
