#include "env/state_headers.hpp"

#include "base/error.hpp"

namespace prl::env {

net::Fields state_headers(const StateHeaders& headers, const RolloutState& state) {
  const std::map<std::string, std::string> fields{{"trajectory_id", state.trajectory_id},
                                                  {"example_id", std::to_string(state.example_id)},
                                                  {"rollout_idx", std::to_string(state.rollout_idx)},
                                                  {"task", state.task}};
  net::Fields out;
  for (const auto& [header, field] : headers) {
    const auto found = fields.find(field);
    if (found == fields.end())
      fail(ErrorCode::kInvalidArgument,
           "client.extra_headers_from_state.{}: there is no field '{}'; there are trajectory_id, example_id, rollout_idx, task", header,
           field);
    out.add(header, found->second);
  }
  return out;
}

}  // namespace prl::env
