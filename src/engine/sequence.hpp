#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "engine/draft_source.hpp"
#include "engine/served_adapter.hpp"
#include "engine/tenant.hpp"
#include "ops/logit_edits.hpp"
#include "wire/generate.hpp"
#include "wire/slow_token_rule.hpp"

namespace prl::engine {

/// What one request asks for, checked and completed from the engine's limits.
struct ResolvedRequest {
  std::vector<std::int32_t> prompt_ids;
  std::vector<wire::PromptImage> images;  ///< ascending
  wire::SamplingParams sampling;          ///< temperature, penalties, ... all in range
  std::vector<std::int32_t> stop_ids;     ///< sorted; end of sequence included unless ignore_eos
  std::int64_t max_new_tokens = 0;        ///< clamped to the room behind the prompt
  std::uint64_t seed = 0;
  std::string cache_salt;
  AdapterKey adapter;                     ///< of the prefix cache, unless `served` says it
  std::shared_ptr<ServedAdapter> served;  ///< nullptr: the model as it is

  AdapterKey adapter_key() const noexcept { return served != nullptr ? served->key() : adapter; }
  std::int32_t priority = 0;
  std::uint64_t kv_key = 0;   ///< BlockExchange's, of what was brought for it; 0: nothing
  bool edits_logits = false;  ///< penalties, bias, bad sequences or a token rule change the logits before sampling
  /// Which tokens may come depends on each one before: the next step cannot be queued before this one's token is known.
  bool needs_every_token = false;
  bool may_draft = true;  ///< tokens may be drawn behind guesses: what may come depends on no token but through the logits
};

/// Which tokens a sequence has, for penalties: it follows the sequence, whose tokens only grow.
struct SeenTokens {
  std::vector<ops::LogitEdits::Seen> by_id;
  std::int64_t num_tokens = 0;  ///< of the sequence, that are counted or left out
};

/// How far a draft model has read a sequence (DraftModel).
struct DraftReading {
  std::int64_t admission = -1;   ///< Sequence::num_preemptions at that time: later its blocks are others
  std::int64_t num_tokens = 0;   ///< in the model's cache, from the first on
  std::int64_t num_blocks = 0;   ///< full blocks of these that are remembered,
  BlockHash hash = {};           ///< and the hash of the tokens in them
  std::int64_t num_guesses = 0;  ///< drafts behind these tokens that are in the cache, and good if they came true
  DraftTokens guesses = {};
};

enum class SequenceState : std::uint8_t { kWaiting, kRunning, kFinished };

/// One stream of tokens of a request: its prompt, what was drawn so far, and how much of it is in the KV cache.
///
/// There is no prefill and no decode phase: num_tokens_computed chases tokens.size(), and when a step closes the gap the
/// next token is drawn. The newest token is therefore never in the cache.
struct Sequence {
  RequestId request_id;
  std::uint64_t arrival = 0;                 ///< first come, first served among equal priorities
  const ResolvedRequest* request = nullptr;  ///< outlives the sequence
  TenantPtr tenant;                          ///< nullptr: that of requests that belong to nobody in particular
  void* owner = nullptr;                     ///< for the caller of the scheduler; never read by it
  std::uint64_t seed = 0;
  std::chrono::steady_clock::time_point first_step;  ///< when its first step was planned

  std::vector<std::int32_t> tokens;  ///< prompt, then output
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_tokens_computed = 0;
  std::vector<BlockLease> blocks;
  std::int32_t state_slot = -1;        ///< of models with linear attention; -1 unless it runs
  std::int32_t former_slot = -1;       ///< of the state before the last step with drafts; -1: there was none
  std::optional<BlockHash> last_kept;  ///< behind which of its blocks, after the prompt, its state was copied last

  SequenceState state = SequenceState::kWaiting;
  int num_steps_under_way = 0;          ///< that name the sequence
  std::int64_t num_cached_tokens = -1;  ///< prefix hits at the first admission; -1 before it
  std::int64_t num_preemptions = 0;

  std::uint64_t kv_epoch = 0;  ///< epoch at admission: the cache may publish blocks only while it lasts
  std::int64_t num_hashed_blocks = 0;
  BlockHash last_hash;               ///< of block num_hashed_blocks - 1, or the root
  AdapterKey kv_adapter;             ///< at admission: what was cached with another version of the adapter is not published
  double charge = 0;                 ///< tokens that its tenant was charged at its admission
  std::int64_t charge_begin = 0;     ///< num_tokens_computed then
  std::int32_t num_passed_over = 0;  ///< times that others were admitted before it, for the sake of their adapters

  std::vector<float> prompt_logprobs;  ///< [0] is 0; grows with the prompt's progress; empty unless asked for
  std::vector<std::vector<wire::TopLogprob>> prompt_top_logprobs;
  std::vector<std::int32_t> prompt_ranks;
  PolicyVersion version_first, version_last;           ///< of the first and last output token
  wire::TokenRuleCursor rule_cursor;                   ///< memo of sampling.token_rule
  std::shared_ptr<wire::TokenRuleAnswer> rule_answer;  ///< asked for, if the rule is a slow one: of the tokens as they are now
  SeenTokens seen;                                     ///< memo of the sampler
  DraftCursor draft;                                   ///< what the scheduler guesses of its next tokens; open from its first token on
  DraftReading draft_reading;                          ///< memo of the draft model

  std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t num_output_tokens() const noexcept { return num_tokens() - num_prompt_tokens; }
  std::span<const std::int32_t> output() const noexcept { return std::span(tokens).subspan(static_cast<std::size_t>(num_prompt_tokens)); }
  bool wants_prompt_logprobs() const noexcept {
    return request->sampling.prompt_logprobs.has_value() && static_cast<std::int64_t>(prompt_logprobs.size()) < num_prompt_tokens;
  }
};

/// True if `a` is served before `b`: lower priority value, then earlier arrival.
inline bool is_before(const Sequence& a, const Sequence& b) noexcept {
  if (a.request->priority != b.request->priority) return a.request->priority < b.request->priority;
  return a.arrival < b.arrival;
}
inline bool comes_before(const Sequence* a, const Sequence* b) noexcept { return is_before(*a, *b); }

}  // namespace prl::engine
