#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

#include "ops/context.hpp"

// Loops over fixed work items. Bodies are passed by reference, so that no loop allocates.

namespace prl::ops::cpu {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline int num_threads(const OpContext& ctx) { return ctx.pool == nullptr ? 1 : ctx.pool->num_threads(); }

/// body(i) for i in [0, count), on any thread.
template <typename Body>
void parallel(OpContext& ctx, std::int64_t count, const Body& body) {
  if (count <= 1 || num_threads(ctx) == 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  ctx.pool->parallel_for(count, std::cref(body));
}

/// body(i, slot) with slot in [0, num_threads): no two items run in one slot at the same time, so a slot may own scratch.
template <typename Body>
void parallel_slots(OpContext& ctx, std::int64_t count, const Body& body) {
  const std::int64_t slots = std::min<std::int64_t>(num_threads(ctx), count);
  if (slots <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, std::int64_t{0});
    return;
  }
  std::atomic<std::int64_t> next{0};
  const auto worker = [&](std::int64_t slot) {
    for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count; i = next.fetch_add(1, std::memory_order_relaxed))
      body(i, slot);
  };
  ctx.pool->parallel_for(slots, std::cref(worker));
}

/// body(begin, end) over ranges of [0, rows), each worth waking a thread for (about 16,384 elements).
template <typename Body>
void parallel_rows(OpContext& ctx, std::int64_t rows, std::int64_t elements_per_row, const Body& body) {
  constexpr std::int64_t kElements = 16384;
  const std::int64_t step = std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, elements_per_row));
  const std::int64_t count = (rows + step - 1) / step;
  parallel(ctx, count, [&](std::int64_t i) { body(i * step, std::min(rows, (i + 1) * step)); });
}

}  // namespace prl::ops::cpu
