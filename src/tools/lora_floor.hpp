#pragma once

#include <cstdint>

#include "base/thread_pool.hpp"
#include "nn/adapter.hpp"
#include "tensor/dtype.hpp"

namespace prl::tools {

/// The matrices that take an adapter.
enum class LoraTargets { kAll, kAttention };
nn::AdapterConfig adapter_of(LoraTargets targets, std::int64_t rank);

/// A decoding step: its rows, how many adapters they name, and how many tokens each attends to.
struct DecodeStep {
  std::int64_t num_rows = 32, num_adapters = 32, context = 192;
  DType dtype = DType::kBF16;
};

/// What a step has to read and to multiply at least: each weight that it needs once, keys and values once per row.
struct LoraFloor {
  double adapter_bytes = 0;  ///< of all adapters that are named
  double base_bytes = 0;     ///< of weights, keys and values
  double by_bytes = 1;       ///< times the cost without adapters where reading memory bounds both
  double by_flops = 1;       ///< and where arithmetic does
};
LoraFloor lora_floor(const nn::ModelConfig& model, const nn::AdapterConfig& adapter, const DecodeStep& step);

/// How fast all threads of the pool together read memory that no cache holds: the best of some passes over 256 MiB. Bytes a second.
double measured_read_speed(ThreadPool& pool);

}  // namespace prl::tools
