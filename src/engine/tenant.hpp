#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

namespace prl::engine {

struct Sequence;

enum class TenantState : std::uint8_t {
  kOpen,
  kPaused,    ///< its requests are kept and not computed
  kDraining,  ///< new requests are refused; those there come to their end
};

struct TenantOptions {
  double weight = 1;                      ///< of its tokens while others wait too; above 0
  std::int64_t max_tokens_in_flight = 0;  ///< of its running requests: prompts and all they may write. 0: no limit
  TenantState state = TenantState::kOpen;
};

/// One of several that share an engine: the requests of one adapter, or all that belong to nobody in particular. The engine's thread.
struct Tenant {
  std::string name;  ///< empty: of requests that belong to nobody in particular
  TenantOptions options;

  std::int64_t num_running = 0, num_waiting = 0;
  std::int64_t num_tokens_in_flight = 0;   ///< as max_tokens_in_flight counts
  std::int64_t num_tokens = 0;             ///< that were computed, prompts and output
  std::int64_t num_generation_tokens = 0;  ///< of them output

  // WaitingLine's own.
  std::deque<Sequence*> waiting;  ///< sorted by is_before
  std::size_t next = 0;           ///< of waiting, in this round
  double service = 0;             ///< tokens over weight: whoever has had the least is next
  double mean_output = 0;         ///< tokens that its latest requests wrote; what the next one is expected to write
  std::int64_t num_ended = 0;
};
using TenantPtr = std::shared_ptr<Tenant>;

/// What an engine says of a tenant.
struct TenantStats {
  std::string name;
  TenantOptions options;
  std::int64_t num_running = 0, num_waiting = 0;
  std::int64_t num_tokens_in_flight = 0, num_tokens = 0, num_generation_tokens = 0;
};

}  // namespace prl::engine
