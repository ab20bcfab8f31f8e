#include "env/state_headers.hpp"

#include <string>

#include "base/error.hpp"

namespace prl::env {
namespace {

std::string value_of(std::string_view field, const RolloutState& state) {
  if (field == "trajectory_id") return std::string(state.trajectory_id);
  if (field == "example_id") return std::to_string(state.example_id);
  if (field == "rollout_idx") return std::to_string(state.rollout_idx);
  if (field == "task") return std::string(state.task);
  fail(ErrorCode::kInvalidArgument, "extra_headers_from_state: a rollout has no field '{}'", field);
}

}  // namespace

net::Fields state_headers(const StateHeaders& headers, const RolloutState& state) {
  net::Fields out;
  for (const auto& [header, field] : headers) out.add(header, value_of(field, state));
  return out;
}

}  // namespace prl::env
