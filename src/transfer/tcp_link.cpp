#include <utility>

#include "base/error.hpp"
#include "transfer/kv_link.hpp"

namespace prl::transfer {
namespace {

class TcpLink final : public KvLink {
 public:
  TcpLink(Socket socket, LinkOptions options) : socket_(std::move(socket)), options_(std::move(options)) {}

  void shake_hands(Clock::time_point deadline) {
    const std::string theirs = receive_frame(socket_, FrameKind::kHello, kNonceBytes, deadline);
    const std::string own = make_nonce();
    send_frame(socket_, FrameKind::kProof, keyed_hash(options_.key, "taker" + theirs) + own + options_.layout, deadline);
    const std::string answer = receive_frame(socket_, FrameKind::kWelcome, 64, deadline);
    if (!is_same(answer, keyed_hash(options_.key, "giver" + own)))
      fail(ErrorCode::kUnavailable, "[kv transfer] {} does not know the key of kv_transfer", socket_.name());
  }

  std::int64_t pull(const Ask& ask, std::span<const engine::BlockParts> into, Clock::time_point deadline) override {
    send_frame(socket_, FrameKind::kAsk, encode(ask), deadline);
    const std::uint64_t count = decode_number(receive_frame(socket_, FrameKind::kBlocks, sizeof(std::uint64_t), deadline));
    if (count > into.size())
      fail(ErrorCode::kCorrupt, "[kv transfer] {} sends {} blocks, {} were asked for", socket_.name(), count, into.size());
    const auto seeds = place_seeds(ask, options_.block_size, static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) receive_into(socket_, FrameKind::kBlock, into[i], seeds[i], deadline);
    return static_cast<std::int64_t>(count);
  }

 private:
  Socket socket_;
  LinkOptions options_;
};

}  // namespace

std::unique_ptr<KvLink> connect_tcp(const std::string& host, int port, LinkOptions options, Clock::time_point deadline) {
  auto link = std::make_unique<TcpLink>(Socket::connect(host, port, deadline), std::move(options));
  link->shake_hands(deadline);
  return link;
}

}  // namespace prl::transfer
