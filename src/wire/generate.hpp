#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "wire/prompt_image.hpp"
#include "wire/routed_experts.hpp"
#include "wire/token_rule.hpp"

namespace prl::wire {

/// How to draw tokens, in the field's names (OpenAI and vLLM). Defaults are those of vLLM's SamplingParams.
struct SamplingParams {
  float temperature = 1.0f;                ///< [0, 2]; 0 is greedy
  float top_p = 1.0f;                      ///< (0, 1]
  std::int32_t top_k = -1;                 ///< -1 or 0: all
  float min_p = 0.0f;                      ///< [0, 1]
  float repetition_penalty = 1.0f;         ///< > 0; over prompt and output
  float presence_penalty = 0.0f;           ///< [-2, 2]; over output
  float frequency_penalty = 0.0f;          ///< [-2, 2]; over output
  std::optional<std::uint64_t> seed;       ///< with it, the same request gives the same tokens under the same weights
  std::optional<std::int32_t> max_tokens;  ///< none: up to max_model_len - prompt length
  std::int32_t min_tokens = 0;             ///< no stop before this many
  std::vector<std::string> stop;           ///< strings; matched by the text layer
  std::vector<std::int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  std::int32_t n = 1;
  std::optional<std::int32_t> logprobs;         ///< number of top log-probabilities per sampled token; the sampled one is always given
  std::optional<std::int32_t> prompt_logprobs;  ///< the same for each prompt token but the first
  /// Tell which experts the tokens from this position on had in each layer; none: do not. Of mixtures of experts.
  std::optional<std::int64_t> routed_experts_start;
  bool prompt_ranks = false;  ///< with prompt_logprobs: count how many tokens were likelier than each of the prompt
  /// Not empty: these tokens' log-probabilities, in this order, are told in place of the likeliest tokens'; -infinity: it could not come.
  std::vector<std::int32_t> logprob_token_ids;
  std::map<std::int32_t, float> logit_bias;
  std::vector<std::int32_t> allowed_token_ids;           ///< only these may be drawn, stop tokens among them too; empty: all
  std::vector<std::vector<std::int32_t>> bad_sequences;  ///< the output never contains one of them; none is empty
  std::shared_ptr<const TokenRule> token_rule;           ///< structured output; null: any token. Of this process only
  std::string extra_json;  ///< object whose members go to servers as they are, below those above; empty: none. Of HTTP clients only
};

enum class FinishReason : std::uint8_t { kNone, kStop, kLength, kAbort, kError };
/// "stop", "length", "abort", "error"; "" for kNone.
std::string to_string(FinishReason reason);

/// Tokens in.
struct GenerateRequest {
  std::vector<std::int32_t> prompt_ids;
  SamplingParams sampling;
  std::string session_id;                           ///< X-Session-ID: the same for all turns of a rollout
  std::map<std::string, std::string> headers = {};  ///< sent along where the request goes over HTTP
  std::string cache_salt;                           ///< namespace of the prefix cache, added to the policy version
  std::int32_t priority = 0;                        ///< lower is earlier
  std::vector<PromptImage> images = {};             ///< of the prompt, ascending
  std::string kv_transfer_params = {};              ///< JSON object for the server (docs/http-api.md); empty: none. Of HTTP clients only
  std::uint64_t kv_key = 0;                         ///< of key-value blocks that were brought for it; 0: none. Of this process only
};

struct TopLogprob {
  std::int32_t id = 0;
  float logprob = 0;
};

/// Tokens out. logprobs[i] is the log-probability of token_ids[i] under the distribution it was drawn from; finite.
struct GenerateOutput {
  std::string request_id;
  std::vector<std::int32_t> token_ids;  ///< the stop token included when finish_reason is kStop by token
  std::vector<float> logprobs;
  std::vector<std::vector<TopLogprob>> top_logprobs;
  std::vector<std::int64_t> versions;  ///< policy version that produced each token
  FinishReason finish_reason = FinishReason::kNone;
  std::optional<std::int32_t> stop_token_id;  ///< the token that ended it
  std::string stop_string;                    ///< the string that ended it
  std::vector<float> prompt_logprobs;         ///< [0] is 0; empty unless asked
  std::vector<std::vector<TopLogprob>> prompt_top_logprobs;
  /// 1 for the likeliest token of its position, [0] is 0; empty unless asked. Equally likely tokens rank by id.
  std::vector<std::int32_t> prompt_ranks;
  /// Of prompt and output but for the last token, which has been in no layer; empty unless asked, with what was drawn last.
  RoutedExperts routed_experts;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_cached_tokens = 0;
  PolicyVersion version_start;
  PolicyVersion version_end;
  /// When its first step was planned; the clock's epoch if it never ran or ran in another process.
  std::chrono::steady_clock::time_point first_step;
  std::string error;  ///< set when finish_reason is kError
  // Of HTTP clients, of requests with kv_transfer_params alone:
  bool needs_prefill = false;      ///< no token was drawn: too much of the prompt would have to be computed
  std::string kv_transfer_params;  ///< of a request that was only prefilled: what the engine that goes on is told
};

}  // namespace prl::wire
