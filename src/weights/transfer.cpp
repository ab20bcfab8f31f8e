#include "weights/transfer.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <charconv>

#include "base/error.hpp"

namespace prl::weights {
namespace {

namespace json = boost::json;

constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;
/// More than the layers of any model, several times over.
constexpr std::size_t kMaxRanges = 65'536;
constexpr std::size_t kMaxShares = 4096;

json::object parse_object(const std::string& text, const char* what) {
  boost::system::error_code error;
  json::value parsed = json::parse(text, error);
  if (error || !parsed.is_object()) fail(ErrorCode::kCorrupt, "[weights] wanted {}, found '{}'", what, text.substr(0, 200));
  return std::move(parsed.as_object());
}

template <typename T>
T member(const json::object& of, const char* name, const char* what) {
  const json::value* found = of.if_contains(name);
  try {
    if (found != nullptr) return json::value_to<T>(*found);
  } catch (const std::exception&) {
    // said below
  }
  fail(ErrorCode::kCorrupt, "[weights] {} without a valid '{}': {}", what, name, json::serialize(of).substr(0, 200));
}

json::array to_json(const ValueRanges& ranges) {
  json::array out;
  for (const ValueRange& range : ranges) out.push_back(json::array{range.begin, range.end});
  return out;
}

ValueRanges to_ranges(const json::object& of, const char* what) {
  const auto pairs = member<std::vector<std::vector<std::int64_t>>>(of, "ranges", what);
  ValueRanges ranges;
  for (const auto& pair : pairs) {
    const std::int64_t before = ranges.empty() ? 0 : ranges.back().end;
    if (pair.size() != 2 || pair[0] < before || pair[1] <= pair[0] || pairs.size() > kMaxRanges)
      fail(ErrorCode::kCorrupt, "[weights] {} with ranges that are none: {}", what, json::serialize(of).substr(0, 200));
    ranges.push_back({pair[0], pair[1]});
  }
  return ranges;
}

json::object to_json(const Share& share) { return {{"address", share.address}, {"ranges", to_json(share.ranges)}}; }
Share to_share(const json::object& of, const char* what) { return {member<std::string>(of, "address", what), to_ranges(of, what)}; }

}  // namespace

std::string Share::to_text() const { return json::serialize(to_json(*this)); }

Share Share::parse(const std::string& text) {
  constexpr const char* kWhat = "a rank's part of the weights";
  return to_share(parse_object(text, kWhat), kWhat);
}

std::optional<std::int64_t> num_tickets(const std::optional<std::string>& value) {
  std::int64_t num = 0;
  if (value && std::from_chars(value->data(), value->data() + value->size(), num).ec != std::errc()) return std::nullopt;
  return num;
}

std::string ticket_key(std::int64_t ticket) { return fmt::format("weights/ticket/{}", ticket); }
std::string group_name(std::int64_t ticket) { return fmt::format("weights-{}", ticket); }
std::string bind_host(const std::string& host) { return host == "localhost" ? "127.0.0.1" : host; }

std::string own_machine() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0)
    fail(ErrorCode::kIo, "this machine has no name (hostname), so that others cannot be told where it is");
  return name.data();
}

std::string Ask::to_text() const {
  return json::serialize(json::object{
      {"version", version}, {"engine", engine}, {"device", device}, {"link", link}, {"ranges", to_json(ranges)}, {"adapter", adapter}});
}

Ask Ask::parse(const std::string& text) {
  constexpr const char* kWhat = "an engine's wish";
  const json::object object = parse_object(text, kWhat);
  return {.version = member<std::int64_t>(object, "version", kWhat),
          .engine = member<std::string>(object, "engine", kWhat),
          .device = member<std::string>(object, "device", kWhat),
          .link = member<std::string>(object, "link", kWhat),
          .ranges = to_ranges(object, kWhat),
          .adapter = member<std::string>(object, "adapter", kWhat)};
}

std::string Offer::to_text() const {
  json::array shares;
  for (const Share& share : others) shares.push_back(to_json(share));
  return json::serialize(json::object{{"has_version", has_version},
                                      {"newest", newest},
                                      {"dtype", static_cast<std::int64_t>(dtype)},
                                      {"num_values", num_values},
                                      {"is_adapter", is_adapter},
                                      {"link", link},
                                      {"ranges", to_json(ranges)},
                                      {"others", std::move(shares)}});
}

Offer Offer::parse(const std::string& text) {
  constexpr const char* kWhat = "a trainer's offer";
  const json::object object = parse_object(text, kWhat);
  Offer offer{.has_version = member<bool>(object, "has_version", kWhat),
              .newest = member<std::int64_t>(object, "newest", kWhat),
              .dtype = static_cast<DType>(member<std::int64_t>(object, "dtype", kWhat)),
              .num_values = member<std::int64_t>(object, "num_values", kWhat),
              .is_adapter = member<bool>(object, "is_adapter", kWhat),
              .link = member<std::string>(object, "link", kWhat),
              .ranges = to_ranges(object, kWhat)};
  const auto shares = member<std::vector<json::value>>(object, "others", kWhat);
  if (shares.size() > kMaxShares) fail(ErrorCode::kCorrupt, "[weights] {} with {} senders", kWhat, shares.size());
  for (const json::value& share : shares) {
    if (!share.is_object()) fail(ErrorCode::kCorrupt, "[weights] {} with a sender that is no object", kWhat);
    offer.others.push_back(to_share(share.get_object(), kWhat));
  }
  const auto exceeds = [&](const ValueRanges& ranges) { return !ranges.empty() && ranges.back().end > offer.num_values; };
  if (exceeds(offer.ranges) || std::ranges::any_of(offer.others, exceeds, &Share::ranges))
    fail(ErrorCode::kCorrupt, "[weights] {} of {} values with more of them: {}", kWhat, offer.num_values, text.substr(0, 200));
  return offer;
}

std::vector<Tensor> pieces_of(const Tensor& values, const ValueRanges& held, const ValueRanges& ranges) {
  std::vector<Tensor> pieces;
  for (const ValueRange& range : ranges) pieces.push_back(values.slice(place_of(held, range), range.count()));
  return pieces;
}

void broadcast_values(comm::Communicator& group, const std::vector<Tensor>& pieces, std::chrono::milliseconds timeout) {
  for (const Tensor& piece : pieces) {
    const std::int64_t chunk = kChunkBytes / static_cast<std::int64_t>(size_of(piece.dtype()));
    for (std::int64_t begin = 0; begin < piece.num_elements(); begin += chunk)
      group.broadcast(piece.slice(begin, std::min(chunk, piece.num_elements() - begin)).view(), 0, {.what = "weights", .timeout = timeout});
  }
}

}  // namespace prl::weights
