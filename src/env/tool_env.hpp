#pragma once

#include <functional>
#include <string>
#include <vector>

#include "env/multi_turn_env.hpp"

namespace prl::env {

/// A function the model may call.
struct Tool {
  std::string name;
  std::string description;
  boost::json::object parameters;  ///< JSON schema of the arguments
  /// Runs the call and returns the text of the tool message. A throw becomes the tool message "Error: ..." so that the
  /// model can react; it does not fail the episode.
  std::function<asio::awaitable<std::string>(boost::json::object arguments)> call;

  /// {"type": "function", "function": {name, description, parameters}}.
  boost::json::object definition() const;
};

/// Multi-turn with native tools: each tool call of the model's message is run, in order, and answered by a tool message.
/// The rollout ends when the model calls none ("no_tools_called").
class ToolEnv : public MultiTurnEnv {
 public:
  ToolEnv(std::string name, Limits limits, Rubric rubric, std::vector<Tool> tools);
  boost::json::array tools(const Task& task) const override;

 protected:
  std::string stop_condition(const Rollout& rollout) const override;
  asio::awaitable<boost::json::array> respond(Rollout* rollout) const override;

 private:
  asio::awaitable<std::string> run_call(std::string name, std::string arguments) const;
  std::vector<Tool> tools_;
};

}  // namespace prl::env
