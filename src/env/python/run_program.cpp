#include "env/python/run_program.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

extern char** environ;

namespace prl::env::python {

namespace fs = std::filesystem;

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
  int ends[2] = {-1, -1};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (options.captures) {
    if (::pipe2(ends, O_CLOEXEC) != 0) fail(ErrorCode::kIo, "no pipe for {}: {}", argv[0], std::strerror(errno));
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  }
  if (!options.folder.empty()) ::posix_spawn_file_actions_addchdir_np(&actions, options.folder.c_str());
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, args[0], &actions, nullptr, args.data(), vars.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (ends[1] >= 0) ::close(ends[1]);
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
  if (error != 0) fail(ErrorCode::kNotFound, "{} cannot be run: {}", argv[0], std::strerror(error));
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace prl::env::python
