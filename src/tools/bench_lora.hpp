#pragma once

#include <cstdint>
#include <string>

#include "nn/adapter.hpp"
#include "tools/bench.hpp"

namespace prl::tools {

/// Adapters of all matrices of attention and MLP, with alpha = 2 rank.
nn::AdapterConfig adapter_of_all(std::int64_t rank);

/// What adapters cost: decoding options.num_sequences that each name one of `num_adapters` of `rank` (all attention and MLP matrices),
/// against the same engine decoding without, in turns; and an update in process: packing a trainer's adapter, and its change in the
/// engine. One JSON object: tokens_per_s without and with, cost (median of the repeats' ratios), pack_ms, swap_ms, adapter_mb. Blocks.
std::string bench_lora(BenchOptions options, std::int64_t num_adapters, std::int64_t rank);

}  // namespace prl::tools
