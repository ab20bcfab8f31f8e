#include "launch/routing.hpp"

namespace prl::launch {
namespace {

router::Spread spread_of(config::RouterPolicy policy) {
  switch (policy) {
    case config::RouterPolicy::kConsistentHash: return router::Spread::kSessions;
    case config::RouterPolicy::kRoundRobin: return router::Spread::kTurns;
    case config::RouterPolicy::kRandom: return router::Spread::kRandom;
    case config::RouterPolicy::kCacheAware: return router::Spread::kPrefixes;
    case config::RouterPolicy::kPowerOfTwo: return router::Spread::kTwoChoices;
  }
  return router::Spread::kSessions;
}

}  // namespace

router::RouterOptions router_options(const config::RoutingConfig& config) {
  router::RouterOptions options;
  options.spread = spread_of(config.policy);
  options.prefixes = {.threshold = config.cache_threshold,
                      .max_difference = config.balance_abs_threshold,
                      .max_ratio = config.balance_rel_threshold,
                      .max_bytes = config.max_tree_size};
  return options;
}

}  // namespace prl::launch
