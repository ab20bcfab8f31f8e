#include "env/python/sandbox.hpp"

#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace prl::env::python {
namespace {

/// Seconds of processor time from SIGXCPU, which says why a process ends, to SIGKILL.
constexpr rlim_t kCpuSpare = 2;

/// The kernel warns at `wanted` and acts at `spare` more where the two differ.
bool set_limit(int resource, std::int64_t wanted, rlim_t spare = 0) noexcept {
  if (wanted <= 0) return true;
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return false;
  const rlim_t most = limit.rlim_max;  // RLIM_INFINITY is the greatest value
  limit.rlim_cur = std::min(static_cast<rlim_t>(wanted), most);
  limit.rlim_max = std::min(static_cast<rlim_t>(wanted) + spare, most);
  return ::setrlimit(static_cast<__rlimit_resource>(resource), &limit) == 0;
}

bool write_text(const char* path, const char* text) noexcept {
  const int fd = ::open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const auto length = static_cast<ssize_t>(std::strlen(text));
  const bool is_written = ::write(fd, text, static_cast<std::size_t>(length)) == length;
  const int saved = errno;
  ::close(fd);
  errno = saved;
  return is_written;
}

bool bring_up_loopback() noexcept {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  ifreq request{};
  std::memcpy(request.ifr_name, "lo", 3);
  bool is_up = ::ioctl(fd, SIOCGIFFLAGS, &request) == 0;
  request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP | IFF_RUNNING);
  is_up = is_up && ::ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  const int saved = errno;
  ::close(fd);
  errno = saved;
  return is_up;
}

/// After exec no capability in `dropped` can be had again. Those the kernel does not know end the loop.
bool drop_capabilities(bool all) noexcept {
  for (int capability = 0; capability < 64; ++capability) {
    // These two let root pass the limit of processes.
    if (!all && capability != CAP_SYS_RESOURCE && capability != CAP_SYS_ADMIN) continue;
    if (::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0) {
      if (errno == EINVAL) break;
      return false;
    }
  }
  return true;
}

}  // namespace

const char* to_string(StartStep step) {
  switch (step) {
    case StartStep::kNone: return "nothing";
    case StartStep::kGroup: return "a process group";
    case StartStep::kLimits: return "its limits";
    case StartStep::kUser: return "a user id of its own";
    case StartStep::kNamespace: return "a user and a network namespace";
    case StartStep::kIdMap: return "the map of user ids";
    case StartStep::kLoopback: return "the loopback device";
    case StartStep::kCapabilities: return "dropping capabilities";
    case StartStep::kStreams: return "its descriptors";
    case StartStep::kFolder: return "its working folder";
    case StartStep::kExec: return "executing the program";
  }
  return "?";
}

uid_t uid_in_template() { return ::geteuid() != 0 ? ::geteuid() : 1; }

SandboxPlan plan_sandbox(const ChildLimits& limits, bool isolate_network) {
  return plan_sandbox(limits, isolate_network, ::geteuid(), ::geteuid());
}

SandboxPlan plan_sandbox(const ChildLimits& limits, bool isolate_network, uid_t inner_uid, uid_t outer_uid) {
  // The range that systemd keeps for services without a user of their own.
  constexpr uid_t kFirstUid = 61184;
  constexpr uid_t kNumUids = 4000;
  static std::atomic<uid_t> next{static_cast<uid_t>(::getpid()) * 31};
  SandboxPlan plan;
  plan.limits = limits;
  plan.isolate_network = isolate_network;
  plan.uid = ::geteuid();
  plan.gid = ::getegid();
  if (plan.uid == 0 && limits.num_processes > 0) plan.counted_uid = kFirstUid + next.fetch_add(1) % kNumUids;
  std::snprintf(plan.uid_map, sizeof plan.uid_map, "%u %u 1", inner_uid, outer_uid);
  std::snprintf(plan.gid_map, sizeof plan.gid_map, "%u %u 1", plan.gid, plan.gid);
  return plan;
}

StartStep enter_sandbox(const SandboxPlan& plan) noexcept {
  const ChildLimits& limits = plan.limits;
  if (!set_limit(RLIMIT_AS, limits.memory_bytes) || !set_limit(RLIMIT_NOFILE, limits.num_files) ||
      !set_limit(RLIMIT_CPU, limits.cpu_seconds, kCpuSpare))
    return StartStep::kLimits;
  rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  if (plan.counted_uid != 0) {
    if (::syscall(SYS_setresuid, plan.counted_uid, 0, 0) != 0) return StartStep::kUser;
    ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);  // /proc/self stays writable
  }
  if (plan.isolate_network) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return StartStep::kNamespace;
    if (!write_text("/proc/self/setgroups", "deny") || !write_text("/proc/self/uid_map", plan.uid_map) ||
        !write_text("/proc/self/gid_map", plan.gid_map))
      return StartStep::kIdMap;
    if (!bring_up_loopback()) return StartStep::kLoopback;
    if (!drop_capabilities(true)) return StartStep::kCapabilities;
  } else if (plan.counted_uid != 0) {
    if (!drop_capabilities(false)) return StartStep::kCapabilities;
  }
  // Not before the namespace is made: the limit would also bind the count of its owner's processes outside.
  if (!set_limit(RLIMIT_NPROC, limits.num_processes)) return StartStep::kLimits;
  // With another real user id, exec under no_new_privs would make it the effective one, and files would be out of reach.
  if (plan.counted_uid == 0 && ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return StartStep::kCapabilities;
  return StartStep::kNone;
}

bool counts_processes_by_namespace() {
  utsname name{};
  int major = 0;
  int minor = 0;
  return ::uname(&name) == 0 && std::sscanf(name.release, "%d.%d", &major, &minor) == 2 && (major > 5 || (major == 5 && minor >= 14));
}

bool can_isolate_network() {
  static const bool can = [] {
    const SandboxPlan plan = plan_sandbox({}, true);
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(enter_sandbox(plan) == StartStep::kNone ? 0 : 1);
    int status = 1;
    if (pid < 0) return false;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }();
  return can;
}

}  // namespace prl::env::python
