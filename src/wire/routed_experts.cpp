#include "wire/routed_experts.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::wire {
namespace {

/// More than any model has; keeps products of hostile shapes in range.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32, kMaxLayers = 1 << 14, kMaxTopK = 1 << 10;

}  // namespace

void RoutedExperts::resize(std::int64_t num_tokens) {
  ids.resize(static_cast<std::size_t>(num_tokens * row_size()), top_k > 1 ? std::uint16_t{0} : kUnknown);
}

bool RoutedExperts::knows(std::int64_t i) const noexcept {
  const auto* row = ids.data() + i * row_size();
  // No router gives one expert twice.
  return std::any_of(row, row + row_size(),
                     [&](const std::uint16_t& id) { return top_k > 1 ? (&id - row) % top_k > 0 && id != *(&id - 1) : id != kUnknown; });
}

void RoutedExperts::append(const RoutedExperts& other) {
  if (empty() && start == 0 && row_size() == 0) {
    num_layers = other.num_layers;
    top_k = other.top_k;
  }
  PRL_CHECK(num_layers == other.num_layers && top_k == other.top_k, "experts of {} x {} after those of {} x {}", other.num_layers,
            other.top_k, num_layers, top_k);
  const std::int64_t end = start + num_tokens();
  PRL_CHECK(other.start <= end, "experts from token {} on after those up to {}", other.start, end);
  if (other.start + other.num_tokens() <= end) return;
  ids.insert(ids.end(), other.ids.begin() + static_cast<std::ptrdiff_t>((end - other.start) * row_size()), other.ids.end());
}

ExpertBytes encode(const RoutedExperts& experts) {
  const bool is_wide = std::ranges::any_of(experts.ids, [](std::uint16_t id) { return id > 255; });
  ExpertBytes out{.data = {}, .dtype = is_wide ? "uint16" : "uint8"};
  out.data.reserve(experts.ids.size() * (is_wide ? 2 : 1));
  for (const std::uint16_t id : experts.ids) {
    out.data += static_cast<char>(id & 0xff);
    if (is_wide) out.data += static_cast<char>(id >> 8);
  }
  return out;
}

RoutedExperts decode_experts(std::string_view field, std::string_view data, std::string_view dtype, std::int64_t num_tokens,
                             std::int64_t num_layers, std::int64_t top_k) {
  if (dtype != "uint8" && dtype != "uint16") fail(ErrorCode::kCorrupt, "{}.dtype: wanted uint8 or uint16, found '{}'", field, dtype);
  if (num_tokens < 0 || num_tokens > kMaxTokens || num_layers < 1 || num_layers > kMaxLayers || top_k < 1 || top_k > kMaxTopK)
    fail(ErrorCode::kCorrupt, "{}.shape: wanted tokens, layers and experts of a token, found {}, {}, {}", field, num_tokens, num_layers,
         top_k);
  const std::size_t num = static_cast<std::size_t>(num_tokens * num_layers * top_k), size = dtype == "uint16" ? 2 : 1;
  if (data.size() != num * size)
    fail(ErrorCode::kCorrupt, "{}.data: {} bytes, wanted {} of {} x {} x {} numbers", field, data.size(), num * size, num_tokens,
         num_layers, top_k);
  RoutedExperts out{.start = 0, .num_layers = num_layers, .top_k = top_k, .ids = {}};
  out.ids.reserve(num);
  for (std::size_t i = 0; i < data.size(); i += size) {
    const unsigned low = static_cast<unsigned char>(data[i]), high = size == 2 ? static_cast<unsigned char>(data[i + 1]) : 0u;
    out.ids.push_back(static_cast<std::uint16_t>(low | high << 8));
  }
  return out;
}

}  // namespace prl::wire
