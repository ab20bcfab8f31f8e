#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/exit_cause.hpp"

namespace prl::launch {

/// One process of a run.
struct ChildSpec {
  std::string name;                        ///< role, for messages and as log name
  std::vector<std::string> argv;           ///< argv[0] is the program's path
  std::map<std::string, std::string> env;  ///< added to this process's environment
  std::filesystem::path log_file;          ///< stdout and stderr are added to it
  bool echo = false;                       ///< also print all of it here; else warnings and errors alone, with the role's name
  bool must_finish = true;                 ///< the run ends well when all of these have exited with 0
  bool is_optional = false;                ///< the others go on without it if it fails and is not started again
  bool may_end = false;                    ///< the others go on when it exits with 0, though it is none that must finish
  /// How many failed children of the same group the others can do without (the same value in all of them). A failed one is restarted
  /// after `backoff`, which doubles each time, with the variable PRL_JOIN.
  int max_losses = 0;
  std::string group = {};
  /// Whether the members of the group have met. One that fails before is started again as it was at first, without PRL_JOIN: there is
  /// nobody yet whom it could join. Empty: they have. On the thread of the supervisor, for a second or two at most.
  std::function<bool()> has_met = {};
  bool has_members_elsewhere = false;  ///< ranks of the group on other nodes, which go on when the last one of this node fails
  std::chrono::milliseconds backoff{1000};
  int max_restarts = 0;         ///< of one without a group: times that it is started again after it died, once it had been ready
  std::string ready_mark = {};  ///< what its output holds when it is ready; empty: it is from the start
  /// Restarted only after death by a signal: an error that it reports itself would recur.
  bool restarts_after_signals_only = false;
  /// One that is stopped (SIGSTOP) for longer and may be started again is killed, and started again; 0: it is waited for.
  std::chrono::milliseconds max_stopped{0};
  /// Where it says that it is well, once it is ready. One that does not for longer than `max_hung` and may be started again is killed, and
  /// started again; 0: it is waited for.
  std::string health_url = {};
  std::chrono::milliseconds max_hung{0};
};

/// Variable of a child without a group that was started again: how many times.
inline constexpr const char* kRestartsVariable = "PRL_RESTARTS";

/// Starts the roles of a run as processes, copies their output to log files, and ends all of them when one fails. One that may be started
/// again is, after a wait that doubles each time; one that dies before it was ever ready fails at once, since it would again. A child
/// gets SIGTERM when this process dies, so none is left behind. One thread.
class Supervisor {
 public:
  Supervisor();
  /// Ends what still runs.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Error{kIo} naming the program if it cannot be started. One of the same name that has ended is forgotten.
  void start(ChildSpec spec);
  /// While run() runs, this is called about ten times a second, on its thread; it may start children and end some.
  void set_on_look(std::function<void()> on_look) { on_look_ = std::move(on_look); }
  /// Whether a child of this name runs, or will be started again.
  bool is_running(const std::string& name) const;
  /// Runs until every must_finish child has exited with 0 (nullopt), until one child fails or a server exits early
  /// (one sentence naming the role, how it ended, its last error and its log), or until `stop` (nullopt if all
  /// stopped cleanly, else the same sentence).
  /// With `until_stopped` children that have all exited with 0 are no end. Returns at once (nullopt) when `abort` comes: who asks for that
  /// ends the children.
  std::optional<std::string> run(std::stop_token stop, bool until_stopped = false, std::stop_token abort = {});
  /// Requested when the members of groups on other nodes have ended: a rank that waits to join them is ended, too.
  void set_others_gone(std::stop_token gone) { others_gone_ = std::move(gone); }
  /// SIGTERM, then SIGKILL for what is left after `grace`.
  void terminate_all(std::chrono::milliseconds grace);
  pid_t pid_of(const std::string& name) const;
  /// Whether a signal ended this child, or one of its group, that was not told to end.
  bool was_killed(const std::string& name) const;

 private:
  struct Child;
  void spawn(Child& child);
  std::string describe_failure(const Child& child) const;
  /// The failure that ends the run, if there is one; those that the others go on without are marked and told.
  const Child* find_failure();
  /// True if the dead child will be started again: alone, or as a rank that joins the others of its group.
  bool plan_restart(Child& child);
  void start_again();
  void end_leftovers();
  /// Tells of children that are stopped or hang, and kills those that were for too long.
  void watch_well();
  void watch_stopped(Child& child, std::chrono::steady_clock::time_point now);
  /// Likewise of one that runs and does not say that it is well.
  void watch_hung(Child& child);
  bool may_restart(const Child& child) const;
  void pump(std::chrono::milliseconds timeout);
  void take_output(Child& child, std::string_view bytes);
  void reap();
  CgroupMemory memory_;
  std::stop_token others_gone_;
  std::function<void()> on_look_;
  std::chrono::steady_clock::time_point last_look_{};  ///< at who is stopped
  std::vector<std::unique_ptr<Child>> children_;
};

/// What the console shows of a line of a role: "10:00:00 WARNING [inference] text" of a warning or an error, also of JSON lines; what is
/// collected (log::progress); nothing of others.
std::optional<std::string> console_line(const std::string& role, const std::string& line);

}  // namespace prl::launch
