#include "tools/lora_floor.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <vector>

#include "base/units.hpp"
#include "nn/model_config.hpp"

namespace prl::tools {

nn::AdapterConfig adapter_of(LoraTargets targets, std::int64_t rank) {
  nn::AdapterConfig config;
  config.rank = rank;
  config.alpha = 2.0 * static_cast<double>(rank);
  config.target_modules = {"q_proj", "k_proj", "v_proj", "o_proj"};
  if (targets == LoraTargets::kAll)
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) config.target_modules.emplace_back(name);
  return config;
}

LoraFloor lora_floor(const nn::ModelConfig& model, const nn::AdapterConfig& adapter, const DecodeStep& step) {
  const auto size = static_cast<double>(size_of(step.dtype));
  const auto rows = static_cast<double>(step.num_rows);
  const auto weights = static_cast<double>(model.num_active_parameters());
  const auto of_adapter = static_cast<double>(nn::make_adapter_table(model, adapter)->num_master_elements());
  const double pairs = rows * static_cast<double>(step.context * model.num_layers);
  const double kv_values = 2.0 * pairs * static_cast<double>(model.num_kv_heads * model.head_dim);
  LoraFloor floor;
  floor.adapter_bytes = static_cast<double>(std::min(step.num_rows, step.num_adapters)) * of_adapter * size;
  floor.base_bytes = (weights + kv_values) * size;
  floor.by_bytes = 1 + floor.adapter_bytes / floor.base_bytes;
  // A multiplication and an addition for each weight; for each key and each value one per element of a query's head.
  const double base_flops = 2 * rows * weights + 4 * pairs * static_cast<double>(model.num_heads * model.head_dim);
  floor.by_flops = 1 + 2 * rows * of_adapter / base_flops;
  return floor;
}

double measured_read_speed(ThreadPool& pool) {
  constexpr std::size_t kBytes = std::size_t{256} << 20, kPiece = std::size_t{1} << 20;
  constexpr int kPasses = 5;
  const std::vector<std::uint64_t> memory(kBytes / sizeof(std::uint64_t), 1);
  std::atomic<std::uint64_t> sum{0};
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto began = std::chrono::steady_clock::now();
    pool.parallel_for(kBytes / kPiece, [&](std::int64_t i) {
      const auto first = memory.begin() + i * static_cast<std::int64_t>(kPiece / sizeof(std::uint64_t));
      sum += std::accumulate(first, first + kPiece / sizeof(std::uint64_t), std::uint64_t{0});
    });
    best = std::max(best, static_cast<double>(kBytes) / seconds_since(began));
  }
  return sum.load() == 0 ? 0 : best;  // so that the sums are formed
}

}  // namespace prl::tools
