#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/kv_desk.hpp"
#include "transfer/kv_link.hpp"
#include "transfer/kv_server.hpp"

namespace prl::transfer {

/// Where another engine's blocks are to be had. What a prefill engine tells of itself is signed with the key that engines share, so that
/// nobody else can send a decode engine elsewhere.
struct KvPlace {
  std::string host;
  int port = 0;
  std::string signature;
};

struct KvGateOptions {
  KvServerOptions server;
  std::string own_host;                              ///< by which other engines reach this one
  std::chrono::milliseconds timeout{30'000};         ///< of one transfer, all of it
  std::size_t chunk_bytes = std::size_t{128} << 20;  ///< asked for at one time, one block at least
  std::size_t max_idle_links = 4;                    ///< kept of each other engine
};

struct KvGateStats {
  std::int64_t num_transfers = 0;  ///< that brought blocks
  std::int64_t num_fallbacks = 0;  ///< that failed or were late: the engine computed the rest itself
  std::int64_t num_blocks = 0, num_bytes = 0;
  double seconds = 0;  ///< of all transfers
  std::int64_t num_blocks_given = 0, num_bytes_given = 0;
};

/// An engine's share in the traffic of blocks: gives its own, and brings those of others. Any thread.
class KvGate {
 public:
  /// Error{kNotImplemented} if the engine exchanges no blocks, {kIo} naming the port. The engine outlives it.
  KvGate(engine::Engine& engine, KvGateOptions options);

  KvPlace own_place() const;
  /// Tells `done` on the engine's thread how many tokens of the prompt the engine would have to compute, -1 if it cannot say. Does not
  /// wait.
  void find_uncached(engine::PromptPtr prompt, const std::string& adapter, std::function<void(std::int64_t)> done);
  /// Blocks the caller until it is done. Brings what the engine lacks of the prompt's whole blocks. The key that the request is to carry
  /// (GenerateRequest::kv_key); end() it when the request is queued, or when there is none. 0: nothing was brought. Never throws for what
  /// another engine does: what did not come is computed here. Error{kUnauthorized} if the place is not signed with the engines' key.
  engine::KvDesk::Key bring(engine::PromptPtr prompt, const std::string& adapter, const KvPlace& place);
  void end(engine::KvDesk::Key key) noexcept { desk_.end(key); }

  KvGateStats stats() const;
  int port() const noexcept { return server_.port(); }

 private:
  /// nullptr: there is no idle one.
  std::unique_ptr<KvLink> take_idle(const KvPlace& place);
  std::unique_ptr<KvLink> connect(const KvPlace& place, Clock::time_point deadline) const;
  /// As KvLink::pull, over an idle link or a new one, which is put in `link`.
  std::int64_t pull(std::unique_ptr<KvLink>& link, const KvPlace& place, const Ask& ask, std::span<const engine::BlockParts> into,
                    Clock::time_point deadline);
  void keep_link(const KvPlace& place, std::unique_ptr<KvLink> link);
  /// Blocks that were brought.
  std::int64_t bring_all(engine::KvDesk::Key key, const engine::PromptPtr& prompt, const engine::KvDesk::Standing& standing,
                         const KvPlace& place, Clock::time_point deadline);
  /// Why a prompt is computed here, at most once a minute as a warning. With mutex_ held.
  void tell(const std::string& problem);

  engine::KvDesk desk_;
  const KvGateOptions options_;
  KvServer server_;
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<KvLink>>> idle_;  ///< guarded; by "host:port"
  KvGateStats stats_;                                                 ///< guarded
  Clock::time_point quiet_until_{};                                   ///< guarded; no warnings before
  std::int64_t num_untold_ = 0;                                       ///< guarded; since the last one
};

}  // namespace prl::transfer
