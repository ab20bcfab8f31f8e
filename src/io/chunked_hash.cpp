#include "io/chunked_hash.hpp"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace prl::io {
namespace {

/// More gain nothing: memory is then what limits.
constexpr std::size_t kMaxHashThreads = 8;

struct FreeState {
  void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
};
using StatePtr = std::unique_ptr<XXH3_state_t, FreeState>;

StatePtr make_state() {
  StatePtr state(XXH3_createState());
  XXH3_64bits_reset(state.get());
  return state;
}

void add(XXH3_state_t* root, std::uint64_t piece) {
  unsigned char bytes[8];
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(piece >> (8 * i));
  XXH3_64bits_update(root, bytes, sizeof bytes);
}

/// Of [from, to), where [begin, end) is taken as zeros.
std::uint64_t hash_piece(std::span<const std::byte> bytes, std::size_t from, std::size_t to, std::size_t begin, std::size_t end) {
  const std::size_t first = std::clamp(begin, from, to), last = std::clamp(end, from, to);
  if (first == last) return XXH3_64bits(bytes.data() + from, to - from);
  const StatePtr state = make_state();
  const std::string zeros(last - first, '0');
  XXH3_64bits_update(state.get(), bytes.data() + from, first - from);
  XXH3_64bits_update(state.get(), zeros.data(), zeros.size());
  XXH3_64bits_update(state.get(), bytes.data() + last, to - last);
  return XXH3_64bits_digest(state.get());
}

}  // namespace

struct ChunkedHash::State {
  StatePtr root = make_state(), piece = make_state();
  std::size_t num_bytes = 0;  ///< of the piece
};

ChunkedHash::ChunkedHash() : state_(std::make_unique<State>()) {}
ChunkedHash::~ChunkedHash() = default;

void ChunkedHash::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t taken = std::min(bytes.size(), kHashPiece - state_->num_bytes);
    XXH3_64bits_update(state_->piece.get(), bytes.data(), taken);
    state_->num_bytes += taken;
    bytes = bytes.subspan(taken);
    if (state_->num_bytes < kHashPiece) continue;
    add(state_->root.get(), XXH3_64bits_digest(state_->piece.get()));
    XXH3_64bits_reset(state_->piece.get());
    state_->num_bytes = 0;
  }
}

std::uint64_t ChunkedHash::digest() {
  if (state_->num_bytes > 0) add(state_->root.get(), XXH3_64bits_digest(state_->piece.get()));
  state_->num_bytes = 0;
  return XXH3_64bits_digest(state_->root.get());
}

std::uint64_t hash_with_zeros(std::span<const std::byte> bytes, std::size_t begin, std::size_t count) {
  return hash_piece(bytes, 0, bytes.size(), begin, begin + count);
}

std::uint64_t chunked_hash_with_zeros(std::span<const std::byte> bytes, std::size_t begin, std::size_t count) {
  std::vector<std::uint64_t> pieces((bytes.size() + kHashPiece - 1) / kHashPiece);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++)
      pieces[i] = hash_piece(bytes, i * kHashPiece, std::min((i + 1) * kHashPiece, bytes.size()), begin, begin + count);
  };
  {
    std::vector<std::jthread> threads;
    const std::size_t num_threads = std::min({pieces.size(), kMaxHashThreads, std::size_t{std::thread::hardware_concurrency()}});
    for (std::size_t i = 1; i < num_threads; ++i) threads.emplace_back(work);
    work();
  }
  const StatePtr root = make_state();
  for (const std::uint64_t piece : pieces) add(root.get(), piece);
  return XXH3_64bits_digest(root.get());
}

}  // namespace prl::io
