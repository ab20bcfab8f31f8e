#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "net/http_message.hpp"

namespace prl::env {

/// What a rollout tells servers of itself.
struct RolloutState {
  std::string trajectory_id;
  std::int64_t example_id = 0;
  std::int64_t rollout_idx = 0;
  std::string task;  ///< name of the environment
};
/// Names of headers, and of the field of RolloutState that each carries (client.extra_headers_from_state).
using StateHeaders = std::map<std::string, std::string>;

/// Error{kInvalidArgument} naming the header and the fields that there are.
net::Fields state_headers(const StateHeaders& headers, const RolloutState& state);

}  // namespace prl::env
