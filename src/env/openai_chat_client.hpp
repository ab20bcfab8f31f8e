#pragma once

#include <boost/json/object.hpp>

#include <memory>
#include <string>

#include "env/chat_client.hpp"
#include "net/http_client.hpp"

namespace prl::env {

struct OpenAIChatOptions {
  std::string base_url = "https://api.openai.com/v1";  ///< with or without a trailing "/v1"
  std::string model;
  bool return_token_ids = false;                      ///< ask for token ids and log-probabilities (our server, vLLM); needed for training
  std::string reasoning_field = "reasoning_content";  ///< of the reply's message
  /// Members put into every request as they are, over everything else (extra_body, reasoning_effort, explicit sampling).
  boost::json::object extra_body;
  bool check_model = true;  ///< check_health also asks /v1/models for the model
};

/// Chat with any OpenAI-compatible server over POST /v1/chat/completions. Sampling fields are sent only where they differ
/// from vLLM's defaults, so that a server's own defaults stay. The client's bearer key, headers and retries are used.
///
/// A 400 "maximum context length is X tokens ... Y ..." is answered by one more attempt with max_tokens = X - Y when Y < X;
/// otherwise it is Error{kOverlong}.
class OpenAIChatClientFactory final : public ChatClientFactory {
 public:
  OpenAIChatClientFactory(std::shared_ptr<net::HttpClient> client, OpenAIChatOptions options);
  std::unique_ptr<ChatClient> open(ConversationOptions options) override;
  asio::awaitable<void> check_health(net::TimePoint deadline) override;
  std::string describe() const override;

 private:
  std::shared_ptr<net::HttpClient> client_;
  std::shared_ptr<const OpenAIChatOptions> options_;
  std::string root_;
};

}  // namespace prl::env
