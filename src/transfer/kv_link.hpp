#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "engine/block_exchange.hpp"
#include "transfer/frames.hpp"

namespace prl::transfer {

/// A way to another engine, over which blocks of prompts come. One thread at a time.
class KvLink {
 public:
  virtual ~KvLink() = default;
  /// Fills the first of `into` with blocks of the prompt from ask.first on, and returns how many: fewer if the other side has no more.
  /// After an error the link is of no more use and what was written to `into` means nothing.
  /// Errors  {kUnavailable}: the other side is gone or refuses; {kDeadline}; {kCorrupt}: damaged bytes.
  virtual std::int64_t pull(const Ask& ask, std::span<const engine::BlockParts> into, Clock::time_point deadline) = 0;
};

/// Who must agree before blocks are sent.
struct LinkOptions {
  std::string key;     ///< that both sides know; it is not sent
  std::string layout;  ///< KvDesk::layout()
  std::int64_t block_size = 0;
};
/// "tcp": frames.hpp. Error as pull(), and {kInvalidArgument} if the layouts differ.
std::unique_ptr<KvLink> connect_tcp(const std::string& host, int port, LinkOptions options, Clock::time_point deadline);

}  // namespace prl::transfer
