#include "env/python/run_program.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

extern char** environ;

namespace prl::env::python {

namespace fs = std::filesystem;

namespace {

constexpr int kNotStarted = 127;  // as shells say it

}  // namespace

std::optional<fs::path> find_program(const std::string& name) {
  const char* variable = std::getenv("PATH");
  std::string path = variable != nullptr ? variable : "/usr/bin:/bin";
  path += ':';
  for (std::size_t begin = 0, end = 0; (end = path.find(':', begin)) != std::string::npos; begin = end + 1) {
    const fs::path candidate = fs::path(path.substr(begin, end - begin)) / name;
    if (::access(candidate.c_str(), X_OK) == 0 && !fs::is_directory(candidate)) return fs::absolute(candidate);
  }
  return std::nullopt;
}

ProgramResult run_program(const std::vector<std::string>& argv, const ProgramOptions& options) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    if (!options.env.contains(text.substr(0, text.find('=')))) variables.push_back(text);
  }
  for (const auto& [key, value] : options.env) variables.push_back(key + "=" + value);
  std::vector<std::string> arguments = argv;
  std::vector<char*> args;
  std::vector<char*> vars;
  for (std::string& text : arguments) args.push_back(text.data());
  for (std::string& text : variables) vars.push_back(text.data());
  args.push_back(nullptr);
  vars.push_back(nullptr);
  int ends[2] = {-1, -1}, report[2] = {-1, -1};
  if (options.captures && ::pipe2(ends, O_CLOEXEC) != 0) fail(ErrorCode::kIo, "no pipe for {}: {}", argv[0], std::strerror(errno));
  if (::pipe2(report, O_CLOEXEC) != 0) {
    const int error = errno;
    for (const int end : ends)
      if (end >= 0) ::close(end);
    fail(ErrorCode::kIo, "no pipe for {}: {}", argv[0], std::strerror(error));
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // Nothing but async-signal-safe calls. It ends with this process: pip must not go on in a folder that the next command works on.
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(kNotStarted);
    const int nothing = options.captures ? ::open("/dev/null", O_RDONLY) : -1;
    if (nothing >= 0) ::dup2(nothing, STDIN_FILENO);
    if (options.captures) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
    }
    if (options.folder.empty() || ::chdir(options.folder.c_str()) == 0) ::execve(args[0], args.data(), vars.data());
    const int why = errno;
    (void)!::write(report[1], &why, sizeof why);
    ::_exit(kNotStarted);
  }
  int error = pid < 0 ? errno : 0;
  if (ends[1] >= 0) ::close(ends[1]);
  ::close(report[1]);
  // Ends without a byte when the program has begun.
  while (pid > 0 && ::read(report[0], &error, sizeof error) < 0 && errno == EINTR) {
  }
  ::close(report[0]);
  ProgramResult result;
  if (error == 0 && options.captures) {
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) != 0;) {
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) break;
      if (result.output.size() < options.max_output_bytes) result.output.append(buffer, static_cast<std::size_t>(got));
    }
  }
  if (ends[0] >= 0) ::close(ends[0]);
  int status = 0;
  while (pid > 0 && ::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (error != 0) fail(ErrorCode::kNotFound, "{} cannot be run: {}", argv[0], std::strerror(error));
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace prl::env::python
