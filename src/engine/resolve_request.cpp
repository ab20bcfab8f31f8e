#include "engine/resolve_request.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "ops/attention.hpp"

namespace prl::engine {
namespace {

void check_range(const char* name, double value, double low, double high) {
  if (!(value >= low && value <= high)) fail(ErrorCode::kInvalidArgument, "{} must be between {} and {}, got {}", name, low, high, value);
}

void check_token_id(const char* name, std::int64_t id, std::int64_t vocab_size) {
  if (id < 0 || id >= vocab_size)
    fail(ErrorCode::kInvalidArgument, "{} holds token id {}, the vocabulary has {} tokens", name, id, vocab_size);
}

void check_sampling(const wire::SamplingParams& s, const nn::ModelConfig& config) {
  check_range("temperature", s.temperature, 0.0, 2.0);
  if (s.temperature > 0.0f && s.temperature < 0.01f) {
    fail(ErrorCode::kInvalidArgument, "temperature must be 0 (greedy) or at least 0.01, got {}: smaller values overflow", s.temperature);
  }
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f)) fail(ErrorCode::kInvalidArgument, "top_p must be in (0, 1], got {}", s.top_p);
  if (s.top_k < -1) fail(ErrorCode::kInvalidArgument, "top_k must be -1 or 0 (all tokens) or positive, got {}", s.top_k);
  check_range("min_p", s.min_p, 0.0, 1.0);
  if (!(s.repetition_penalty > 0.0f && std::isfinite(s.repetition_penalty))) {
    fail(ErrorCode::kInvalidArgument, "repetition_penalty must be positive, got {}", s.repetition_penalty);
  }
  check_range("presence_penalty", s.presence_penalty, -2.0, 2.0);
  check_range("frequency_penalty", s.frequency_penalty, -2.0, 2.0);
  if (s.max_tokens && *s.max_tokens < 1) fail(ErrorCode::kInvalidArgument, "max_tokens must be at least 1, got {}", *s.max_tokens);
  if (s.min_tokens < 0) fail(ErrorCode::kInvalidArgument, "min_tokens must not be negative, got {}", s.min_tokens);
  if (s.max_tokens && s.min_tokens > *s.max_tokens) {
    fail(ErrorCode::kInvalidArgument, "min_tokens ({}) must not be greater than max_tokens ({})", s.min_tokens, *s.max_tokens);
  }
  if (s.n != 1) fail(ErrorCode::kInvalidArgument, "n must be 1, got {}: each choice is a request of its own", s.n);
  if (s.logprobs) check_range("logprobs", *s.logprobs, 0, kMaxTopLogprobs);
  if (s.prompt_logprobs) check_range("prompt_logprobs", *s.prompt_logprobs, 0, kMaxTopLogprobs);
  if (s.logprob_token_ids.size() > kMaxNamedLogprobs)
    fail(ErrorCode::kInvalidArgument, "logprob_token_ids has {} entries, at most {} are allowed", s.logprob_token_ids.size(),
         kMaxNamedLogprobs);
  for (const std::int32_t id : s.logprob_token_ids) check_token_id("logprob_token_ids", id, config.vocab_size);
  if (s.stop_token_ids.size() > kMaxStopTokens) {
    fail(ErrorCode::kInvalidArgument, "stop_token_ids has {} entries, at most {} are allowed", s.stop_token_ids.size(), kMaxStopTokens);
  }
  for (const std::int32_t id : s.stop_token_ids) check_token_id("stop_token_ids", id, config.vocab_size);
  for (const std::int32_t id : s.allowed_token_ids) check_token_id("allowed_token_ids", id, config.vocab_size);
  if (s.bad_sequences.size() > kMaxBadSequences)
    fail(ErrorCode::kInvalidArgument, "bad_words makes {} token sequences, at most {} are allowed", s.bad_sequences.size(),
         kMaxBadSequences);
  for (const auto& sequence : s.bad_sequences) {
    if (sequence.empty()) fail(ErrorCode::kInvalidArgument, "bad_words holds a word without tokens");
    for (const std::int32_t id : sequence) check_token_id("bad_words", id, config.vocab_size);
  }
  for (const auto& [id, bias] : s.logit_bias) {
    check_token_id("logit_bias", id, config.vocab_size);
    check_range("logit_bias", bias, -100.0, 100.0);
  }
}

/// Something can always be drawn: a token that is allowed, no bad word by itself, and no stop token before min_tokens.
void check_allowed_tokens(const ResolvedRequest& resolved) {
  const wire::SamplingParams& s = resolved.sampling;
  if (s.allowed_token_ids.empty()) return;
  if (s.token_rule) fail(ErrorCode::kInvalidArgument, "allowed_token_ids cannot be combined with structured output or a thinking budget");
  const bool any_open = std::any_of(s.allowed_token_ids.begin(), s.allowed_token_ids.end(), [&](std::int32_t id) {
    const bool is_stop = std::binary_search(resolved.stop_ids.begin(), resolved.stop_ids.end(), id);
    const auto is_bad = [&](const auto& sequence) { return sequence.back() == id; };
    return !(is_stop && s.min_tokens > 0) && std::none_of(s.bad_sequences.begin(), s.bad_sequences.end(), is_bad);
  });
  if (!any_open)
    fail(ErrorCode::kInvalidArgument, "allowed_token_ids: bad_words or min_tokens exclude every one of the {} tokens",
         s.allowed_token_ids.size());
}

/// Images stand apart, within the prompt, on as many placeholders as they have tokens.
void check_prompt_images(const wire::GenerateRequest& request, const nn::ModelConfig& config) {
  if (request.images.empty()) return;
  if (!config.vision) fail(ErrorCode::kInvalidArgument, "images: this model has no vision tower; send text alone");
  const nn::VisionConfig& vision = *config.vision;
  const auto num_tokens = static_cast<std::int64_t>(request.prompt_ids.size());
  const std::int64_t side = vision.patch_size * vision.merge_size;
  std::int64_t end = 0;
  for (const wire::PromptImage& image : request.images) {
    if (image.pixels == nullptr || image.rows < 1 || image.cols < 1 || image.pixels->height != image.rows * side ||
        image.pixels->width != image.cols * side)
      fail(ErrorCode::kInvalidArgument, "images: a grid of {} x {} tokens does not fit its picture; each token is {} x {} pixels",
           image.rows, image.cols, side, side);
    if (image.first < end || image.end() > num_tokens)
      fail(ErrorCode::kInvalidArgument, "images: one of {} tokens at token {} does not fit the prompt of {}", image.num_tokens(),
           image.first, num_tokens);
    for (std::int64_t token = image.first; token < image.end(); ++token)
      if (const std::int32_t id = request.prompt_ids[static_cast<std::size_t>(token)]; id != vision.image_token_id)
        fail(ErrorCode::kInvalidArgument, "images: token {} of the prompt is id {}, wanted the placeholder {}", token, id,
             vision.image_token_id);
    end = image.end();
  }
}

void check_drafts(const DraftOptions& drafts) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
      fail(ErrorCode::kInvalidArgument, "speculative.{} must be between {} and {}, got {}", name, low, high, value);
  };
  check("num_tokens", drafts.num_tokens, 0, DraftOptions::kMostTokens);
  if (drafts.num_tokens == 0) return;
  check("max_ngram", drafts.max_ngram, 1, DraftOptions::kMostNgram);
  check("min_ngram", drafts.min_ngram, 1, drafts.max_ngram);
  check("max_stored_tokens", drafts.max_stored_tokens, 0, std::int64_t{1} << 40);
}

}  // namespace

ResolvedRequest resolve_request(wire::GenerateRequest request, const EngineOptions& options, const nn::ModelConfig& config) {
  const auto num_prompt_tokens = static_cast<std::int64_t>(request.prompt_ids.size());
  if (num_prompt_tokens == 0) fail(ErrorCode::kInvalidArgument, "the prompt is empty; at least one token is needed");
  // At least one token must fit behind the prompt. Clients recognise this sentence, so its wording is fixed.
  if (num_prompt_tokens >= options.max_model_len) {
    fail(ErrorCode::kOverlong,
         "This model's maximum context length is {} tokens. However, your request has {} input tokens. Please reduce the length of the "
         "input messages.",
         options.max_model_len, num_prompt_tokens);
  }
  for (const std::int32_t id : request.prompt_ids) check_token_id("the prompt", id, config.vocab_size);
  check_sampling(request.sampling, config);
  check_prompt_images(request, config);
  if (const auto& start = request.sampling.routed_experts_start; start) {
    if (!options.logs_routes || config.num_experts == 0)
      fail(ErrorCode::kInvalidArgument, "routed_experts: {}",
           config.num_experts == 0 ? "the model has no experts" : "this engine was not started with enable_return_routed_experts");
    if (*start < 0 || *start > num_prompt_tokens)
      fail(ErrorCode::kInvalidArgument, "routed_experts_prompt_start must be between 0 and the {} tokens of the prompt, got {}",
           num_prompt_tokens, *start);
  }

  ResolvedRequest resolved;
  resolved.prompt_ids = std::move(request.prompt_ids);
  resolved.images = std::move(request.images);
  resolved.sampling = std::move(request.sampling);
  const wire::SamplingParams& s = resolved.sampling;
  resolved.max_new_tokens = options.max_model_len - num_prompt_tokens;
  if (s.max_tokens) resolved.max_new_tokens = std::min<std::int64_t>(resolved.max_new_tokens, *s.max_tokens);
  resolved.stop_ids = s.stop_token_ids;
  if (!s.ignore_eos) resolved.stop_ids.insert(resolved.stop_ids.end(), config.eos_ids.begin(), config.eos_ids.end());
  std::sort(resolved.stop_ids.begin(), resolved.stop_ids.end());
  resolved.stop_ids.erase(std::unique(resolved.stop_ids.begin(), resolved.stop_ids.end()), resolved.stop_ids.end());
  std::erase_if(resolved.stop_ids, [&](std::int32_t id) { return id < 0 || id >= config.vocab_size; });
  if (s.token_rule && s.token_rule->needs_stop_tokens() && resolved.stop_ids.empty())
    fail(ErrorCode::kInvalidArgument, "ignore_eos: structured output ends with a stop token, and this request has none");
  if (s.token_rule && s.token_rule->needs_stop_tokens() && s.min_tokens > 0)
    fail(ErrorCode::kInvalidArgument, "min_tokens: structured output decides when it may end; found {}", s.min_tokens);
  check_allowed_tokens(resolved);
  resolved.seed = s.seed.value_or(0);
  resolved.cache_salt = std::move(request.cache_salt);
  resolved.priority = request.priority;
  resolved.kv_key = request.kv_key;
  const bool has_penalties = s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
  resolved.edits_logits =
      has_penalties || !s.logit_bias.empty() || !s.allowed_token_ids.empty() || !s.bad_sequences.empty() || s.token_rule != nullptr;
  const auto looks_back = [](const auto& sequence) { return sequence.size() > 1; };
  resolved.needs_every_token = s.token_rule != nullptr || std::any_of(s.bad_sequences.begin(), s.bad_sequences.end(), looks_back);
  // Experts are told of all tokens that are computed, and a stop string ends a text among them.
  const bool may_end_before = !s.stop.empty() && s.routed_experts_start.has_value();
  resolved.may_draft = resolved.max_new_tokens > 1 && !has_penalties && !resolved.needs_every_token && !may_end_before;
  return resolved;
}

void check_head(const nn::Weights& weights) {
  if (weights.mtp == nullptr)
    fail(
        ErrorCode::kInvalidArgument,
        "speculative.method is mtp: wanted a model with a head for multi-token prediction ('mtp.*' tensors, or a layer behind the last one "
        "that key 'num_nextn_predict_layers' names), found a {} model without one that this build computes",
        weights.config.model_type);
}

void check_draft_model(const nn::ModelConfig& drafts, const nn::ModelConfig& model) {
  if (drafts.vocab_size != model.vocab_size)
    fail(ErrorCode::kInvalidArgument, "speculative.draft_model: wanted a model of {} tokens as the model's vocabulary has, found {}",
         model.vocab_size, drafts.vocab_size);
  if (!drafts.linear.layers.empty())
    fail(ErrorCode::kNotImplemented,
         "speculative.draft_model: a {} model has linear attention, whose states would have to go back to before drafts that failed; "
         "choose a "
         "model without",
         drafts.model_type);
}

void check_options(const EngineOptions& options, const nn::ModelConfig& config) {
  const auto check_positive = [](const char* name, std::int64_t value) {
    if (value < 1) fail(ErrorCode::kInvalidArgument, "{} must be at least 1, got {}", name, value);
  };
  check_positive("block_size", options.block_size);
  check_positive("num_blocks", options.num_blocks);
  check_positive("max_num_seqs", options.max_num_seqs);
  check_positive("max_num_batched_tokens", options.max_num_batched_tokens);
  if (options.max_model_len < 2)
    fail(ErrorCode::kInvalidArgument, "max_model_len must be at least 2 (a prompt token and a new one), got {}", options.max_model_len);
  if (options.num_host_blocks < 0)
    fail(ErrorCode::kInvalidArgument, "num_host_blocks must not be negative, got {}", options.num_host_blocks);
  if (options.num_host_blocks > 0 && !options.enable_prefix_caching)
    fail(ErrorCode::kInvalidArgument, "num_host_blocks is {} without enable_prefix_caching: no block could be found again",
         options.num_host_blocks);
  if (options.num_host_blocks > 0 && !config.linear.layers.empty())
    fail(ErrorCode::kNotImplemented, "num_host_blocks is {}, and a {} model has linear attention, for which no prefix is kept",
         options.num_host_blocks, config.model_type);
  if (options.num_disk_blocks < 0 || (options.num_disk_blocks > 0 && options.num_host_blocks == 0))
    fail(ErrorCode::kInvalidArgument, "num_disk_blocks is {} with num_host_blocks {}: files hold what host memory has no room for",
         options.num_disk_blocks, options.num_host_blocks);
  if (options.num_state_snapshots < 0)
    fail(ErrorCode::kInvalidArgument, "num_state_snapshots must not be negative, got {}", options.num_state_snapshots);
  check_drafts(options.drafts);
  if (options.max_queued_requests < 0)
    fail(ErrorCode::kInvalidArgument, "max_queued_requests must not be negative, got {}", options.max_queued_requests);
  if (options.max_model_len > config.max_position) {
    fail(ErrorCode::kInvalidArgument,
         "max_model_len is {}, but the model has positions for {} tokens (max_position_embeddings); lower max_model_len",
         options.max_model_len, config.max_position);
  }
  if (options.block_size % ops::kAttentionTile != 0 && ops::kAttentionTile % options.block_size != 0) {
    fail(ErrorCode::kInvalidArgument, "block_size must divide {} or be a multiple of it, got {}", ops::kAttentionTile, options.block_size);
  }
  if (!options.enable_chunked_prefill && options.max_num_batched_tokens < options.max_model_len) {
    fail(ErrorCode::kInvalidArgument,
         "max_num_batched_tokens is {} and max_model_len {}: without chunked prefill a whole prompt must fit one step; raise the budget or "
         "set enable_chunked_prefill",
         options.max_num_batched_tokens, options.max_model_len);
  }
}

}  // namespace prl::engine
