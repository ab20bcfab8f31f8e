#pragma once

#include <memory>

#include "env/chat_client.hpp"
#include "env/generate_client.hpp"
#include "text/renderer.hpp"
#include "vision/prompt.hpp"

namespace prl::env {

/// Chat over token ids: renders messages, generates, parses the completion, and keeps the ledger of the conversation.
///
/// The prompt of turn k + 1 begins with exactly the ids of turn k (prompt and completion) whenever the messages continue
/// the last turn and the renderer can promise it; otherwise the conversation is rendered anew and is_bridged is false. Images of messages
/// are read once, and stay with the tokens of all turns.
class TokenChatClientFactory final : public ChatClientFactory {
 public:
  /// `images`: how the model takes images; nullptr: it takes none, and conversations with images fail.
  TokenChatClientFactory(std::shared_ptr<const text::Renderer> renderer, std::shared_ptr<GenerateClient> generate,
                         std::shared_ptr<const vision::PromptImages> images = nullptr);
  std::unique_ptr<ChatClient> open(ConversationOptions options) override;
  asio::awaitable<void> check_health(net::TimePoint deadline) override;
  std::string describe() const override;

 private:
  std::shared_ptr<const text::Renderer> renderer_;
  std::shared_ptr<GenerateClient> generate_;
  std::shared_ptr<const vision::PromptImages> images_;
};

}  // namespace prl::env
