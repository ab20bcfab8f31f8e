#include "env/python/child_process.hpp"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "env/python/sandbox.hpp"

namespace prl::env::python {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void reset(int fd) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_;
};

struct StartFailure {
  StartStep step = StartStep::kNone;
  int error = 0;
};

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

struct Prepared {
  char* const* argv;
  char* const* envp;
  const char* folder;
  const SandboxPlan* sandbox;
  int connection, output, null, report;
  pid_t parent;
};

StartStep become_child(const Prepared& p) noexcept {
  if (::setpgid(0, 0) != 0) return StartStep::kGroup;
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int signal = 1; signal < 32; ++signal) ::signal(signal, SIG_DFL);
  if (::dup2(p.null, STDIN_FILENO) < 0 || ::dup2(p.output, STDOUT_FILENO) < 0 || ::dup2(p.output, STDERR_FILENO) < 0)
    return StartStep::kStreams;
  if (p.connection == kConnectionFd ? ::fcntl(kConnectionFd, F_SETFD, 0) != 0 : ::dup2(p.connection, kConnectionFd) < 0)
    return StartStep::kStreams;
  if (::chdir(p.folder) != 0) return StartStep::kFolder;
  if (const StartStep failed = enter_sandbox(*p.sandbox); failed != StartStep::kNone) return failed;
  // After the namespaces: a change of credentials clears it. So does exec where the real user id is another than the effective one, as
  // plan_sandbox has it for root: a worker asks for it again (PRL_PARENT_PID).
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != p.parent) ::_exit(127);
  // Whatever this process had open without close-on-exec is none of the worker's business.
  ::syscall(SYS_close_range, kConnectionFd + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  ::execve(p.argv[0], p.argv, p.envp);
  return StartStep::kExec;
}

/// Waits for exec, which closes the pipe, or for the step that failed.
StartFailure read_report(int fd) {
  StartFailure failure;
  ssize_t got = 0;
  while ((got = ::read(fd, &failure, sizeof failure)) < 0 && errno == EINTR) {
  }
  return got == static_cast<ssize_t>(sizeof failure) ? failure : StartFailure{};
}

}  // namespace

ChildStreams::ChildStreams(const std::string& child) {
  int pair[2];
  int pipe[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
    fail(ErrorCode::kIo, "{} cannot be started: no socket pair: {}", child, std::strerror(errno));
  connection = pair[0];
  connection_end = pair[1];
  if (::pipe2(pipe, O_CLOEXEC) != 0) {
    const int error = errno;
    ::close(connection);
    ::close(connection_end);
    fail(ErrorCode::kIo, "{} cannot be started: no pipe: {}", child, std::strerror(error));
  }
  output = pipe[0];
  output_end = pipe[1];
}

ChildStreams::ChildStreams(ChildStreams&& other) noexcept
    : connection(std::exchange(other.connection, -1)),
      output(std::exchange(other.output, -1)),
      connection_end(std::exchange(other.connection_end, -1)),
      output_end(std::exchange(other.output_end, -1)) {}

ChildStreams::~ChildStreams() {
  for (const int fd : {connection, output, connection_end, output_end})
    if (fd >= 0) ::close(fd);
}

ChildProcess ChildProcess::adopt(pid_t pid, ChildStreams streams) {
  return ChildProcess(pid, std::exchange(streams.connection, -1), std::exchange(streams.output, -1));
}

ChildProcess ChildProcess::start(const ChildOptions& options) {
  int report[2];
  const auto failed = [&](const char* what) {
    fail(ErrorCode::kIo, "{} cannot be started: {}: {}", options.name, what, std::strerror(errno));
  };
  ChildStreams streams(options.name);
  if (::pipe2(report, O_CLOEXEC) != 0) failed("no pipe");
  Descriptor report_read(report[0]);
  Descriptor report_write(report[1]);
  Descriptor null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  // The child writes the report after it has put the connection at its place, which must not be the report's.
  if (report_write.get() <= kConnectionFd) report_write.reset(::fcntl(report_write.get(), F_DUPFD_CLOEXEC, kConnectionFd + 1));
  if (null.get() < 0 || report_write.get() < 0) failed("no descriptor");
  // Everything that allocates happens before fork: between fork and exec only async-signal-safe calls are allowed.
  std::vector<std::string> arguments = options.argv;
  std::vector<std::string> environment = options.env;
  environment.push_back(fmt::format("PRL_PARENT_PID={}", ::getpid()));
  const std::vector<char*> argv = pointers(arguments);
  const std::vector<char*> envp = pointers(environment);
  const std::string folder = options.folder.string();
  const SandboxPlan sandbox =
      plan_sandbox(options.limits, options.isolate_network, options.is_template ? uid_in_template() : ::geteuid(), ::geteuid());
  const Prepared prepared{argv.data(),        envp.data(), folder.c_str(),     &sandbox,  streams.connection_end,
                          streams.output_end, null.get(),  report_write.get(), ::getpid()};
  const pid_t pid = ::fork();
  if (pid < 0) failed("fork");
  if (pid == 0) {
    StartFailure failure;
    failure.step = become_child(prepared);
    failure.error = errno;
    [[maybe_unused]] const ssize_t n = ::write(prepared.report, &failure, sizeof failure);
    ::_exit(127);
  }
  report_write.reset(-1);
  ChildProcess child = adopt(pid, std::move(streams));
  if (const StartFailure failure = read_report(report_read.get()); failure.step != StartStep::kNone)
    fail(ErrorCode::kIo, "{} cannot be started: {} ({}): {}", options.name, to_string(failure.step), options.argv.front(),
         std::strerror(failure.error));
  return child;
}

ChildProcess::~ChildProcess() {
  if (connection_ >= 0) ::close(connection_);
  if (output_ >= 0) ::close(output_);
  if (pid_ < 0 || status_) return;
  kill();
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      connection_(other.release_connection()),
      output_(other.release_output()),
      status_(std::exchange(other.status_, std::nullopt)) {}

int ChildProcess::release_connection() noexcept { return std::exchange(connection_, -1); }
int ChildProcess::release_output() noexcept { return std::exchange(output_, -1); }

void ChildProcess::kill() noexcept {
  // The group outlives its leader as long as the leader is not waited for.
  if (pid_ > 0 && !status_) ::kill(-pid_, SIGKILL);
}

std::optional<int> ChildProcess::status() noexcept {
  if (status_ || pid_ < 0) return status_;
  int status = 0;
  // What it has started dies with it: looked at before it is waited for, while the group's number is still its own.
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_) {
    ::kill(-pid_, SIGKILL);
    if (::waitpid(pid_, &status, 0) == pid_) status_ = status;
  }
  return status_;
}

std::string describe_status(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) return "has used up its processor time (limits.cpu_seconds)";
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("exited with status {}", WEXITSTATUS(status));
}

}  // namespace prl::env::python
