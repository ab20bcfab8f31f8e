#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "nn/model_config.hpp"
#include "tensor/dtype.hpp"

namespace prl::launch {

struct BenchOptions {
  nn::ModelConfig model;                   ///< random weights of this shape
  std::shared_ptr<DeviceRuntime> runtime;  ///< where
  DType dtype = DType::kF32;
  int num_threads = 0;
  std::int64_t num_sequences = 32, prompt_tokens = 128, completion_tokens = 64, train_tokens = 4096;
  int num_repeats = 2;  ///< measured, after one to warm up
  bool decode = true, train = true;
  std::uint64_t seed = 42;
};

/// Every measured repeat of one kind of work.
struct BenchRow {
  std::string work;  ///< "decode_many", "decode_one", "train"
  std::vector<double> tokens_per_s;
  double share = 0;  ///< decode_one: of the memory-bandwidth bound; train: MFU; both against the peak measured now
};

/// The shape of SmolLM2-135M.
nn::ModelConfig smollm2_135m_shape();
std::vector<BenchRow> run_bench(const BenchOptions& options);
/// {"dtype", "threads", "cpu", "rows": [{work, tokens_per_s: [...], share}]}, the layout of bench/peer_cpu.py.
std::string to_json(const BenchOptions& options, const std::vector<BenchRow>& rows);

}  // namespace prl::launch
