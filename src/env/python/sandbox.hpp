#pragma once

#include <sys/types.h>

#include "env/python/child_process.hpp"

namespace prl::env::python {

/// The steps between fork and exec that can fail, for the message of the parent.
enum class StartStep : int { kNone, kGroup, kLimits, kUser, kNamespace, kIdMap, kLoopback, kCapabilities, kStreams, kFolder, kExec };
const char* to_string(StartStep step);

/// What enter_sandbox needs, made before fork.
struct SandboxPlan {
  ChildLimits limits;
  bool isolate_network = false;
  uid_t uid = 0;  ///< effective ids of this process
  gid_t gid = 0;
  uid_t counted_uid = 0;  ///< as root: the real user id whose processes are counted; 0: none
  char uid_map[64] = {};  ///< "<uid inside> <uid outside> 1"
  char gid_map[64] = {};
};
/// `outer_uid` is what the namespace outside of the new one calls this process's user.
SandboxPlan plan_sandbox(const ChildLimits& limits, bool isolate_network, uid_t inner_uid, uid_t outer_uid);
SandboxPlan plan_sandbox(const ChildLimits& limits, bool isolate_network);
/// What the namespace of a template calls the user of this process. Not 0: a process without capabilities, which a template is, may not
/// make a namespace in which user 0 of the one around it has an id (user_namespaces(7), since Linux 5.12).
uid_t uid_in_template();

/// Whether the limit of processes holds for the processes of a user namespace alone, as since Linux 5.14: workers that share a user id then
/// have a count each in namespaces of their own.
bool counts_processes_by_namespace();

/// Applies the plan to this process, which has one thread. Async-signal-safe. kNone, or the step that failed with errno set.
StartStep enter_sandbox(const SandboxPlan& plan) noexcept;

}  // namespace prl::env::python
