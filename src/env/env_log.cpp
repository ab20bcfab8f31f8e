#include "env/env_log.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

constexpr std::int64_t kMaxLogBytes = std::int64_t{256} << 20;
constexpr auto kBetweenSummaries = 10s;
constexpr std::size_t kMaxErrorText = 500;

struct CloseFile {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};

/// Lines as those of other logs: "HH:mm:ss", the level in seven columns, the text. Any thread.
class LogFile {
 public:
  LogFile(std::filesystem::path path, log::Level least) : path_(std::move(path)), least_(least) {}

  bool takes(log::Level level) const noexcept { return level >= least_; }
  void write(log::Level level, std::string text) {
    if (!takes(level)) return;
    for (char& c : text)
      if (c == '\n' || c == '\r') c = ' ';
    std::lock_guard lock(mutex_);
    if (!open() || num_bytes_ > kMaxLogBytes) return;
    char time[16] = {};
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    ::localtime_r(&now, &parts);
    std::strftime(time, sizeof time, "%H:%M:%S", &parts);
    std::string line = fmt::format("{} {:>7} {}\n", time, name_of(level), text);
    num_bytes_ += static_cast<std::int64_t>(line.size());
    if (num_bytes_ > kMaxLogBytes) line += fmt::format("{} WARNING more than {} MiB: what follows is left out\n", time, kMaxLogBytes >> 20);
    std::fwrite(line.data(), 1, line.size(), file_.get());
    std::fflush(file_.get());
  }

 private:
  static const char* name_of(log::Level level) noexcept {
    switch (level) {
      case log::Level::kDebug: return "DEBUG";
      case log::Level::kInfo: return "INFO";
      case log::Level::kSuccess: return "SUCCESS";
      case log::Level::kWarning: return "WARNING";
      case log::Level::kError: break;
    }
    return "ERROR";
  }
  bool open() {
    if (file_ || has_failed_) return file_ != nullptr;
    std::error_code ignored;
    std::filesystem::create_directories(path_.parent_path(), ignored);
    file_.reset(std::fopen(path_.c_str(), "ae"));
    if (!file_) {
      has_failed_ = true;
      log::warning("log file {} cannot be written: {}; the environment logs nothing", path_.string(), std::strerror(errno));
    }
    return file_ != nullptr;
  }

  std::filesystem::path path_;
  log::Level least_;
  std::mutex mutex_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  bool has_failed_ = false;
  std::int64_t num_bytes_ = 0;
};

class LoggedEnvironment final : public Environment {
 public:
  LoggedEnvironment(EnvironmentPtr inner, std::filesystem::path file, log::Level least)
      : inner_(std::move(inner)), file_(std::move(file), least) {}
  LoggedEnvironment(const LoggedEnvironment&) = delete;
  LoggedEnvironment& operator=(const LoggedEnvironment&) = delete;
  ~LoggedEnvironment() override {
    if (ended_.num_rollouts > 0) file_.write(log::Level::kInfo, ended_.text());
  }

  const std::string& name() const noexcept override { return inner_->name(); }
  std::int64_t num_tasks(Split split) const override { return inner_->num_tasks(split); }
  Task task(Split split, std::int64_t index) const override { return inner_->task(split, index); }
  asio::awaitable<Task> fetch_task(Split split, std::int64_t index) const override { return inner_->fetch_task(split, index); }
  void prepare() const override {
    inner_->prepare();
    file_.write(log::Level::kInfo, fmt::format("{} is ready", name()));
  }
  asio::awaitable<Episode> run(Task task, RolloutContext context) const override {
    Episode episode = co_await inner_->run(std::move(task), std::move(context));
    note(episode);
    co_return episode;
  }
  std::int64_t num_learners() const override { return inner_->num_learners(); }
  bool scores_groups() const noexcept override { return inner_->scores_groups(); }
  asio::awaitable<void> score_group(std::span<Episode> group) const override { return inner_->score_group(group); }
  asio::awaitable<json::value> save_state() const override { return inner_->save_state(); }
  void load_state(const json::value& state) const override { inner_->load_state(state); }
  std::map<std::string, double> gauges() const override { return inner_->gauges(); }
  json::array tools(const Task& task) const override { return inner_->tools(task); }
  std::optional<json::array> demonstration(const Task& task) const override { return inner_->demonstration(task); }

 private:
  /// Rollouts that ended since the last line about them.
  struct Ended {
    std::int64_t num_rollouts = 0, num_failed = 0, num_truncated = 0;
    double reward = 0, total = 0, env = 0;

    std::string text() const {
      const double count = static_cast<double>(num_rollouts);
      return fmt::format("{} rollouts ended: {} failed, {} truncated, reward {:.4f}, {:.2f} s each, of which {:.3f} s in the environment",
                         num_rollouts, num_failed, num_truncated, reward / count, total / count, env / count);
    }
  };

  void note(const Episode& episode) const {
    const std::string who = fmt::format("rollout {} of task {}", episode.trajectory_id, episode.example_id);
    if (episode.error)
      file_.write(log::Level::kWarning,
                  fmt::format("{} failed after {} turns and {:.2f} s: {}: {}", who, episode.num_turns(), episode.timing.total,
                              episode.error->type, episode.error->message.substr(0, kMaxErrorText)));
    else if (file_.takes(log::Level::kDebug))
      file_.write(log::Level::kDebug, fmt::format("{}: reward {:.4f}, {} turns, {}, {:.2f} s", who, episode.reward, episode.num_turns(),
                                                  episode.stop_condition, episode.timing.total));
    std::string summary;
    {
      std::lock_guard lock(mutex_);
      ended_.num_rollouts += 1;
      ended_.num_failed += episode.error ? 1 : 0;
      ended_.num_truncated += episode.is_truncated ? 1 : 0;
      ended_.reward += episode.reward;
      ended_.total += episode.timing.total;
      ended_.env += episode.timing.env;
      const auto now = std::chrono::steady_clock::now();
      if (now - last_summary_ < kBetweenSummaries) return;
      last_summary_ = now;
      summary = std::exchange(ended_, Ended{}).text();
    }
    file_.write(log::Level::kInfo, std::move(summary));
  }

  EnvironmentPtr inner_;
  mutable LogFile file_;
  mutable std::mutex mutex_;
  mutable Ended ended_;
  mutable std::chrono::steady_clock::time_point last_summary_ = std::chrono::steady_clock::now();
};

}  // namespace

EnvironmentPtr with_log(EnvironmentPtr inner, std::filesystem::path file, log::Level least) {
  return std::make_shared<LoggedEnvironment>(std::move(inner), std::move(file), least);
}

}  // namespace prl::env
