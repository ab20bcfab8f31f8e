#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <memory>

#include "env/chat_client.hpp"
#include "text/renderer.hpp"

namespace prl::env {

/// The tokens that the model of `renderer` would have read and written, had it given `reply` to `messages`: the prompt with its
/// generation prompt, and after it the reply up to and including its end token (left out if `is_cut`, when a length limit ended
/// the reply). log-probabilities are 0: nobody sampled these tokens.
TurnTokens tokens_of_reply(const text::Renderer& renderer, const boost::json::array& messages, const boost::json::array& tools,
                           const boost::json::object& reply, bool is_cut);

/// Another model's replies as tokens of ours, for training on them: any service that gives text will do, whatever its tokenizer.
class RenderedChatClientFactory final : public ChatClientFactory {
 public:
  RenderedChatClientFactory(std::shared_ptr<const text::Renderer> renderer, std::shared_ptr<ChatClientFactory> service);
  std::unique_ptr<ChatClient> open(ConversationOptions options) override;
  asio::awaitable<void> check_health(net::TimePoint deadline) override;
  std::string describe() const override;

 private:
  std::shared_ptr<const text::Renderer> renderer_;
  std::shared_ptr<ChatClientFactory> service_;
};

}  // namespace prl::env
