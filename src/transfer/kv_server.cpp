#include "transfer/kv_server.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::transfer {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kDigestText = 64;  ///< a SHA-256 in hex
constexpr auto kPollTime = 200ms;

/// What a taker says of itself; throws Error{kUnauthorized} or {kInvalidArgument} with a text that it is told.
void check_proof(const std::string& body, const std::string& nonce, const KvServerOptions& options, const std::string& layout) {
  if (body.size() < kDigestText + kNonceBytes ||
      !is_same(std::string_view(body).substr(0, kDigestText), keyed_hash(options.key, "taker" + nonce)))
    fail(ErrorCode::kUnauthorized, "the key of kv_transfer is wrong");
  const std::string theirs = body.substr(kDigestText + kNonceBytes);
  if (theirs != layout) fail(ErrorCode::kInvalidArgument, "blocks differ: here {}; there {}", layout, theirs);
}

}  // namespace

KvServer::KvServer(engine::KvDesk& desk, KvServerOptions options)
    : desk_(desk), options_(std::move(options)), listener_(options_.host, options_.port), thread_([this] { accept_all(); }) {}

KvServer::~KvServer() {
  is_stopping_ = true;
  listener_.stop();
  thread_.join();
  {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) connection.socket.stop();
  }
  for (Connection& connection : connections_) connection.thread.join();
}

void KvServer::accept_all() {
  while (!is_stopping_) {
    std::string peer = "a taker of blocks";
    Fd fd = listener_.accept(Clock::now() + kPollTime, &peer);
    sweep();
    if (!fd.is_open()) continue;
    const std::lock_guard lock(mutex_);
    if (connections_.size() >= options_.max_connections) {
      log::warning("[kv transfer] {} is turned away: {} connections are the limit", peer, connections_.size());
      continue;
    }
    Connection& connection = connections_.emplace_back(Socket(std::move(fd), peer), std::thread());
    connection.thread = std::thread([this, &connection] { serve(connection); });
  }
}

void KvServer::sweep() {
  const std::lock_guard lock(mutex_);
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (!it->has_ended) {
      ++it;
      continue;
    }
    it->thread.join();
    it = connections_.erase(it);
  }
}

void KvServer::serve(Connection& connection) {
  Socket& socket = connection.socket;
  try {
    const auto limit = [this] { return Clock::now() + options_.timeout; };
    const std::string nonce = make_nonce();
    send_frame(socket, FrameKind::kHello, nonce, limit());
    const std::string proof = receive_frame(socket, FrameKind::kProof, kMaxTextBytes, limit());
    try {
      check_proof(proof, nonce, options_, desk_.layout());
    } catch (const Error& error) {
      send_frame(socket, FrameKind::kRefusal, std::string_view(error.what()).substr(0, kMaxTextBytes), limit());
      throw;
    }
    send_frame(socket, FrameKind::kWelcome, keyed_hash(options_.key, "giver" + proof.substr(kDigestText, kNonceBytes)), limit());
    while (!is_stopping_) {
      const auto idle_until = Clock::now() + options_.idle_time;
      if (!socket.wait_readable(idle_until)) break;
      answer(socket, decode_ask(receive_frame(socket, FrameKind::kAsk, kMaxBodyBytes, limit())));
    }
  } catch (const std::exception& error) {
    if (!is_stopping_) log::debug("a connection for key-value blocks has ended: {}", error.what());
  }
  socket.stop();
  connection.has_ended = true;
}

void KvServer::answer(Socket& socket, Ask ask) {
  const auto deadline = Clock::now() + options_.timeout;
  const auto prompt = std::make_shared<const engine::PromptKey>(std::move(ask.prompt));
  const auto most = std::max<std::int64_t>(1, static_cast<std::int64_t>(options_.max_bytes / desk_.block_bytes()));
  const engine::KvDesk::Key key = desk_.make_key();
  struct End {
    engine::KvDesk& desk;
    engine::KvDesk::Key key;
    ~End() { desk.end(key); }
  } const end{desk_, key};
  const std::vector<engine::BlockParts> blocks =
      desk_.give(key, prompt, ask.identity, ask.first, std::min(ask.max_blocks, most), options_.timeout);
  send_frame(socket, FrameKind::kBlocks, encode_number(blocks.size()), deadline);
  ask.prompt = *prompt;
  const auto seeds = place_seeds(ask, desk_.block_size(), std::ssize(blocks));
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::vector<std::span<const std::byte>> parts(blocks[i].begin(), blocks[i].end());
    send_frame(socket, FrameKind::kBlock, parts, seeds[i], deadline);
  }
  num_blocks_ += std::ssize(blocks);
}

}  // namespace prl::transfer
