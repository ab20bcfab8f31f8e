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
  char uid_map[64] = {};  ///< "<uid> <uid> 1"
  char gid_map[64] = {};
};
SandboxPlan plan_sandbox(const ChildLimits& limits, bool isolate_network);

/// Applies the plan to this process, which has one thread. Async-signal-safe. kNone, or the step that failed with errno set.
StartStep enter_sandbox(const SandboxPlan& plan) noexcept;

}  // namespace prl::env::python
