#pragma once

#include <filesystem>

#include "base/log.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// `inner`, with a log of its own, appended to `file`: that it is ready, each rollout at debug level, failed ones as warnings, and every
/// ten seconds at most a line about those that ended. The file is made with the first line and holds 256 MiB at most; one that cannot be
/// written is a warning in the log of the process.
EnvironmentPtr with_log(EnvironmentPtr inner, std::filesystem::path file, log::Level least);

}  // namespace prl::env
