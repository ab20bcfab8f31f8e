#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "net/http_message.hpp"

namespace prl::env {

/// What a rollout tells servers of itself; borrowed.
struct RolloutState {
  std::string_view trajectory_id;
  std::int64_t example_id = 0;
  std::int64_t rollout_idx = 0;
  std::string_view task;  ///< name of the environment
};
/// Names of headers, and of the field of RolloutState that each carries (client.extra_headers_from_state).
using StateHeaders = std::map<std::string, std::string>;

/// Error{kInvalidArgument} naming a field that does not exist; configurations are checked before (config::kRolloutStateFields).
net::Fields state_headers(const StateHeaders& headers, const RolloutState& state);

}  // namespace prl::env
