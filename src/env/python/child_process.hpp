#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace prl::env::python {

/// What a worker process may use; 0 leaves a limit as it is.
struct ChildLimits {
  std::int64_t memory_bytes = 0;   ///< address space of each process
  std::int64_t num_processes = 0;  ///< processes and threads, its own children included
  std::int64_t num_files = 0;      ///< open files
  std::int64_t cpu_seconds = 0;    ///< of each process
};

struct ChildOptions {
  std::string name;               ///< for messages
  std::vector<std::string> argv;  ///< argv[0] is the program's path; the connection is its descriptor kConnectionFd
  std::vector<std::string> env;   ///< "NAME=value", all of it
  std::filesystem::path folder;   ///< working folder
  ChildLimits limits;
  /// Puts it into a network namespace of its own with nothing but a loopback device, in a user namespace without capabilities.
  bool isolate_network = false;
  bool is_template = false;  ///< its children enter namespaces inside of its own
};

constexpr int kConnectionFd = 3;

/// The ends of a child's connection (a stream socket pair) and output (a pipe). Close-on-exec; closed by the owner.
class ChildStreams {
 public:
  /// Error{kIo} naming `child`.
  explicit ChildStreams(const std::string& child);
  ~ChildStreams();
  ChildStreams(ChildStreams&& other) noexcept;
  ChildStreams& operator=(ChildStreams&&) = delete;
  int connection = -1, output = -1;          ///< ours
  int connection_end = -1, output_end = -1;  ///< the child's
};

/// A program started with one end of a stream socket pair, its output (stdout and stderr) on a pipe, and a process group of its own.
///
/// It gets SIGKILL when the thread that started it ends. Between fork and exec nothing but async-signal-safe calls are made, so it may be
/// started from a process with threads. As root the limit of processes holds by a real user id that no other child has; the effective
/// one, which decides about files, stays. Not root: new privileges are refused (no_new_privs). Descriptors are closed by the owner.
class ChildProcess {
 public:
  /// Error{kIo} naming the step that failed and the reason.
  static ChildProcess start(const ChildOptions& options);
  /// A child of this process that another one has forked for it (WorkerTemplates), with its ends of `streams`: it is in a group of its own
  /// and gets SIGKILL with the thread that started the other one.
  static ChildProcess adopt(pid_t pid, ChildStreams streams);
  /// Kills its process group and waits for it.
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;

  pid_t pid() const noexcept { return pid_; }
  /// The descriptors pass to the caller.
  int release_connection() noexcept;
  int release_output() noexcept;
  /// SIGKILL to the whole group.
  void kill() noexcept;
  /// The wait status once it has ended.
  std::optional<int> status() noexcept;

 private:
  ChildProcess(pid_t pid, int connection, int output) : pid_(pid), connection_(connection), output_(output) {}
  pid_t pid_ = -1;
  int connection_ = -1;
  int output_ = -1;
  std::optional<int> status_;
};

/// "exited with status 3", "was killed by signal 9 (Killed)".
std::string describe_status(int status);
/// Whether this machine lets a process make a user and a network namespace. Tries it once, in a child.
bool can_isolate_network();

}  // namespace prl::env::python
