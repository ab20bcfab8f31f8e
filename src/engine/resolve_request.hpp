#pragma once

#include "engine/engine.hpp"
#include "engine/sequence.hpp"
#include "nn/model_config.hpp"

namespace prl::engine {

/// Most alternatives per token (OpenAI's limit).
inline constexpr std::int32_t kMaxTopLogprobs = 20;
inline constexpr std::size_t kMaxNamedLogprobs = 128;
/// Most stop token ids per request.
inline constexpr std::size_t kMaxStopTokens = 1024;

/// Most token sequences that bad_words may make.
inline constexpr std::size_t kMaxBadSequences = 1024;

/// Checks every field and fills in what the engine decides, but for the seed of a request that has none.
/// Error{kInvalidArgument} names the field, its range and the value; Error{kOverlong} is the text that clients look for.
ResolvedRequest resolve_request(wire::GenerateRequest request, const EngineOptions& options, const nn::ModelConfig& config);
/// Whether these weights have a head for multi-token prediction that may draw drafts. Error{kInvalidArgument} or {kNotImplemented} says why
/// not.
void check_head(const nn::Weights& weights);
/// Whether the one may draw drafts for the other. Error{kInvalidArgument} or {kNotImplemented} says why not.
void check_draft_model(const nn::ModelConfig& drafts, const nn::ModelConfig& model);
/// Error{kInvalidArgument} names the option.
void check_options(const EngineOptions& options, const nn::ModelConfig& config);

}  // namespace prl::engine
