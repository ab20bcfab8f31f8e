#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace prl {

/// An integer that cannot be mixed up with another kind of integer.
template <typename Tag, typename Int = std::int64_t>
struct StrongId {
  Int value{};
  auto operator<=>(const StrongId&) const = default;
};

/// Number of optimizer steps that made these weights; 0 is the base model (spec 0.2).
using PolicyVersion = StrongId<struct PolicyVersionTag>;
using RequestId = StrongId<struct RequestIdTag, std::uint64_t>;

}  // namespace prl

template <typename Tag, typename Int>
struct std::hash<prl::StrongId<Tag, Int>> {
  std::size_t operator()(const prl::StrongId<Tag, Int>& id) const noexcept { return std::hash<Int>{}(id.value); }
};
