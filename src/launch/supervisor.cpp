#include "launch/supervisor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "launch/health_watch.hpp"
#include "launch/run_spans.hpp"

extern char** environ;

namespace prl::launch {
using std::chrono::milliseconds;

struct Supervisor::Child {
  ChildSpec spec;
  pid_t pid = -1;
  int output = -1;
  std::FILE* log = nullptr;
  std::string tail;                              ///< last bytes of the output
  std::string line;                              ///< the beginning of a line that has not ended
  std::optional<std::int64_t> num_memory_kills;  ///< of the control group when it was started
  std::optional<int> status;
  bool was_told_to_end = false;
  bool was_ready = false;
  bool is_lost = false;  ///< failed, and the others of its group go on
  int num_restarts = 0;
  std::optional<std::chrono::steady_clock::time_point> restart_at;     ///< dead, and to be started again
  std::optional<std::chrono::steady_clock::time_point> stopped_since;  ///< by SIGSTOP, as far as it was seen
  bool is_stop_told = false;
  std::string kill_reason;  ///< why the supervisor killed it
  std::unique_ptr<HealthWatch> health;
  bool is_hang_told = false;

  bool is_clean() const { return status && WIFEXITED(*status) && WEXITSTATUS(*status) == 0; }

  ~Child() {
    if (output >= 0) ::close(output);
    if (log) std::fclose(log);
  }
};

namespace {

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (!added.contains(std::string(text.substr(0, text.find('='))))) merged.emplace_back(text);
  }
  for (const auto& [key, value] : added) merged.push_back(key + "=" + value);
  return merged;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

constexpr std::size_t kTailBytes = 8192;
constexpr milliseconds kFirstRestartWait{500};
constexpr milliseconds kLongestRestartWait{30'000};
/// A role that is stopped for so long is told of.
constexpr milliseconds kStoppedNotice{2'000};
/// From when a child that does not say that it is well is named.
constexpr milliseconds kHungNotice{15'000};
/// Between two looks at them. After a longer time this process did not run either, and nobody knows how long the others could have.
constexpr milliseconds kLookGap{5'000};

/// By SIGSTOP or a debugger.
bool is_stopped(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && (text[end + 2] == 'T' || text[end + 2] == 't');
}

/// The message of the last line that a log marks as an error; empty if there is none.
std::string last_error(const std::string& output) {
  constexpr std::string_view kMark = " ERROR ";
  const std::size_t at = output.rfind(kMark);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + kMark.size();
  return output.substr(begin, output.find('\n', begin) - begin);
}

}  // namespace

std::optional<std::string> console_line(const std::string& role, const std::string& line) {
  // What a role is at is shown as it is in a run of one process.
  for (const std::string_view progress : {"collecting batch ", "evaluating ", "training step "}) {
    const std::string mark = fmt::format("    INFO {}", progress);
    if (line.size() > 8 && line.compare(8, mark.size(), mark) == 0) return line;
    if (line.find(fmt::format("\"message\":\"{}", progress)) != std::string::npos) return line;
  }
  // A score is shown as the role writes it.
  const std::size_t score = line.find(" Evaluated ");
  if (score != std::string::npos && (line.compare(8, 9, " SUCCESS ") == 0 || line.find("\"level\":\"SUCCESS\"") != std::string::npos))
    return line;
  for (const std::string_view level : {"WARNING", "ERROR"}) {
    if (line.find(fmt::format("\"level\":\"{}\"", level)) != std::string::npos) return line;
    // "10:00:00   ERROR text": nine bytes of time, then the level to the right of seven.
    const std::string mark = fmt::format("{:>7} ", level);
    if (line.size() > 9 + mark.size() && line[2] == ':' && line[5] == ':' && line.compare(9, mark.size(), mark) == 0)
      return fmt::format("{}[{}] {}", line.substr(0, 9 + mark.size()), role, line.substr(9 + mark.size()));
  }
  return std::nullopt;
}

Supervisor::Supervisor() = default;

Supervisor::~Supervisor() { terminate_all(milliseconds(5000)); }

void Supervisor::start(ChildSpec spec) {
  auto child = std::make_unique<Child>();
  std::filesystem::create_directories(spec.log_file.parent_path());
  child->log = std::fopen(spec.log_file.c_str(), "ae");
  if (!child->log) fail(ErrorCode::kIo, "log file {} cannot be written: {}", spec.log_file.string(), std::strerror(errno));
  child->spec = std::move(spec);
  std::erase_if(children_, [&](const auto& other) { return other->spec.name == child->spec.name && other->status && !other->restart_at; });
  spawn(*child);
  children_.push_back(std::move(child));
}

void Supervisor::spawn(Child& child) {
  const ChildSpec& spec = child.spec;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(ErrorCode::kIo, "no pipe for {}: {}", spec.name, std::strerror(errno));
  // Everything that allocates happens before fork: between fork and exec only async-signal-safe calls are allowed.
  std::map<std::string, std::string> added = spec.env;
  added[kProcessVariable] = spec.name;
  std::vector<std::string> environment = merged_environment(added);
  std::vector<std::string> arguments = spec.argv;
  const std::vector<char*> envp = pointers(environment);
  const std::vector<char*> argv = pointers(arguments);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail(ErrorCode::kIo, "cannot start {}: {}", spec.name, std::strerror(errno));
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(127);
    // Ctrl-C in the terminal reaches the launcher only, which then stops the roles in order.
    ::setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::execve(argv[0], argv.data(), envp.data());
    constexpr char kMessage[] = "cannot execute the program\n";
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    ::_exit(127);
  }
  ::close(ends[1]);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  child.output = ends[0];
  child.pid = pid;
  child.status.reset();
  child.restart_at.reset();
  child.is_lost = child.was_told_to_end = child.is_stop_told = false;
  child.stopped_since.reset();
  child.kill_reason.clear();
  child.tail.clear();
  child.num_memory_kills = memory_.num_kills();
  log::info("started {} (pid {}), log {}", spec.name, pid, spec.log_file.string());
}

void Supervisor::pump(milliseconds timeout) {
  std::vector<pollfd> fds;
  std::vector<Child*> owners;
  for (auto& child : children_) {
    if (child->output < 0) continue;
    fds.push_back({child->output, POLLIN, 0});
    owners.push_back(child.get());
  }
  if (fds.empty()) {
    ::usleep(static_cast<useconds_t>(timeout.count() * 1000));
    return;
  }
  if (::poll(fds.data(), fds.size(), static_cast<int>(timeout.count())) <= 0) return;
  char buffer[1 << 14];
  for (std::size_t i = 0; i < fds.size(); ++i) {
    if (!(fds[i].revents & (POLLIN | POLLHUP))) continue;
    for (;;) {
      const ssize_t got = ::read(fds[i].fd, buffer, sizeof buffer);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
          ::close(owners[i]->output);
          owners[i]->output = -1;
        }
        break;
      }
      take_output(*owners[i], {buffer, static_cast<std::size_t>(got)});
    }
    std::fflush(owners[i]->log);
  }
}

void Supervisor::take_output(Child& child, std::string_view bytes) {
  std::fwrite(bytes.data(), 1, bytes.size(), child.log);
  child.tail += bytes;
  if (!child.was_ready && !child.spec.ready_mark.empty()) child.was_ready = child.tail.find(child.spec.ready_mark) != std::string::npos;
  if (child.tail.size() > kTailBytes) child.tail.erase(0, child.tail.size() - kTailBytes);
  if (child.spec.echo) {
    std::fwrite(bytes.data(), 1, bytes.size(), stderr);
    return;
  }
  child.line += bytes;
  std::size_t begin = 0;
  for (std::size_t end; (end = child.line.find('\n', begin)) != std::string::npos; begin = end + 1)
    if (const auto shown = console_line(child.spec.name, child.line.substr(begin, end - begin)))
      std::fprintf(stderr, "%s\n", shown->c_str());
  child.line.erase(0, begin);
  if (child.line.size() > kTailBytes) child.line.clear();
}

void Supervisor::reap() {
  for (auto& child : children_) {
    if (child->status) continue;
    int status = 0;
    if (::waitpid(child->pid, &status, WNOHANG) == child->pid) {
      child->status = status;
      pump(milliseconds(0));
    }
  }
}

std::string Supervisor::describe_failure(const Child& child) const {
  std::string reason = child.kill_reason;
  if (reason.empty()) reason = explain_exit(*child.status, child.tail, memory_, child.num_memory_kills);
  if (reason.empty()) reason = last_error(child.tail);
  return fmt::format("{} {}{}{}; see {}", child.spec.name, describe_exit(*child.status), reason.empty() ? "" : ": ", reason,
                     child.spec.log_file.string());
}

bool Supervisor::may_restart(const Child& child) const {
  const bool is_ready = child.was_ready || child.spec.ready_mark.empty();
  return child.spec.group.empty() && is_ready && child.num_restarts < child.spec.max_restarts;
}

bool Supervisor::plan_restart(Child& child) {
  const ChildSpec& spec = child.spec;
  if (spec.group.empty()) {
    if (!may_restart(child)) return false;
    if (spec.restarts_after_signals_only && !WIFSIGNALED(*child.status)) return false;
    const milliseconds wait = std::min(kFirstRestartWait * (1 << std::min(child.num_restarts, 10)), kLongestRestartWait);
    log::warning("{}; it is started again in {:.1f} s ({} of {} restarts)", describe_failure(child),
                 std::chrono::duration<double>(wait).count(), child.num_restarts + 1, spec.max_restarts);
    child.restart_at = std::chrono::steady_clock::now() + wait;
    child.spec.env[kRestartsVariable] = std::to_string(child.num_restarts + 1);
  } else {
    int num_lost = 0;
    bool has_others = spec.has_members_elsewhere;
    for (const auto& other : children_) {
      if (other->spec.group != spec.group) continue;
      num_lost += other->num_restarts;
      has_others = has_others || (other.get() != &child && (!other->status || other->is_clean()));
    }
    if (!has_others || num_lost >= spec.max_losses) return false;
    const milliseconds wait = spec.backoff * (1LL << std::min(num_lost, 10));
    const bool has_met = spec.has_met == nullptr || spec.has_met();
    log::warning("{}; {} ({} of {} losses), it is started again in {:.1f} s", describe_failure(child),
                 has_met ? "the other ranks go on" : "the ranks had not met yet, the others wait", num_lost + 1, spec.max_losses,
                 std::chrono::duration<double>(wait).count());
    child.is_lost = has_met;
    child.restart_at = std::chrono::steady_clock::now() + wait;
    if (has_met)
      child.spec.env["PRL_JOIN"] = fmt::format("{}-{}", spec.name, num_lost + 1);
    else
      child.spec.env.erase("PRL_JOIN");
  }
  ++child.num_restarts;
  return true;
}

const Supervisor::Child* Supervisor::find_failure() {
  const Child* failed = nullptr;
  for (const auto& child : children_) {
    if (!child->status || child->is_lost || child->restart_at || child->was_told_to_end ||
        (child->is_clean() && (child->spec.must_finish || child->spec.may_end)))
      continue;
    if (plan_restart(*child)) continue;
    if (child->spec.is_optional) {
      log::warning("{}. The run goes on without it", describe_failure(*child));
      child->is_lost = true;
      continue;
    }
    // A role that was killed is why others of its kind ended with an error, even if they are seen first.
    if (failed == nullptr || (WIFSIGNALED(*child->status) && !WIFSIGNALED(*failed->status))) failed = child.get();
  }
  return failed;
}

void Supervisor::start_again() {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& child : children_) {
    if (!child->restart_at || *child->restart_at > now) continue;
    // A rank joins those that run; if none does there is nothing to join.
    const bool has_others =
        child->spec.has_members_elsewhere
            ? !others_gone_.stop_requested()
            : std::ranges::any_of(children_, [&](const auto& c) { return c->spec.group == child->spec.group && !c->status; });
    const bool is_over = child->is_lost && !has_others;
    child->restart_at.reset();
    if (is_over) continue;
    if (child->output >= 0) ::close(std::exchange(child->output, -1));
    spawn(*child);
  }
}

/// Ranks end together. Once one has ended well, a stopped process will never, and one that asks to join is not needed any more.
void Supervisor::end_leftovers() {
  for (const auto& child : children_) {
    if (child->status || child->spec.max_losses == 0) continue;
    const bool is_over =
        (child->spec.has_members_elsewhere && others_gone_.stop_requested()) ||
        std::ranges::any_of(children_, [&](const auto& other) { return other->spec.group == child->spec.group && other->is_clean(); });
    if (!is_over) continue;
    if (child->spec.env.contains("PRL_JOIN") && !std::exchange(child->was_told_to_end, true)) ::kill(child->pid, SIGTERM);
    if (!is_stopped(child->pid)) continue;
    log::warning("{} (pid {}) is stopped, and the others of its group have ended: it is killed", child->spec.name, child->pid);
    child->is_lost = true;
    ::kill(child->pid, SIGKILL);
    int status = 0;
    ::waitpid(child->pid, &status, 0);
    child->status = status;
  }
}

void Supervisor::watch_well() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look_ > kLookGap) {
    for (const auto& child : children_) {
      child->stopped_since.reset();
      child->health.reset();
    }
  }
  last_look_ = now;
  for (const auto& child : children_) {
    if (!child->status) watch_stopped(*child, now);
    watch_hung(*child);
  }
}

void Supervisor::watch_hung(Child& child) {
  const ChildSpec& spec = child.spec;
  const bool is_watched = spec.max_hung.count() > 0 && !spec.health_url.empty() && !child.status && !child.was_told_to_end &&
                          (child.was_ready || spec.ready_mark.empty()) && !child.stopped_since;
  if (!is_watched) {
    child.health.reset();
    return;
  }
  if (child.health == nullptr) child.health = std::make_unique<HealthWatch>(spec.health_url, spec.max_hung);
  const milliseconds unwell = child.health->unwell();
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  if (unwell < std::min(kHungNotice, spec.max_hung)) {
    if (std::exchange(child.is_hang_told, false)) log::info("{} (pid {}) answers {} again", spec.name, child.pid, spec.health_url);
    return;
  }
  const bool is_replaced = may_restart(child);
  if (!std::exchange(child.is_hang_told, true))
    log::warning("{} (pid {}) has not said at {} that it is well for {:.1f} s{}", spec.name, child.pid, spec.health_url, seconds(unwell),
                 is_replaced ? fmt::format(", after {:.0f} s it is killed and started again", seconds(spec.max_hung)) : std::string());
  if (!is_replaced || unwell < spec.max_hung || !child.kill_reason.empty()) return;
  child.kill_reason = fmt::format("it did not say that it is well for {:.1f} s", seconds(unwell));
  ::kill(child.pid, SIGKILL);
}

void Supervisor::watch_stopped(Child& child, std::chrono::steady_clock::time_point now) {
  const ChildSpec& spec = child.spec;
  if (!is_stopped(child.pid)) {
    if (std::exchange(child.is_stop_told, false)) log::info("{} (pid {}) goes on", spec.name, child.pid);
    child.stopped_since.reset();
    return;
  }
  if (!child.stopped_since) child.stopped_since = now;
  const auto stopped = now - *child.stopped_since;
  const bool is_replaced = spec.max_stopped.count() > 0 && may_restart(child);
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  if (stopped >= kStoppedNotice && !std::exchange(child.is_stop_told, true))
    log::warning("{} (pid {}) is stopped by a signal; SIGCONT lets it go on{}", spec.name, child.pid,
                 is_replaced ? fmt::format(", after {:.0f} s it is killed and started again", seconds(spec.max_stopped)) : std::string());
  if (!is_replaced || stopped < spec.max_stopped || !child.kill_reason.empty()) return;
  child.kill_reason = fmt::format("it was stopped for {:.1f} s", seconds(stopped));
  ::kill(child.pid, SIGKILL);
}

std::optional<std::string> Supervisor::run(std::stop_token stop, bool until_stopped, std::stop_token abort) {
  // A lost rank is done without; another child that is to be started again is not at its end.
  const auto has_ended = [](const auto& child) {
    const bool is_done_without = child->is_lost && !child->spec.has_members_elsewhere;
    return !child->spec.must_finish || (child->status && (is_done_without || !child->restart_at));
  };
  for (;;) {
    pump(milliseconds(100));
    reap();
    if (abort.stop_requested()) return std::nullopt;
    const Child* failed = find_failure();
    if (failed != nullptr && !stop.stop_requested()) return describe_failure(*failed);
    end_leftovers();
    watch_well();
    if (!stop.stop_requested()) start_again();
    if (on_look_ && !stop.stop_requested()) on_look_();
    if (!until_stopped && std::ranges::all_of(children_, has_ended)) return std::nullopt;
    if (stop.stop_requested()) {
      terminate_all(milliseconds(120'000));
      for (const auto& child : children_) {
        if (child->restart_at) continue;  // its end was told
        const int status = *child->status;
        if (child->is_lost) continue;
        const bool is_stop = WIFEXITED(status) ? WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 130 : WTERMSIG(status) == SIGTERM;
        if (!is_stop) return describe_failure(*child);
      }
      return std::nullopt;
    }
  }
}

void Supervisor::terminate_all(milliseconds grace) {
  reap();
  for (auto& child : children_)
    if (!child->status) ::kill(child->pid, SIGTERM);
  const auto left = [this] {
    std::string names;
    for (const auto& child : children_)
      if (!child->status) names += fmt::format("{}{} (pid {})", names.empty() ? "" : ", ", child->spec.name, child->pid);
    return names;
  };
  Waiting waiting(
      {.who = "the launcher", .what = "its roles to stop", .limit = grace, .detail = [&left] { return left() + "; then killed"; }});
  while (!left().empty() && !waiting.is_expired()) {
    waiting.check();
    pump(milliseconds(50));
    reap();
  }
  for (auto& child : children_) {
    if (child->status) continue;
    log::error("{} (pid {}) did not stop within {} s and is killed", child->spec.name, child->pid, grace.count() / 1000);
    ::kill(child->pid, SIGKILL);
    int status = 0;
    ::waitpid(child->pid, &status, 0);
    child->status = status;
  }
}

bool Supervisor::was_killed(const std::string& name) const {
  return std::ranges::any_of(children_, [&](const auto& child) {
    return (child->spec.name == name || child->spec.group == name) && child->status && WIFSIGNALED(*child->status) &&
           !child->was_told_to_end;
  });
}

bool Supervisor::is_running(const std::string& name) const {
  return std::ranges::any_of(children_,
                             [&](const auto& child) { return child->spec.name == name && (!child->status || child->restart_at); });
}

pid_t Supervisor::pid_of(const std::string& name) const {
  for (const auto& child : children_)
    if (child->spec.name == name) return child->pid;
  return -1;
}

}  // namespace prl::launch
