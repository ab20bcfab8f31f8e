#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "nn/model_config.hpp"
#include "tensor/dtype.hpp"

namespace prl::tools {

struct BenchOptions {
  nn::ModelConfig model;                   ///< random weights of this shape
  std::shared_ptr<DeviceRuntime> runtime;  ///< where
  DType dtype = DType::kF32;
  int num_threads = 0;
  int num_devices = 1;  ///< that share the layers, for decode and prefill beside one
  std::int64_t num_sequences = 32, prompt_tokens = 128, completion_tokens = 64;
  std::int64_t train_tokens = 4096, sequence_tokens = 512;  ///< of a training step, and of each sequence packed into it
  int checkpoint_every = 0;                                 ///< recompute every n-th layer; 0 none
  std::int64_t train_lora_rank = 0;                         ///< train an adapter of all matrices of attention and MLP; 0: all weights
  int num_repeats = 2;                                      ///< measured, after one to warm up
  std::int64_t draft_tokens = 0;                            ///< of speculative decoding, for decode; 0: off
  bool has_fresh_texts = false;                             ///< with drafts: new ones in each repeat, of few different tokens
  std::int64_t draft_layers = 0;                            ///< with drafts: the model's first ones draw them; 0: they are looked up
  float draft_gap = 0;                                      ///< with draft_layers: what the others add is scaled by it
  bool decode = true, prefill = false, train = true, sync = false;
  std::uint64_t seed = 42;
  std::vector<std::string> adapters = {};  ///< that sequences name in turn, for engines that have them; empty: none
};

/// Every measured repeat of one kind of work.
struct BenchRow {
  std::string work;  ///< "decode_many", "decode_one", "prefill", "train", "sync"; with "_tp2" those of two devices that share the layers
  std::vector<double> tokens_per_s;
  double drafted = 0, accepted = 0;  ///< decode: draft tokens for each token, and those of them that came true
  double share = 0;                  ///< decode: of the memory-bandwidth bound; train: MFU; against the peak measured now
  /// Of the last repeat: parts of a training step or of a weight update. Of one more: means over the steps of an engine (layers, head,
  /// draw, and how long the device waited for the host).
  std::vector<std::pair<std::string, double>> seconds;
  std::size_t peak_bytes = 0;  ///< of memory taken by this work, weights included
};

/// The shape called `name`: "smollm2-135m", "qwen3-0.6b", 1.7b, 4b, 8b, 14b, 32b and 30b-a3b. Error{kInvalidArgument} with the names there
/// are.
nn::ModelConfig named_shape(std::string_view name);
bool is_named_shape(std::string_view name) noexcept;
std::vector<BenchRow> run_bench(const BenchOptions& options);
/// {"device", "cpu", "threads", "sizes", "rows": [{work, dtype, tokens_per_s: [...], share, drafted, accepted, seconds: {...},
/// peak_bytes}]}, the layout of bench/peer.py.
std::string to_json(const BenchOptions& options, const std::vector<BenchRow>& rows);

}  // namespace prl::tools
