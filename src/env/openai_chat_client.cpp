#include "env/openai_chat_client.hpp"

#include <cmath>
#include <optional>
#include <regex>
#include <utility>

#include "base/error.hpp"
#include "env/detail/service_health.hpp"
#include "net/service.hpp"
#include "text/json_python.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

void put_sampling(json::object& body, const wire::SamplingParams& sampling) {
  const wire::SamplingParams plain;
  if (sampling.temperature != plain.temperature) body["temperature"] = sampling.temperature;
  if (sampling.top_p != plain.top_p) body["top_p"] = sampling.top_p;
  if (sampling.top_k > 0) body["top_k"] = sampling.top_k;
  if (sampling.min_p != plain.min_p) body["min_p"] = sampling.min_p;
  if (sampling.repetition_penalty != plain.repetition_penalty) body["repetition_penalty"] = sampling.repetition_penalty;
  if (sampling.presence_penalty != plain.presence_penalty) body["presence_penalty"] = sampling.presence_penalty;
  if (sampling.frequency_penalty != plain.frequency_penalty) body["frequency_penalty"] = sampling.frequency_penalty;
  if (sampling.seed) body["seed"] = static_cast<std::int64_t>(*sampling.seed & 0x7fff'ffff'ffff'ffffull);
  if (sampling.max_tokens) body["max_tokens"] = *sampling.max_tokens;
  if (sampling.min_tokens != plain.min_tokens) body["min_tokens"] = sampling.min_tokens;
  if (!sampling.stop.empty()) {
    json::array stop;
    for (const std::string& text : sampling.stop) stop.emplace_back(text);
    body["stop"] = std::move(stop);
  }
}

/// X - Y of "maximum context length is X tokens" and "Y of text input" (or "Y input tokens"), if both are there and Y < X.
std::optional<std::int64_t> room_in_context(const std::string& message) {
  static const std::regex limit_pattern("maximum context length is (\\d+) tokens", std::regex::icase);
  static const std::regex input_pattern("(\\d+) (?:of text input|tokens from the input|input tokens|in the messages)", std::regex::icase);
  std::smatch limit;
  std::smatch input;
  if (!std::regex_search(message, limit, limit_pattern) || !std::regex_search(message, input, input_pattern)) return std::nullopt;
  const std::int64_t room = std::stoll(limit[1].str().substr(0, 15)) - std::stoll(input[1].str().substr(0, 15));
  return room > 0 ? std::optional(room) : std::nullopt;
}

std::string text_or_empty(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->get_string()) : std::string();
}

std::int64_t number_at(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<std::int64_t>() : 0;
}

json::object message_of(const json::object& raw, const std::string& reasoning_field) {
  json::object message;
  message["role"] = "assistant";
  message["content"] = text_or_empty(raw, "content");
  std::string reasoning = text_or_empty(raw, reasoning_field);
  if (reasoning.empty()) reasoning = text_or_empty(raw, "reasoning");
  if (!reasoning.empty()) message["reasoning_content"] = reasoning;
  if (const json::value* calls = raw.if_contains("tool_calls"); calls != nullptr && calls->is_array() && !calls->get_array().empty())
    message["tool_calls"] = calls->get_array();
  return message;
}

/// {"policy_version": {"start", "end"}} of our servers.
void read_versions(const json::object& body, ChatTurn& turn) {
  const json::value* found = body.if_contains("policy_version");
  const json::object* versions = found != nullptr ? found->if_object() : nullptr;
  const json::value* start = versions != nullptr ? versions->if_contains("start") : nullptr;
  const json::value* end = versions != nullptr ? versions->if_contains("end") : nullptr;
  if (start == nullptr || end == nullptr || !start->is_int64() || !end->is_int64()) return;
  turn.has_versions = true;
  turn.version_start = PolicyVersion{start->get_int64()};
  turn.version_end = PolicyVersion{end->get_int64()};
}

/// Token ids and log-probabilities, all or nothing.
void read_tokens(const json::object& body, const json::object& choice, ChatTurn& turn) {
  const json::value* prompt_ids = body.if_contains("prompt_token_ids");
  const json::value* ids = choice.if_contains("token_ids");
  const json::value* logprobs = choice.if_contains("logprobs");
  if (prompt_ids == nullptr || !prompt_ids->is_array() || ids == nullptr || !ids->is_array() || logprobs == nullptr ||
      !logprobs->is_object())
    return;
  for (const json::value& id : prompt_ids->get_array())
    turn.tokens.prompt_ids.push_back(static_cast<std::int32_t>(id.to_number<std::int64_t>()));
  for (const json::value& id : ids->get_array())
    turn.tokens.completion_ids.push_back(static_cast<std::int32_t>(id.to_number<std::int64_t>()));
  for (const json::value& entry : logprobs->at("content").as_array()) {
    const double logprob = entry.at("logprob").to_number<double>();
    if (!std::isfinite(logprob)) fail(ErrorCode::kNonFinite, "a log-probability of the reply is not finite");
    turn.tokens.logprobs.push_back(static_cast<float>(logprob));
  }
  if (turn.tokens.logprobs.size() != turn.tokens.completion_ids.size())
    fail(ErrorCode::kCorrupt, "{} tokens with {} log-probabilities", turn.tokens.completion_ids.size(), turn.tokens.logprobs.size());
  if (const json::value* versions = choice.if_contains("policy_versions"); versions != nullptr && versions->is_array())
    for (const json::value& version : versions->get_array()) turn.tokens.versions.push_back(version.to_number<std::int64_t>());
  if (turn.tokens.versions.size() != turn.tokens.completion_ids.size()) turn.tokens.versions.clear();
  if (!turn.tokens.versions.empty()) {
    turn.has_versions = true;
    turn.version_start = PolicyVersion{turn.tokens.versions.front()};
    turn.version_end = PolicyVersion{turn.tokens.versions.back()};
  }
  turn.has_tokens = true;
}

class OpenAIChatClient final : public ChatClient {
 public:
  OpenAIChatClient(std::shared_ptr<net::HttpClient> client, std::shared_ptr<const OpenAIChatOptions> options, std::string root,
                   ConversationOptions conversation)
      : client_(std::move(client)), options_(std::move(options)), root_(std::move(root)), conversation_(std::move(conversation)) {}

  asio::awaitable<ChatTurn> complete(const ChatRequest& request) override {
    const net::TimePoint begin = net::Clock::now();
    auto first = post(request, std::nullopt);
    net::HttpReply reply = co_await std::move(first);
    if (reply.status == 400) {
      if (const auto room = room_in_context(reply.error_message())) {
        auto second = post(request, room);
        reply = co_await std::move(second);
      }
    }
    reply.raise_for_status(root_ + "/v1/chat/completions");
    ChatTurn turn = parse(reply);
    turn.seconds = std::chrono::duration<double>(net::Clock::now() - begin).count();
    co_return turn;
  }

 private:
  asio::awaitable<net::HttpReply> post(const ChatRequest& request, std::optional<std::int64_t> max_tokens) {
    json::object body;
    body["model"] = options_->model;
    body["messages"] = request.messages;
    if (!request.tools.empty()) body["tools"] = request.tools;
    put_sampling(body, request.sampling);
    body["n"] = 1;
    if (options_->return_token_ids) {
      body["logprobs"] = true;
      body["return_token_ids"] = true;
    }
    if (!conversation_.cache_salt.empty() && options_->return_token_ids) body["cache_salt"] = conversation_.cache_salt;
    if (!request.sampling.extra_json.empty()) {
      const json::object extra = text::parse_json(request.sampling.extra_json, text::kJsonDepth, text::LargeNumbers::kKeepText).as_object();
      for (const auto& member : extra)
        if (!body.contains(member.key())) body[member.key()] = member.value();
    }
    for (const auto& member : options_->extra_body) body[member.key()] = member.value();
    if (max_tokens) {
      const char* key = body.contains("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
      body[key] = *max_tokens;
    }
    net::HttpCall call;
    call.method = "POST";
    call.url = root_ + "/v1/chat/completions";
    call.body = text::to_json_text(body);
    call.deadline = request.deadline;
    for (const auto& [name, value] : conversation_.headers) call.headers.add(name, value);
    if (!conversation_.session_id.empty() && call.headers.find("X-Session-ID") == nullptr)
      call.headers.add("X-Session-ID", conversation_.session_id);
    auto calling = client_->call(std::move(call));
    co_return co_await std::move(calling);
  }

  ChatTurn parse(const net::HttpReply& reply) const {
    const json::value body = reply.json();
    try {
      const json::object& object = body.as_object();
      const json::object& choice = object.at("choices").as_array().at(0).as_object();
      ChatTurn turn;
      turn.message = message_of(choice.at("message").as_object(), options_->reasoning_field);
      turn.finish_reason = text_or_empty(choice, "finish_reason");
      if (const json::value* usage = object.if_contains("usage"); usage != nullptr && usage->is_object()) {
        turn.num_prompt_tokens = number_at(usage->get_object(), "prompt_tokens");
        turn.num_completion_tokens = number_at(usage->get_object(), "completion_tokens");
      }
      read_versions(object, turn);
      if (options_->return_token_ids) read_tokens(object, choice, turn);
      return turn;
    } catch (const Error& error) {
      throw error.with_context(root_ + "/v1/chat/completions");
    } catch (const std::exception& error) {
      fail(ErrorCode::kCorrupt, "{}/v1/chat/completions answered something else than a chat completion ({}): {}", root_, error.what(),
           reply.body.substr(0, 200));
    }
  }

  std::shared_ptr<net::HttpClient> client_;
  std::shared_ptr<const OpenAIChatOptions> options_;
  std::string root_;
  ConversationOptions conversation_;
};

}  // namespace

OpenAIChatClientFactory::OpenAIChatClientFactory(std::shared_ptr<net::HttpClient> client, OpenAIChatOptions options)
    : client_(std::move(client)),
      options_(std::make_shared<const OpenAIChatOptions>(std::move(options))),
      root_(net::server_root(options_->base_url)) {}

std::unique_ptr<ChatClient> OpenAIChatClientFactory::open(ConversationOptions options) {
  return std::make_unique<OpenAIChatClient>(client_, options_, root_, std::move(options));
}

asio::awaitable<void> OpenAIChatClientFactory::check_health(net::TimePoint deadline) {
  auto checking = detail::wait_for_service(client_, root_, options_->check_model ? options_->model : std::string(), deadline);
  co_await std::move(checking);
}

std::string OpenAIChatClientFactory::describe() const { return root_ + "/v1"; }

}  // namespace prl::env
