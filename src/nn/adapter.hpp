#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/parameters.hpp"
#include "nn/tensor_table.hpp"
#include "ops/lora.hpp"

namespace prl::nn {

/// What is adapted and how, as PEFT's adapter_config.json says it.
struct AdapterConfig {
  std::int64_t rank = 16;
  double alpha = 32.0;
  double dropout = 0.0;
  bool rank_stabilized = false;  ///< scale by alpha / sqrt(rank) instead of alpha / rank
  /// A plain name is a component of a module's dotted name; with a character of regular expressions in it a pattern is searched in the
  /// whole name.
  std::vector<std::string> target_modules;
  std::vector<std::string> modules_to_save;  ///< trained whole, without an adapter
  /// Of modules whose name ends in the pattern, or matches it as a regular expression from a dot on; the first that matches counts.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  std::string base_model;  ///< base_model_name_or_path, for readers of the files
  bool operator==(const AdapterConfig&) const = default;
};

/// Of one module: its rank, and what B (A x) is multiplied by.
struct AdapterScale {
  std::int64_t rank = 0;
  float scale = 0;
};
AdapterScale scale_of(const AdapterConfig& config, std::string_view module);
/// "model.layers.0.self_attn.q_proj" of the tensor of that module.
std::string module_of(std::string_view tensor_name);

/// The tensors that training of an adapter trains, all of them: modules to save, whole, and A and B of each adapted one, named
/// "<module>.lora_A.weight" and "<module>.lora_B.weight". Matrices of attention and MLP take adapters, those of each expert too.
///
/// Error{kInvalidArgument} names a pattern that matches nothing, or nothing that takes an adapter, and lists what there is; or kv_b_proj
/// where attention is to latents. Names that
/// mixtures of experts alone have ("experts") are passed over in dense models, and beside it those of MLPs where experts are w1, w2, w3.
/// Error{kNotImplemented}: dropout before adapters of experts.
TensorTablePtr make_adapter_table(const ModelConfig& model, const AdapterConfig& config);
/// A and B alone, of the modules for which `find` gives a rank.
TensorTablePtr make_adapter_table(const ModelConfig& model,
                                  const std::function<std::optional<AdapterScale>(const std::string& module)>& find);

/// The matrices that take adapters.
inline constexpr std::array kAdaptedBlocks = {Block::kQkv,     Block::kO,    Block::kGateUp,    Block::kDown,
                                              Block::kQueryUp, Block::kKvUp, Block::kExpertsIn, Block::kExpertsOut};

struct Adapter;
using AdapterPtr = std::shared_ptr<const Adapter>;
/// A low-rank adapter of a model, ready to compute with. Immutable; trainer and engine share it as they share `Weights`.
struct Adapter : std::enable_shared_from_this<Adapter> {
  AdapterConfig config;
  TensorTablePtr table;  ///< make_adapter_table(); tensors of modules to save are not part of this
  DType dtype = DType::kF32;
  /// Of kAdaptedBlocks; `a` is null where there is none.
  using Blocks = std::array<ops::LoraWeight, kAdaptedBlocks.size()>;
  struct Layer {
    Blocks blocks;
    std::vector<Blocks> experts;  ///< of each expert; empty if none has any
  };
  std::vector<Layer> layers;
  Shard shard = {};                        ///< of B it has the rows that adapt the outputs of that part of the model; A is whole
  TensorTablePtr part_of_model = nullptr;  ///< the table of that part; nullptr: one device has all
  std::vector<AdapterPtr> others;          ///< the parts of the other devices, from rank 1 on; empty in these, and where one device has all

  /// What the device of that rank computes with.
  const Adapter* part(int rank) const { return rank == 0 ? this : others.at(static_cast<std::size_t>(rank) - 1).get(); }
  /// nullptr if the block has no adapter.
  const ops::LoraWeight* find(Block matrix, std::int64_t layer, std::int64_t expert = -1) const noexcept;
  std::size_t num_bytes() const noexcept;
  std::int64_t max_rank() const noexcept;
  bool adapts_experts() const noexcept;
};

/// Bytes of an adapter of `rank` of every matrix that takes one, or of a device's part of it: the most that one of that rank has.
std::size_t most_adapter_bytes(const ModelConfig& model, std::int64_t rank, DType dtype, Shard shard = {});

/// The tensor of a model, or of a device's part of it, that the adapter of a block and slot adapts.
const TensorSpec& adapted_tensor(const TensorTable& model, Block matrix, std::int64_t layer, std::int64_t expert, Slot slot);

/// Rows of a block, one run below the other.
struct BlockRows {
  const BlockSpec& block;
  std::vector<RowRun> runs;
};
/// Fills an adapter of `table`: `matrix` gives the packed matrix of rows of an adapter's block, which are all of them unless devices share
/// the layers.
AdapterPtr make_adapter(const AdapterConfig& config, const ModelConfig& model, TensorTablePtr table, DType dtype,
                        const std::function<ops::LinearWeightPtr(const BlockRows&)>& matrix, Shard shard = {});

/// A starts uniform in +-1/sqrt(inputs), B at zero, so that the model starts as its base. A pure function of (table, seed); other tensors
/// are left alone.
void init_adapter(Parameters& parameters, std::uint64_t seed);

/// Rows of a batch and the adapter that they name.
struct AdapterRows {
  const Adapter* adapter = nullptr;
  std::span<const std::int32_t> rows;  ///< as ops::LoraRows
};

}  // namespace prl::nn
