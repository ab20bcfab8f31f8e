#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "env/generate_client.hpp"
#include "net/asio.hpp"
#include "net/http_client.hpp"
#include "text/tokenizer.hpp"

namespace prl::env {

namespace asio = boost::asio;

/// Log-probabilities that a frozen model gives to tokens it did not write: what on-policy distillation asks its teacher for.
/// Implementations may be used by any number of coroutines at once.
class PromptScorer {
 public:
  virtual ~PromptScorer() = default;
  /// Entry i is log p(ids[i] | ids[0..i)) at temperature 1, in nats and finite; entry 0, which nothing predicts, is 0. As many
  /// entries as ids. `headers` go with the request where it goes over HTTP.
  /// Error{kOverlong} when the model has no room for so many tokens, {kCorrupt} when the reply is about other tokens than those
  /// that were sent, {kDeadline}, {kUnavailable}.
  virtual asio::awaitable<std::vector<float>> score(std::vector<std::int32_t> ids, net::TimePoint deadline, net::Fields headers) = 0;
  /// Returns when the service answers and its tokenizer was found to be ours, as far as it can be asked.
  /// Error{kInvalidArgument} saying where the two tokenizers differ, and what check_health of a GenerateClient throws.
  virtual asio::awaitable<void> check_ready(net::TimePoint deadline) = 0;
  /// For messages: "http://localhost:8001".
  virtual std::string describe() const = 0;
};

struct HttpScorerOptions {
  std::vector<std::string> base_urls;  ///< of servers of the same model, asked in turns; with or without a trailing "/v1"
  std::string model;                   ///< name the servers serve
  bool check_model = true;             ///< check_ready also asks /v1/models for the model
  /// Of the model that is trained. Its ids are sent as they are, so the scoring model must read them the same way.
  std::shared_ptr<const text::Tokenizer> tokenizer;
};

/// Scores over POST <root>/inference/v1/generate with prompt_logprobs, or over POST <root>/v1/completions with the same member
/// where a server lacks the first route (vLLM has the second, and our server both). The client's bearer key, headers and retries
/// are used. Error{kInvalidArgument} for an empty list of servers.
std::shared_ptr<PromptScorer> make_http_prompt_scorer(std::shared_ptr<net::HttpClient> client, HttpScorerOptions options);

/// Scores with the policy itself, whatever serves it: self-distillation. Its tokens need no check.
std::shared_ptr<PromptScorer> make_generate_prompt_scorer(std::shared_ptr<GenerateClient> generate);

}  // namespace prl::env
