#include "env/rendered_chat_client.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "vision/prompt.hpp"

namespace prl::env {

namespace json = boost::json;

TurnTokens tokens_of_reply(const text::Renderer& renderer, const json::array& messages, const json::array& tools, const json::object& reply,
                           bool is_cut) {
  TurnTokens out;
  json::array conversation = messages;
  conversation.push_back(reply);
  const std::vector<std::int32_t> whole = renderer.render_ids(conversation, tools, false);
  const std::vector<std::int32_t> prompt = renderer.render_ids(messages, tools, true);
  // Where the two part is where the reply begins. That is the prompt's end, but for templates that write a reply they know in
  // another way than one they ask for.
  const auto begin = std::ranges::mismatch(whole, prompt).in1;
  out.prompt_ids.assign(whole.begin(), begin);
  const std::vector<std::int32_t> stops = renderer.stop_token_ids();
  auto end = std::find_if(begin, whole.end(), [&](std::int32_t id) { return std::ranges::find(stops, id) != stops.end(); });
  if (end != whole.end() && !is_cut) ++end;
  out.completion_ids.assign(begin, end);
  out.logprobs.assign(out.completion_ids.size(), 0.0f);
  return out;
}

namespace {

class RenderedChatClient final : public ChatClient {
 public:
  RenderedChatClient(std::shared_ptr<const text::Renderer> renderer, std::unique_ptr<ChatClient> service)
      : renderer_(std::move(renderer)), service_(std::move(service)) {}

  asio::awaitable<ChatTurn> complete(const ChatRequest& request) override {
    if (vision::has_images(request.messages))
      fail(ErrorCode::kNotImplemented, "images in conversations that another model answers and the policy is trained on are not built");
    auto asking = service_->complete(request);
    ChatTurn turn = co_await std::move(asking);
    turn.tokens = tokens_of_reply(*renderer_, request.messages, request.tools, turn.message, turn.is_truncated());
    turn.has_tokens = true;
    turn.has_versions = false;  // those of the service's own weights say nothing about the policy that is trained
    turn.is_bridged = false;
    // Lengths are told in tokens of the model that is trained.
    turn.num_prompt_tokens = static_cast<std::int64_t>(turn.tokens.prompt_ids.size());
    turn.num_completion_tokens = static_cast<std::int64_t>(turn.tokens.completion_ids.size());
    co_return turn;
  }

 private:
  std::shared_ptr<const text::Renderer> renderer_;
  std::unique_ptr<ChatClient> service_;
};

}  // namespace

RenderedChatClientFactory::RenderedChatClientFactory(std::shared_ptr<const text::Renderer> renderer,
                                                     std::shared_ptr<ChatClientFactory> service)
    : renderer_(std::move(renderer)), service_(std::move(service)) {}

std::unique_ptr<ChatClient> RenderedChatClientFactory::open(ConversationOptions options) {
  return std::make_unique<RenderedChatClient>(renderer_, service_->open(std::move(options)));
}

asio::awaitable<void> RenderedChatClientFactory::check_health(net::TimePoint deadline) { co_await service_->check_health(deadline); }

std::string RenderedChatClientFactory::describe() const { return service_->describe(); }

}  // namespace prl::env
