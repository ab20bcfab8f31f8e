#include "env/token_chat_client.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "base/error.hpp"
#include "env/message_match.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

PromptRole role_named(std::string_view role) {
  if (role == "system" || role == "developer") return PromptRole::kSystem;
  if (role == "user") return PromptRole::kUser;
  if (role == "assistant") return PromptRole::kAssistant;
  if (role == "tool" || role == "ipython") return PromptRole::kTool;
  return PromptRole::kNone;
}

/// Of each token: the role of the message whose text it is; of the whole message where the renderer does not know text from marks.
std::vector<PromptRole> roles_of(const text::RenderedConversation& rendered, const json::array& messages) {
  const bool knows_text = std::ranges::find(rendered.is_content, 1) != rendered.is_content.end();
  std::vector<PromptRole> roles(rendered.ids.size(), PromptRole::kNone);
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const auto message = static_cast<std::size_t>(rendered.message_indices[i]);
    if (rendered.message_indices[i] < 0 || message >= messages.size() || (knows_text && rendered.is_content[i] == 0)) continue;
    const json::value* role = messages[message].as_object().if_contains("role");
    if (role != nullptr && role->is_string()) roles[i] = role_named(std::string_view(role->get_string()));
  }
  return roles;
}

/// The messages with the tool's name in results that lack it: that of the call with the result's id.
json::array with_tool_names(json::array messages) {
  json::object names;
  for (json::value& item : messages) {
    json::object* message = item.if_object();
    if (message == nullptr) continue;
    if (const json::value* calls = message->if_contains("tool_calls"); calls != nullptr && calls->is_array())
      for (const json::value& call : calls->get_array()) {
        const json::object* object = call.if_object();
        const json::value* id = object != nullptr ? object->if_contains("id") : nullptr;
        const json::value* function = object != nullptr ? object->if_contains("function") : nullptr;
        const json::value* name = function != nullptr && function->is_object() ? function->get_object().if_contains("name") : nullptr;
        if (id != nullptr && id->is_string() && name != nullptr) names[id->get_string()] = *name;
      }
    const json::value* id = message->if_contains("tool_call_id");
    if (id == nullptr || !id->is_string()) continue;
    const json::value* name = names.if_contains(id->get_string());
    if (name != nullptr && (!message->contains("name") || message->at("name").is_null())) (*message)["name"] = *name;
  }
  return messages;
}

class TokenChatClient final : public ChatClient {
 public:
  TokenChatClient(std::shared_ptr<const text::Renderer> renderer, std::shared_ptr<GenerateClient> generate,
                  std::shared_ptr<const vision::PromptImages> images, ConversationOptions options)
      : renderer_(std::move(renderer)), generate_(std::move(generate)), images_(std::move(images)), options_(std::move(options)) {}

  asio::awaitable<ChatTurn> complete(const ChatRequest& request) override {
    ChatTurn turn;
    wire::GenerateRequest generate = make_request(request, turn);
    turn.tokens.prompt_ids = generate.prompt_ids;
    turn.tokens.images = generate.images;
    const net::TimePoint begin = net::Clock::now();
    wire::GenerateOutput output = co_await generate_->generate(std::move(generate), request.deadline);
    turn.seconds = std::chrono::duration<double>(net::Clock::now() - begin).count();
    check(output);
    fill(turn, std::move(output), request);
    remember(request, turn);
    co_return turn;
  }

 private:
  /// Fills in what the turn tells of its prompt, too.
  wire::GenerateRequest make_request(const ChatRequest& request, ChatTurn& turn) const {
    wire::GenerateRequest generate;
    std::optional<text::RenderedConversation> bridged;
    json::array named;
    if (renderer_->wants_tool_names()) named = with_tool_names(request.messages);
    const json::array& messages = renderer_->wants_tool_names() ? named : request.messages;
    if (continues_last_turn(request)) {
      json::array tail(messages.begin() + static_cast<std::ptrdiff_t>(history_.size()), messages.end());
      require_no_images(tail);
      bridged = renderer_->bridge_to_next_turn(prompt_ids_, completion_ids_, tail, request.tools);
      if (bridged && options_.wants_roles) turn.tokens.prompt_roles = roles_of(*bridged, tail);
      if (bridged) generate.images = prompt_images_;
      if (bridged) place_images(tail, prompt_ids_.size() + completion_ids_.size(), *bridged, turn, generate);
    }
    turn.is_bridged = bridged.has_value();
    if (!bridged) {
      require_no_images(messages);
      bridged = renderer_->render(messages, request.tools, true);
      if (options_.wants_roles) turn.tokens.prompt_roles = roles_of(*bridged, request.messages);
      place_images(messages, 0, *bridged, turn, generate);
    }
    generate.prompt_ids = std::move(bridged->ids);
    generate.sampling = request.sampling;
    generate.sampling.n = 1;
    generate.sampling.logprobs = 1;
    generate.sampling.skip_special_tokens = false;
    // The last token of the turn before was in no layer then.
    if (turn.is_bridged && tells_experts_)
      generate.sampling.routed_experts_start = static_cast<std::int64_t>(prompt_ids_.size() + completion_ids_.size()) - 1;
    for (const std::int32_t id : renderer_->stop_token_ids())
      if (std::find(generate.sampling.stop_token_ids.begin(), generate.sampling.stop_token_ids.end(), id) ==
          generate.sampling.stop_token_ids.end())
        generate.sampling.stop_token_ids.push_back(id);
    generate.session_id = options_.session_id;
    for (const auto& [name, value] : options_.headers) generate.headers[name] = value;
    generate.cache_salt = options_.cache_salt;
    return generate;
  }

  /// Before a renderer sees them, whose template may not know images.
  void require_no_images(const json::array& messages) const {
    if (images_ == nullptr && vision::has_images(messages))
      fail(ErrorCode::kInvalidArgument,
           "the conversation {} has images, and this model is asked with text alone: it has no vision tower, or model.vlm is not set",
           options_.session_id);
  }

  /// Reads the images of `messages`, whose tokens stand behind the first `done` ids, widens their placeholders in ids and roles, and adds
  /// them to the request.
  void place_images(const json::array& messages, std::size_t done, text::RenderedConversation& rendered, ChatTurn& turn,
                    wire::GenerateRequest& generate) const {
    if (images_ == nullptr || !vision::has_images(messages)) return;
    const std::vector<vision::PixelsPtr> pictures = images_->of_messages(messages);
    if (generate.images.size() + pictures.size() > images_->options().max_images)
      fail(ErrorCode::kInvalidArgument, "the conversation {} has more than {} images", options_.session_id, images_->options().max_images);
    const auto begin = rendered.ids.begin() + static_cast<std::ptrdiff_t>(done);
    std::vector<std::int32_t> ids(begin, rendered.ids.end());
    std::vector<wire::PromptImage> placed = images_->place(pictures, ids);
    rendered.ids.erase(begin, rendered.ids.end());
    rendered.ids.insert(rendered.ids.end(), ids.begin(), ids.end());
    for (wire::PromptImage& image : placed) image.first += static_cast<std::int64_t>(done);
    if (!turn.tokens.prompt_roles.empty()) vision::widen_at(std::span<const wire::PromptImage>(placed), turn.tokens.prompt_roles);
    std::ranges::move(placed, std::back_inserter(generate.images));
  }

  bool continues_last_turn(const ChatRequest& request) const {
    if (history_.empty() || request.messages.size() <= history_.size() || request.tools != tools_) return false;
    return begins_with(request.messages, history_);
  }

  void check(const wire::GenerateOutput& output) const {
    if (output.finish_reason == wire::FinishReason::kAbort)
      fail(ErrorCode::kCancelled, "{} aborted the request of {}", generate_->describe(), options_.session_id);
    if (output.finish_reason == wire::FinishReason::kError)
      fail(ErrorCode::kUnavailable, "{} failed the request of {}: {}", generate_->describe(), options_.session_id, output.error);
    if (output.token_ids.empty()) fail(ErrorCode::kCorrupt, "{} answered {} without any token", generate_->describe(), options_.session_id);
    if (output.logprobs.size() != output.token_ids.size())
      fail(ErrorCode::kCorrupt, "{} answered {} tokens with {} log-probabilities", generate_->describe(), output.token_ids.size(),
           output.logprobs.size());
    for (const float logprob : output.logprobs)
      if (!std::isfinite(logprob)) fail(ErrorCode::kNonFinite, "{} answered a log-probability that is not finite", generate_->describe());
  }

  void fill(ChatTurn& turn, wire::GenerateOutput output, const ChatRequest& request) const {
    const text::ParsedResponse parsed = renderer_->parse_response(output.token_ids, request.tools, turn.tokens.prompt_ids);
    turn.message["role"] = "assistant";
    turn.message["content"] = parsed.content;
    if (parsed.reasoning_content) turn.message["reasoning_content"] = *parsed.reasoning_content;
    json::array calls = parsed.openai_tool_calls();
    turn.finish_reason = wire::to_string(output.finish_reason);
    if (!calls.empty()) {
      if (output.finish_reason == wire::FinishReason::kStop) turn.finish_reason = "tool_calls";
      turn.message["tool_calls"] = std::move(calls);
    }
    turn.version_start = output.versions.empty() ? output.version_start : PolicyVersion{output.versions.front()};
    turn.version_end = output.versions.empty() ? output.version_end : PolicyVersion{output.versions.back()};
    turn.num_prompt_tokens = static_cast<std::int64_t>(turn.tokens.prompt_ids.size());
    turn.num_completion_tokens = static_cast<std::int64_t>(output.token_ids.size());
    turn.has_tokens = true;
    if (output.versions.size() != output.token_ids.size()) output.versions.clear();
    turn.has_versions = !output.versions.empty();
    turn.tokens.completion_ids = std::move(output.token_ids);
    turn.tokens.logprobs = std::move(output.logprobs);
    turn.tokens.versions = std::move(output.versions);
    turn.tokens.routed_experts = std::move(output.routed_experts);
  }

  void remember(const ChatRequest& request, const ChatTurn& turn) {
    history_ = request.messages;
    history_.push_back(turn.message);
    tools_ = request.tools;
    prompt_ids_ = turn.tokens.prompt_ids;
    prompt_images_ = turn.tokens.images;
    completion_ids_ = turn.tokens.completion_ids;
    tells_experts_ = !turn.tokens.routed_experts.empty();
  }

  std::shared_ptr<const text::Renderer> renderer_;
  std::shared_ptr<GenerateClient> generate_;
  std::shared_ptr<const vision::PromptImages> images_;
  ConversationOptions options_;
  // The ledger: the last turn's messages (its reply included) and ids.
  json::array history_;
  json::array tools_;
  std::vector<std::int32_t> prompt_ids_;
  std::vector<std::int32_t> completion_ids_;
  std::vector<wire::PromptImage> prompt_images_;
  bool tells_experts_ = false;  ///< the server's last answer did
};

}  // namespace

TokenChatClientFactory::TokenChatClientFactory(std::shared_ptr<const text::Renderer> renderer, std::shared_ptr<GenerateClient> generate,
                                               std::shared_ptr<const vision::PromptImages> images)
    : renderer_(std::move(renderer)), generate_(std::move(generate)), images_(std::move(images)) {}

std::unique_ptr<ChatClient> TokenChatClientFactory::open(ConversationOptions options) {
  return std::make_unique<TokenChatClient>(renderer_, generate_, images_, std::move(options));
}

asio::awaitable<void> TokenChatClientFactory::check_health(net::TimePoint deadline) { co_await generate_->check_health(deadline); }

std::string TokenChatClientFactory::describe() const { return generate_->describe(); }

}  // namespace prl::env
