#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nn/adapter.hpp"
#include "ops/context.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// Which rows of a step name which slot.
struct AdapterTiles {
  ConstTensorView tiles;            ///< ops::LoraIndex::tiles
  const Adapter* single = nullptr;  ///< all that name one name this, which is AdapterBank::use_single's
};

/// The adapters that steps of inference name, in a table in device memory: a slot for each, with an entry for each matrix of the model.
/// Rows name adapters by slot, so that a step launches the same work whatever its rows name. One thread; work of the context's stream reads
/// the table, and what is written to it follows the work enqueued before. Invariants: an entry that tiles name is that of an adapter which
/// the caller holds; slots of a step differ from one another.
class AdapterBank {
 public:
  explicit AdapterBank(ops::OpContext& ctx) : ctx_(ctx) {}

  /// Has the adapters of `rows` in slots, in place of ones that are gone or were not named for longest. False if the device, or one of the
  /// adapters, needs them in groups.
  [[nodiscard]] bool bring(const ModelConfig& config, DType compute, std::span<const AdapterRows> rows);
  /// Appends the tiles (ops::LoraIndex) of rows that the last bring() took.
  void append_tiles(std::vector<std::int32_t>& tiles, std::span<const AdapterRows> rows) const;
  /// What adds the adapters of one matrix; nullopt if none of the bank has any.
  std::optional<ops::LoraIndex> index(Block matrix, std::int64_t layer, const AdapterTiles& tiles) const;
  /// Has the entries of one adapter, which the last bring() took, where index() names them as `single`: after enqueued work.
  void use_single(const Adapter& adapter);
  /// What recorded work keeps of an adapter that the last bring() took: equal where all parts of all its weights are;
  /// 0 beyond the first few shapes.
  std::size_t shape_of(const Adapter& adapter) const;
  /// Changes when work recorded with index() no longer fits: the table moved, another matrix is adapted, or a rank is larger than any
  /// before.
  std::uint64_t generation() const noexcept { return generation_; }

 private:
  struct SlotState {
    std::weak_ptr<const Adapter> adapter;
    std::uint64_t last_use = 0;
    std::size_t shape = 0;  ///< shape_of
  };
  /// Of an adapter that is in the table.
  std::optional<std::size_t> slot_of(const Adapter* adapter) const;
  std::size_t free_slot();
  void grow(std::size_t num_slots);
  bool write(std::size_t slot, const Adapter& adapter);

  ops::OpContext& ctx_;
  std::int64_t num_layers_ = 0;
  DType compute_ = DType::kF32;
  std::vector<SlotState> slots_;
  std::vector<std::byte> host_;                    ///< the table: [slots][layers][matrices][kLoraEntryBytes]
  Tensor table_;                                   ///< the same on the device
  Tensor signals_;                                 ///< [layers][matrices], 0 between steps: LoraIndex::signal
  std::vector<bool> has_entries_;                  ///< by layer and matrix: whether any adapter had one
  Tensor single_;                                  ///< the entries of use_single's adapter
  std::optional<std::size_t> single_slot_;         ///< whose they are, while they are what the slot has
  std::vector<std::vector<std::int64_t>> shapes_;  ///< parts of all weights, each once
  std::int64_t max_rank_ = 0;
  std::uint64_t generation_ = 0, num_steps_ = 0;
};

}  // namespace prl::nn
