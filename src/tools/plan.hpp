#pragma once

#include <string>

#include "config/tool_config.hpp"
#include "launch/cost_model.hpp"

namespace prl::tools {

/// The card a plan is made for: by name, or this machine's device, measured now (`local`: several ranks of a CPU share it); with what
/// the configuration assumes in place of it. Error{kInvalidArgument} with the names there are.
launch::Card card_of(const config::PlanConfig& config);

/// What fits, and how long a step takes, as text or JSON. Errors of reading the model.
std::string plan_report(const config::PlanConfig& config, const launch::Card& card);

}  // namespace prl::tools
