#pragma once

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>

#include <deque>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "env/environment.hpp"
#include "env/registry.hpp"
#include "text/json_python.hpp"

/// What tests of environments share.
namespace prl::env::testing {

namespace json = boost::json;

/// Answers with prepared turns and remembers what it was asked.
class ScriptedChat final : public ChatClient {
 public:
  explicit ScriptedChat(std::deque<ChatTurn> turns) : turns_(std::move(turns)) {}
  asio::awaitable<ChatTurn> complete(const ChatRequest& request) override {
    requests.push_back(request);
    if (turns_.empty()) fail(ErrorCode::kUnavailable, "the script has ended");
    ChatTurn turn = std::move(turns_.front());
    turns_.pop_front();
    if (turn.finish_reason == "overlong") fail(ErrorCode::kOverlong, "too long");
    co_return turn;
  }
  std::vector<ChatRequest> requests;

 private:
  std::deque<ChatTurn> turns_;
};

inline ChatTurn says(const std::string& content, const std::string& finish_reason = "stop") {
  ChatTurn turn;
  turn.message = json::object{{"role", "assistant"}, {"content", content}};
  turn.finish_reason = finish_reason;
  turn.num_prompt_tokens = 10;
  turn.num_completion_tokens = static_cast<std::int64_t>(content.size());
  return turn;
}

inline ChatTurn calls(const std::string& tool, const std::string& arguments) {
  ChatTurn turn = says("");
  json::object function{{"name", tool}, {"arguments", arguments}};
  json::object call{{"id", "call_1"}, {"type", "function"}};
  call["function"] = function;
  turn.message["tool_calls"] = json::array{call};
  turn.finish_reason = "tool_calls";
  return turn;
}

/// One rollout, to its end.
inline Episode play(const Environment& environment, Task task, ScriptedChat& chat, std::int64_t max_total_completion_tokens = -1) {
  asio::io_context context;
  RolloutContext rollout;
  rollout.client = &chat;
  rollout.seed = 7;
  rollout.trajectory_id = "t";
  rollout.max_total_completion_tokens = max_total_completion_tokens;
  rollout.deadline = net::Clock::now() + std::chrono::seconds(5);
  auto running = environment.run(std::move(task), std::move(rollout));
  auto future = asio::co_spawn(context, std::move(running), asio::use_future);
  context.run();
  return future.get();
}

/// The environment `id` with `args` as JSON.
inline EnvironmentPtr make(const std::string& id, const std::string& args = "{}") {
  EnvSpec spec;
  spec.id = id;
  spec.args = text::parse_json(args).as_object();
  return make_environment(spec);
}

}  // namespace prl::env::testing
