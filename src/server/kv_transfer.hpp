#pragma once

#include <memory>
#include <string>

#include "server/json_fields.hpp"
#include "server/prepared_request.hpp"
#include "server/server_context.hpp"

namespace prl::server {

/// kv_transfer_params of a body. 400 naming the member, also if this server exchanges no blocks.
KvTransferOrder read_kv_order(const JsonFields& fields, const ServerContext& context);

/// Makes a request that has only to be prefilled one of the shortest completion.
void shorten_to_prefill(PreparedRequest& request);

/// Answers 412 if more of the prompt has to be computed here than the request wants. The request is prepared.
net::asio::awaitable<void> check_uncached(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request);

/// Blocks that were brought for a request, until it is queued.
class BroughtBlocks {
 public:
  BroughtBlocks() = default;
  BroughtBlocks(transfer::KvGate* gate, std::uint64_t key) : gate_(gate), key_(key) {}
  BroughtBlocks(BroughtBlocks&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)), key_(other.key_) {}
  BroughtBlocks& operator=(BroughtBlocks&&) = delete;
  ~BroughtBlocks() {
    if (gate_ != nullptr && key_ != 0) gate_->end(key_);
  }
  std::uint64_t key() const noexcept { return gate_ != nullptr ? key_ : 0; }

 private:
  transfer::KvGate* gate_ = nullptr;
  std::uint64_t key_ = 0;
};

/// Brings what this engine lacks of the prompt, if the request says from where. What does not come is computed here.
net::asio::awaitable<BroughtBlocks> bring_blocks(std::shared_ptr<ServerContext> context, std::shared_ptr<const PreparedRequest> request);

/// The reply to a request that was only prefilled: where a decode engine finds the blocks.
std::string prefill_reply(const ServerContext& context, const PreparedRequest& request, std::int64_t num_cached_tokens);

}  // namespace prl::server
