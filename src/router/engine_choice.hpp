#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "router/sent_prefixes.hpp"

namespace prl::router {

/// Which engine a request goes to, of those with room.
enum class Spread {
  kSessions,    ///< rules 1 to 3 of Router
  kTurns,       ///< the next in turn, whatever its session
  kRandom,      ///< any, all equally likely
  kTwoChoices,  ///< two that are drawn: the one with fewer requests in flight
  kPrefixes,    ///< the one that was sent the longest part of the prompt before (PrefixSpread)
};

/// Of Spread::kPrefixes.
struct PrefixSpread {
  double threshold = 0.3;              ///< an engine counts as having a prompt's prefix if it was sent more than this part of the prompt
  std::int64_t max_difference = 64;    ///< requests in flight by which engines may differ ...
  double max_ratio = 1.5;              ///< ... or their ratio; where both are exceeded, prefixes do not count
  std::int64_t max_bytes = 1ll << 26;  ///< of prompts that are remembered, for each engine
};

struct EngineLoad {
  std::int64_t num_requests = 0;  ///< in flight
  std::int64_t num_tokens = 0;    ///< that these are expected to hold in the end
  std::int64_t num_finished = 0;
  std::int64_t num_sent_bytes = 0;  ///< of prompts, that Spread::kPrefixes remembers
  bool is_ready = false;
};

/// The choice among engines that could all run a request. Decides nothing about who may wait for whom: that is Router's.
class EngineChoice {
 public:
  struct Candidate {
    std::int64_t id = 0;
    const EngineLoad* load = nullptr;
    const SentPrefixes* sent = nullptr;
  };
  EngineChoice(Spread spread, PrefixSpread prefixes, std::uint64_t seed) : spread_(spread), prefixes_(prefixes), random_(seed) {}

  /// `candidates`: one at least, in the order of their ids, of `ready`, the engines that answer. `home`: the engine of the request's
  /// session.
  std::int64_t choose(const std::vector<Candidate>& candidates, const std::vector<Candidate>& ready, const PrefixHashes& prompt,
                      std::optional<std::int64_t> home);
  /// Of Spread::kPrefixes: the engine that has computed the prompt's beginning, if there is one.
  std::optional<std::int64_t> with_prefix(const std::vector<Candidate>& candidates, const PrefixHashes& prompt,
                                          std::optional<std::int64_t> home) const;
  /// Of Spread::kPrefixes: prefixes do not count for now.
  bool is_imbalanced(const std::vector<Candidate>& ready) const;
  /// The engine was given a request.
  void note(std::int64_t engine) noexcept { last_turn_ = engine; }

 private:
  std::int64_t draw(const std::vector<Candidate>& candidates);

  Spread spread_;
  PrefixSpread prefixes_;
  std::mt19937_64 random_;
  std::int64_t last_turn_ = -1;  ///< engine that was given the newest request
};

}  // namespace prl::router
