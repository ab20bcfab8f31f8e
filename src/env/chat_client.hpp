#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "net/asio.hpp"
#include "net/http_message.hpp"
#include "wire/generate.hpp"

namespace prl::env {

namespace asio = boost::asio;

/// One request for an assistant message.
struct ChatRequest {
  boost::json::array messages;  ///< the whole conversation so far, OpenAI form
  boost::json::array tools;     ///< OpenAI function envelopes; empty: none
  wire::SamplingParams sampling;
  net::TimePoint deadline;
};

/// Who wrote the text that a token of a prompt is part of.
enum class PromptRole : std::uint8_t { kNone, kSystem, kUser, kAssistant, kTool };

/// The tokens behind one turn. completion_ids, logprobs and versions have one length; versions is empty when the server does
/// not tell them.
struct TurnTokens {
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> completion_ids;  ///< the stop token included
  std::vector<float> logprobs;               ///< of the sampled tokens, finite
  std::vector<std::int64_t> versions;        ///< policy version behind each sampled token
  /// Of each prompt token behind the earlier turns that the prompt continues, kNone before; marks and headers are kNone where the renderer
  /// tells them from text. Empty unless ConversationOptions::wants_roles.
  std::vector<PromptRole> prompt_roles = {};
  /// Which experts prompt and completion had, as far as the server says; empty where it does not.
  wire::RoutedExperts routed_experts = {};
  std::vector<wire::PromptImage> images = {};  ///< of the prompt, those of the turns before among them
};

/// One assistant message.
struct ChatTurn {
  boost::json::object message;  ///< {role, content, reasoning_content?, tool_calls?}
  TurnTokens tokens;            ///< empty when the server gives text only
  bool has_tokens = false;
  bool is_bridged = false;    ///< prompt_ids begin with all ids of the turn before
  std::string finish_reason;  ///< "stop", "length", "tool_calls"
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_completion_tokens = 0;
  bool has_versions = false;    ///< the server told which policy sampled
  PolicyVersion version_start;  ///< of the first and last sampled token; meaningful with has_versions
  PolicyVersion version_end;
  double seconds = 0;  ///< waiting for the model

  bool is_truncated() const { return finish_reason == "length"; }
};

/// One conversation with a model; made for one rollout and dropped with it. One call at a time.
class ChatClient {
 public:
  virtual ~ChatClient() = default;
  /// `request` must live until the call has ended. Error{kOverlong} when the prompt does not fit the context, {kDeadline}, {kUnavailable},
  /// {kInvalidArgument}.
  virtual asio::awaitable<ChatTurn> complete(const ChatRequest& request) = 0;
};

/// What a conversation is opened with.
struct ConversationOptions {
  std::string session_id;    ///< X-Session-ID: the same for all turns
  std::string cache_salt;    ///< namespace of the prefix cache; empty: none
  net::Fields headers = {};  ///< sent with every request, where requests go over HTTP
  bool wants_roles = false;  ///< TurnTokens::prompt_roles, where turns have token ids
};

/// Opens conversations with one model service. Shared by all rollouts.
class ChatClientFactory {
 public:
  virtual ~ChatClientFactory() = default;
  virtual std::unique_ptr<ChatClient> open(ConversationOptions options) = 0;
  /// Returns when the service answers. Error{kUnavailable} naming it and the reason.
  virtual asio::awaitable<void> check_health(net::TimePoint deadline) = 0;
  /// For messages: "http://localhost:8000/v1", "in-process engine".
  virtual std::string describe() const = 0;
};

/// Opens conversations with `factory` that are like `options` but for a suffix of their session ids.
inline std::function<std::unique_ptr<ChatClient>(const std::string&)> conversation_opener(std::shared_ptr<ChatClientFactory> factory,
                                                                                          ConversationOptions options) {
  return [factory = std::move(factory), options = std::move(options)](const std::string& suffix) {
    ConversationOptions more = options;
    more.session_id += suffix;
    return factory->open(std::move(more));
  };
}

}  // namespace prl::env
