#include "transfer/frames.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "base/files.hpp"
#include "net/digest.hpp"

namespace prl::transfer {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as numbers lie in memory");

constexpr std::uint32_t kMagic = 0x31564b50;  // "PKV1"
struct Head {
  std::uint32_t magic = kMagic, kind = 0;
  std::uint64_t num_bytes = 0, checksum = 0;
};
static_assert(sizeof(Head) == 24);

class Writer {
 public:
  template <typename Number>
  Writer& number(Number value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view text) {
    number<std::uint32_t>(static_cast<std::uint32_t>(text.size()));
    out_.append(text);
    return *this;
  }
  std::string take() { return std::move(out_); }
  std::string& bytes() { return out_; }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view body) : body_(body) {}
  template <typename Number>
  Number number(const char* what) {
    Number value{};
    const std::string_view bytes = take(sizeof value, what);
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  /// A count of what follows.
  std::size_t count(const char* what, std::size_t most) {
    const auto value = number<std::uint32_t>(what);
    if (value > most) fail(ErrorCode::kCorrupt, "[kv transfer] {}: wanted at most {}, found {}", what, most, value);
    return value;
  }
  std::string_view take(std::size_t bytes, const char* what) {
    if (body_.size() < bytes) fail(ErrorCode::kCorrupt, "[kv transfer] {}: the frame ends after {} of {} bytes", what, body_.size(), bytes);
    const std::string_view taken = body_.substr(0, bytes);
    body_.remove_prefix(bytes);
    return taken;
  }
  std::string text(const char* what) { return std::string(take(count(what, kMaxTextBytes), what)); }
  void end() const {
    if (!body_.empty()) fail(ErrorCode::kCorrupt, "[kv transfer] {} bytes follow the last member of a frame", body_.size());
  }

 private:
  std::string_view body_;
};

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

Head receive_head(Socket& socket, FrameKind kind, std::size_t max_bytes, Clock::time_point deadline) {
  Head head;
  socket.read(std::as_writable_bytes(std::span(&head, 1)), deadline);
  if (head.magic != kMagic)
    fail(ErrorCode::kCorrupt, "[kv transfer] {} sends something else than frames of key-value blocks", socket.name());
  const bool is_refusal = head.kind == static_cast<std::uint32_t>(FrameKind::kRefusal);
  if (head.kind != static_cast<std::uint32_t>(kind) && !is_refusal)
    fail(ErrorCode::kCorrupt, "[kv transfer] {} sends a frame of kind {}, wanted {}", socket.name(), head.kind,
         static_cast<std::uint32_t>(kind));
  if (head.num_bytes > (is_refusal ? kMaxTextBytes : max_bytes))
    fail(ErrorCode::kCorrupt, "[kv transfer] {} sends a frame of {} bytes, wanted at most {}", socket.name(), head.num_bytes, max_bytes);
  return head;
}

std::string receive_body(Socket& socket, const Head& head, Clock::time_point deadline) {
  std::string body(head.num_bytes, '\0');
  socket.read(std::as_writable_bytes(std::span(body)), deadline);
  if (hash_bytes(body) != head.checksum) fail(ErrorCode::kCorrupt, "[kv transfer] a frame of {} is damaged", socket.name());
  if (head.kind == static_cast<std::uint32_t>(FrameKind::kRefusal))
    fail(ErrorCode::kUnavailable, "[kv transfer] {} refuses: {}", socket.name(), body);
  return body;
}

}  // namespace

std::string encode(const Ask& ask) {
  Writer out;
  const engine::KvIdentity& who = ask.identity;
  out.number(who.version.value).number(who.checksum).text(who.adapter).number(who.adapter_version.value).number(who.adapter_hash);
  out.text(ask.prompt.cache_salt).number(ask.first).number(ask.max_blocks);
  out.number<std::uint32_t>(static_cast<std::uint32_t>(ask.prompt.images.size()));
  for (const engine::ImageMark& image : ask.prompt.images) out.number(image.first).number(image.hash[0]).number(image.hash[1]);
  out.number<std::uint32_t>(static_cast<std::uint32_t>(ask.prompt.tokens.size()));
  out.bytes().append(reinterpret_cast<const char*>(ask.prompt.tokens.data()), ask.prompt.tokens.size() * sizeof(std::int32_t));
  return out.take();
}

Ask decode_ask(std::string_view body) {
  Reader in(body);
  Ask ask;
  ask.identity.version = PolicyVersion{in.number<std::int64_t>("policy version")};
  ask.identity.checksum = in.number<std::uint64_t>("checksum of weights");
  ask.identity.adapter = in.text("adapter");
  ask.identity.adapter_version = PolicyVersion{in.number<std::int64_t>("version of the adapter")};
  ask.identity.adapter_hash = in.number<std::uint64_t>("hash of the adapter");
  ask.prompt.cache_salt = in.text("cache_salt");
  ask.first = in.number<std::int64_t>("first block");
  ask.max_blocks = in.number<std::int64_t>("number of blocks");
  const auto most = static_cast<std::int64_t>(kMaxTokens);
  if (ask.first < 0 || ask.first > most || ask.max_blocks < 1 || ask.max_blocks > most)
    fail(ErrorCode::kCorrupt, "[kv transfer] {} blocks from block {} on are asked for", ask.max_blocks, ask.first);
  for (std::size_t i = in.count("images", kMaxImages); i > 0; --i) {
    engine::ImageMark& image = ask.prompt.images.emplace_back();
    image.first = in.number<std::int64_t>("image");
    for (std::uint64_t& half : image.hash) half = in.number<std::uint64_t>("image");
  }
  const std::size_t num_tokens = in.count("tokens", kMaxTokens);
  const std::string_view tokens = in.take(num_tokens * sizeof(std::int32_t), "tokens");
  ask.prompt.tokens.resize(num_tokens);
  if (num_tokens > 0) std::memcpy(ask.prompt.tokens.data(), tokens.data(), tokens.size());
  in.end();
  return ask;
}

std::vector<std::uint64_t> place_seeds(const Ask& ask, std::int64_t block_size, std::int64_t count) {
  Ask root{.identity = ask.identity, .prompt = {.tokens = {}, .images = ask.prompt.images, .cache_salt = ask.prompt.cache_salt}};
  std::uint64_t seed = hash_bytes(encode(root));
  const auto size = static_cast<std::size_t>(block_size);
  std::vector<std::uint64_t> seeds;
  for (std::int64_t i = 0; i < ask.first + count; ++i) {
    const auto tokens = std::span<const std::int32_t>(ask.prompt.tokens).subspan(static_cast<std::size_t>(i) * size, size);
    seed = hash_bytes(std::as_bytes(tokens), seed);
    if (i >= ask.first) seeds.push_back(seed);
  }
  return seeds;
}

void send_frame(Socket& socket, FrameKind kind, std::span<const std::span<const std::byte>> parts, std::uint64_t seed,
                Clock::time_point deadline) {
  Head head{.kind = static_cast<std::uint32_t>(kind), .checksum = seed};
  for (const std::span<const std::byte> part : parts) {
    head.num_bytes += part.size();
    head.checksum = hash_bytes(part, head.checksum);
  }
  socket.write(std::as_bytes(std::span(&head, 1)), deadline);
  for (const std::span<const std::byte> part : parts) socket.write(part, deadline);
}

void send_frame(Socket& socket, FrameKind kind, std::string_view body, Clock::time_point deadline) {
  const std::array parts{bytes_of(body)};
  send_frame(socket, kind, parts, 0, deadline);
}

std::string receive_frame(Socket& socket, FrameKind kind, std::size_t max_bytes, Clock::time_point deadline) {
  const Head head = receive_head(socket, kind, max_bytes, deadline);
  return receive_body(socket, head, deadline);
}

void receive_into(Socket& socket, FrameKind kind, std::span<const std::span<std::byte>> parts, std::uint64_t seed,
                  Clock::time_point deadline) {
  std::size_t num_bytes = 0;
  for (const std::span<std::byte> part : parts) num_bytes += part.size();
  const Head head = receive_head(socket, kind, num_bytes, deadline);
  if (head.kind != static_cast<std::uint32_t>(kind)) (void)receive_body(socket, head, deadline);
  if (head.num_bytes != num_bytes)
    fail(ErrorCode::kCorrupt, "[kv transfer] {} sends a block of {} bytes, wanted {}", socket.name(), head.num_bytes, num_bytes);
  std::uint64_t checksum = seed;
  for (const std::span<std::byte> part : parts) {
    socket.read(part, deadline);
    checksum = hash_bytes(part, checksum);
  }
  if (checksum != head.checksum) fail(ErrorCode::kCorrupt, "[kv transfer] a block of {} is damaged", socket.name());
}

std::string encode_number(std::uint64_t number) { return Writer().number(number).take(); }

std::uint64_t decode_number(std::string_view body) {
  Reader in(body);
  const auto number = in.number<std::uint64_t>("number");
  in.end();
  return number;
}

std::string keyed_hash(std::string_view key, std::string_view text) {
  constexpr std::size_t kBlock = 64;
  const auto hash = [](std::string_view first, std::string_view second) {
    net::Digest digest(net::DigestKind::kSha256);
    digest.update(first);
    digest.update(second);
    return digest.finish();
  };
  const auto from_hex = [](const std::string& hex) {
    std::string bytes;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    return bytes;
  };
  std::string padded = key.size() > kBlock ? from_hex(hash(key, {})) : std::string(key);
  padded.resize(kBlock, '\0');
  std::string inner = padded, outer = padded;
  for (char& c : inner) c = static_cast<char>(c ^ 0x36);
  for (char& c : outer) c = static_cast<char>(c ^ 0x5c);
  return hash(outer, from_hex(hash(inner, text)));
}

bool is_same(std::string_view a, std::string_view b) noexcept {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

std::string make_nonce() {
  std::random_device device;
  std::string nonce;
  while (nonce.size() < kNonceBytes) {
    const std::uint32_t bits = device();
    nonce.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  }
  return nonce;
}

}  // namespace prl::transfer
