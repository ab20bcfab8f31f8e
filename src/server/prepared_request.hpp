#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_message.hpp"
#include "text/tokenizer.hpp"
#include "transfer/kv_gate.hpp"
#include "wire/generate.hpp"

namespace prl::server {

struct ResponsesRequest;

/// What kv_transfer_params of a request ask for, in vLLM's names and one of our own.
struct KvTransferOrder {
  bool is_prefill_only = false;                     ///< do_remote_decode: compute the prompt, for another engine to go on
  std::optional<transfer::KvPlace> place;           ///< do_remote_prefill: the engine that has computed the prompt
  std::optional<std::int64_t> max_uncached_tokens;  ///< answer 412 if more tokens of the prompt have to be computed here
  bool is_empty() const noexcept { return !is_prefill_only && !place && !max_uncached_tokens; }
};

struct ServerContext;

/// A generation request of any route, checked and tokenized: what is sampled, and how the answer is to look.
struct PreparedRequest {
  std::string id;                                  ///< "chatcmpl-...", "cmpl-...", "generate-tokens-..."
  std::string model;                               ///< as the client wrote it, or the served name
  std::string adapter;                             ///< that `model` names; empty: the model as it is
  std::vector<std::vector<std::int32_t>> prompts;  ///< one, or several for /v1/completions; none is empty
  std::vector<wire::PromptImage> images;           ///< chat only: of the one prompt
  wire::SamplingParams sampling;                   ///< max_tokens is set and fits; n counts choices per prompt
  std::string session_id;
  std::string cache_salt;
  std::int32_t priority = 0;

  std::optional<std::int64_t> max_tokens_limit;  ///< of the model's own configuration
  bool is_stream = false;
  bool include_usage = false;     ///< a last chunk with the usage
  bool continuous_usage = false;  ///< usage in every chunk
  bool want_logprobs = false;
  std::int32_t num_top_logprobs = 0;
  bool return_token_ids = false;
  bool tokens_as_ids = false;           ///< "token_id:N" instead of text in log-probability entries
  bool echo = false;                    ///< /v1/completions: the prompt is put before the text, and its tokens before the log-probabilities
  bool is_prompt_only = false;          ///< /v1/completions with max_tokens 0: what the engine draws (one token) is not shown
  bool return_prompt_logprobs = false;  ///< the client asked for the member of that name; echo alone needs the numbers too
  bool detokenize = true;               ///< false: the reply has no text
  std::string echoed_text;              ///< chat with echo: the last message, which the reply's content begins with
  std::vector<std::string> ignored;     ///< members of the body without effect
  KvTransferOrder kv;
  std::vector<std::int32_t> own_stop_ids;  ///< stop_token_ids of the client; they are reported as stop_reason

  std::shared_ptr<const ResponsesRequest> responses;  ///< of /v1/responses only

  boost::json::array tools;  ///< chat only; empty: none
  bool parse_tools = false;
  bool reads_channels = false;  ///< chat with a model that writes harmony messages: they are always taken apart
  bool parse_reasoning = false;
  bool include_reasoning = true;     ///< false: reasoning is split off and not shown
  bool starts_in_reasoning = false;  ///< the prompt ended inside an open think block

  /// If there: sampling.token_rule is still to be made, which may take long (a thread of rule_workers does it). The context must live.
  std::function<std::shared_ptr<const wire::TokenRule>()> make_rule;
  std::string rule_param;  ///< the member that asked for the rule

  std::int64_t num_prompt_tokens() const;
  /// How many entries the list beside a drawn token has at most. Tokens that the request names come in place of the likeliest.
  std::size_t num_listed_logprobs() const noexcept {
    return sampling.logprob_token_ids.empty() ? static_cast<std::size_t>(num_top_logprobs) : sampling.logprob_token_ids.size() + 1;
  }
};

/// The kinds of body. They run on a worker thread (templates, tokenization) and throw net::HttpError naming the field,
/// or Error{kOverlong} with the text that clients recognise.
PreparedRequest prepare_chat(const ServerContext& context, const net::HttpRequest& request, bool with_tokens);
PreparedRequest prepare_responses(const ServerContext& context, const net::HttpRequest& request);
PreparedRequest prepare_completion(const ServerContext& context, const net::HttpRequest& request);
PreparedRequest prepare_generate(const ServerContext& context, const net::HttpRequest& request);

/// Messages (or a prompt) of a chat-like body as token ids; used by /tokenize too.
struct ChatPrompt {
  std::vector<std::int32_t> ids;
  std::vector<wire::PromptImage> images;  ///< placed in `ids`
  bool ends_in_think = false;
  boost::json::array tools;
  std::string last_assistant_text;  ///< of the last message, if the assistant said it
};
ChatPrompt render_chat(const ServerContext& context, const boost::json::object& body, bool add_special_tokens);

/// Throws the canonical context overflow unless a prompt of `num_tokens`, or of at least so many, leaves room for one more.
void check_prompt_fits(const ServerContext& context, std::int64_t num_tokens, bool is_lower_bound = false);
/// True if the text has more tokens than that beyond doubt; finding out takes no more work than a text of that many tokens does. A long
/// text of few tokens is not, nor one that is close to the limit.
bool is_beyond(const text::Tokenizer& tokenizer, std::string_view text, std::size_t max_tokens);
/// The tokens of a prompt. Unless it will be cut to what fits (`is_cut`), one that is far too long is refused without being tokenized
/// whole.
std::vector<std::int32_t> encode_prompt(const ServerContext& context, std::string_view text, text::EncodeOptions options, bool is_cut);
/// 404 unless `model` is absent, one of the served names or that of an adapter, which is in memory then. Returns the name to answer with.
/// With the key of a run it is that run's adapter, or 403.
std::string check_model(const ServerContext& context, const net::HttpRequest& request, const boost::json::object& body);
/// True for the names of the model itself.
bool is_served_name(const ServerContext& context, const std::string& name);

}  // namespace prl::server
