#pragma once

#include <cstdint>
#include <string>

#include "tools/bench.hpp"
#include "tools/lora_floor.hpp"

namespace prl::tools {

/// What adapters cost: decoding options.num_sequences that each name one of `num_adapters` of `rank`, against the same engine decoding
/// without, in turns; and an update in process: packing a trainer's adapter, and its change in the engine. One JSON object: tokens_per_s
/// without and with, cost (median of the repeats' ratios), pack_ms, swap_ms, adapter_mb; beside the cost its floors (lora_floor), for other
/// ranks too, and on the CPU the floor that follows from the speed at which memory was read in the same run. Blocks.
std::string bench_lora(BenchOptions options, std::int64_t num_adapters, std::int64_t rank, LoraTargets targets);

}  // namespace prl::tools
