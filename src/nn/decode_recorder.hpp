#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/arena.hpp"
#include "nn/adapter_bank.hpp"
#include "nn/decoder.hpp"

namespace prl::nn {

/// Steps of one new token per sequence, or of a few with the guesses behind it, on a device that can record its work: everything from the
/// embedding to the last norm is one launch. Batches are filled up to one of a few sizes with rows that belong to no sequence, so that few
/// recordings serve all. Invariants: a recording is used only while all memory that it names is where it was; recorded work writes no
/// weight, for its kernels may read weights before the kernels in front of them have ended.
class DecodeRecorder {
 public:
  DecodeRecorder(ops::OpContext& ctx, ops::SharedLayers shared);
  ~DecodeRecorder();
  /// Whether `batch` is such a step and the device can decode from indices of its own; with experts, if their rows need no host, which
  /// those of their adapters do.
  bool takes(const Weights& weights, const KvCache& cache, const PagedBatch& batch, std::span<const AdapterRows> adapters);
  /// As InferenceModel::forward_paged; the batch has been checked. `bank` has the adapters of all rows, `adapters`; null: rows name none.
  TensorView run(const Weights& weights, KvCache& cache, const PagedBatch& batch, AdapterBank* bank, std::span<const AdapterRows> adapters);

 private:
  struct Key {
    std::int64_t rows = 0, max_blocks = 0;
    bool has_adapters = false;
    bool has_next_tokens = false;   ///< of sequences whose first new token another row has
    std::size_t adapter_shape = 0;  ///< AdapterBank::shape_of the one adapter that rows name, or 0
    auto operator<=>(const Key&) const = default;
    /// Each row has at most a tile of its own; those of one adapter share them.
    std::int64_t num_tiles() const {
      return !has_adapters ? 0 : adapter_shape != 0 ? (rows + ops::kLoraTileRows - 1) / ops::kLoraTileRows : rows;
    }
  };
  struct Step;
  Step& step_for(const Key& key);
  void drop_recordings();
  bool takes_experts(const Weights& weights, std::int64_t num_rows);
  /// Whether rows of one token each cost less than a launch for each of their kernels does.
  static bool takes_next_tokens(const Weights& weights, const KvCache& cache, const PagedBatch& batch);
  static void fill(Step& step, const Key& key, const PagedBatch& batch);
  TensorView forward(const Weights& weights, KvCache& cache, const Step& step, ConstTensorView drawn_B, const AdapterBank* bank,
                     const Adapter* single);

  ops::OpContext& ctx_;
  const ops::SharedLayers shared_;
  autograd::Arena arena_;
  std::map<Key, std::unique_ptr<Step>> steps_;
  std::map<std::int64_t, bool> takes_experts_;  ///< by rows, of `weights_`
  /// What the recordings were made with.
  const void* weights_ = nullptr;
  PolicyVersion version_;
  const void* cache_ = nullptr;
  const void* drawn_ = nullptr;
  std::uint64_t bank_generation_ = 0;
  std::size_t num_allocations_ = 0;
  std::uint64_t workspace_generation_ = 0;
};

}  // namespace prl::nn
