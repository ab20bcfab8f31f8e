#include "weights/transfer.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/json.hpp>

#include "base/error.hpp"

namespace prl::weights {
namespace {

namespace json = boost::json;

constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;

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

}  // namespace

std::string ticket_key(std::int64_t ticket) { return fmt::format("weights/ticket/{}", ticket); }
std::string group_name(std::int64_t ticket) { return fmt::format("weights-{}", ticket); }
std::string bind_host(const std::string& host) { return host == "localhost" ? "127.0.0.1" : host; }

std::string own_machine() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0)
    fail(ErrorCode::kIo, "this machine's name is not known, so the trainer cannot be told where it is");
  return name.data();
}

std::string Ask::to_text() const {
  return json::serialize(json::object{{"version", version}, {"engine", engine}, {"device", device}, {"link", link}});
}

Ask Ask::parse(const std::string& text) {
  constexpr const char* kWhat = "an engine's wish";
  const json::object object = parse_object(text, kWhat);
  return {.version = member<std::int64_t>(object, "version", kWhat),
          .engine = member<std::string>(object, "engine", kWhat),
          .device = member<std::string>(object, "device", kWhat),
          .link = member<std::string>(object, "link", kWhat)};
}

std::string Offer::to_text() const {
  return json::serialize(json::object{{"has_version", has_version},
                                      {"newest", newest},
                                      {"dtype", static_cast<std::int64_t>(dtype)},
                                      {"num_values", num_values},
                                      {"link", link}});
}

Offer Offer::parse(const std::string& text) {
  constexpr const char* kWhat = "a trainer's offer";
  const json::object object = parse_object(text, kWhat);
  return {.has_version = member<bool>(object, "has_version", kWhat),
          .newest = member<std::int64_t>(object, "newest", kWhat),
          .dtype = static_cast<DType>(member<std::int64_t>(object, "dtype", kWhat)),
          .num_values = member<std::int64_t>(object, "num_values", kWhat),
          .link = member<std::string>(object, "link", kWhat)};
}

void broadcast_values(comm::Communicator& group, const Tensor& values, std::chrono::milliseconds timeout) {
  const std::int64_t chunk = kChunkBytes / static_cast<std::int64_t>(size_of(values.dtype()));
  for (std::int64_t begin = 0; begin < values.num_elements(); begin += chunk)
    group.broadcast(values.slice(begin, std::min(chunk, values.num_elements() - begin)).view(), 0, {.what = "weights", .timeout = timeout});
}

}  // namespace prl::weights
