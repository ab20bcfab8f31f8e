#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "nn/weights.hpp"
#include "ops/pointwise.hpp"

// How Weights are filled with blocks; for the files that make them.

namespace prl::nn {

/// Without blocks. The rotary tables of `previous` (may be null) are shared if they are those of `config`.
std::shared_ptr<Weights> start_weights(ops::OpContext& ctx, const ModelConfig& config, TensorTablePtr table, DType compute,
                                       PolicyVersion version, const WeightsPtr& previous);

inline ConstTensorView view_of_bias(const Tensor& bias) { return bias.defined() ? ConstTensorView(bias.view()) : ConstTensorView{}; }

inline ops::WeightUse use_of(const BlockSpec& block) {
  if (block.rounds_inputs) return ops::WeightUse::kEightBitProduct;
  if (block.is_eight_bit) return block.expert < 0 ? ops::WeightUse::kEightBit : ops::WeightUse::kEightBitExpert;
  return is_lora(block.kind) ? ops::WeightUse::kAdapter : ops::WeightUse::kMatrix;
}

/// 1 + x, fp32.
inline Tensor plus_one(ops::OpContext& ctx, const Tensor& x) {
  const std::vector<float> ones(static_cast<std::size_t>(x.num_elements()), 1.0f);
  const Tensor out = Tensor::empty(ctx.runtime, x.shape(), DType::kF32);
  ctx.runtime->copy_from_host(out.data(), ones.data(), ones.size() * sizeof(float));
  const Shape row{1, x.num_elements()};
  ops::add(ctx, out.view().reshaped(row), x.view().reshaped(row), out.view().reshaped(row));
  return out;
}

/// Sets the vector of block `i`.
inline void set_vector(ops::OpContext& ctx, Weights& weights, std::size_t i, Tensor value) {
  Weights::PackedBlock& to = weights.blocks[i];
  to.plain = std::move(value);
  if (weights.config.norms_add_one && is_stream_or_head_norm(weights.table->blocks()[i].kind)) to.plus_one = plus_one(ctx, to.plain);
}

/// Fills all blocks whose elements lie in `within`, biases before the matrices that take them. `make` gives a block's vector, its plain
/// matrix, and its packed matrix with a bias (perhaps undefined).
template <typename Maker>
void fill_weights(Weights& weights, ops::OpContext& ctx, bool with_backward, const Maker& make, ElementRange within) {
  const TensorTable& table = *weights.table;
  for (std::size_t i = 0; i < weights.blocks.size(); ++i)
    if (const BlockSpec& spec = table.blocks()[i]; !spec.is_matrix() && within.contains(spec.range()))
      set_vector(ctx, weights, i, make.vector(spec));
  for (std::size_t i = 0; i < weights.blocks.size(); ++i) {
    const BlockSpec& spec = table.blocks()[i];
    if (!spec.is_matrix() || !within.contains(spec.range())) continue;
    Weights::PackedBlock& to = weights.blocks[i];
    if (spec.kind == Block::kEmbedding) {
      to.plain = make.table(spec);
      if (table.has_tied_head()) to.packed = ops::share_linear(ctx, to.plain, {}, with_backward);
    } else {
      const std::optional<Block> bias = bias_of(spec.kind);
      to.packed = make.matrix(spec, view_of_bias(bias ? weights.vector(*bias, spec.layer) : Tensor()));
    }
  }
}
template <typename Maker>
void fill_weights(Weights& weights, ops::OpContext& ctx, bool with_backward, const Maker& make) {
  fill_weights(weights, ctx, with_backward, make, {0, weights.table->num_master_elements()});
}

/// Sets what a head for multi-token prediction does not have of its own.
inline void share_with_model(Weights& head, const Weights& model) {
  for (std::size_t i = 0; i < head.blocks.size(); ++i) {
    const BlockSpec& spec = head.table->blocks()[i];
    if (!spec.trainable) head.blocks[i] = model.blocks[model.table->find(spec.kind)];
  }
}

/// Memory for the codes of weights that round their inputs: of a layer's experts in one piece, so that they can be multiplied with
/// together.
class CodePlaces {
 public:
  CodePlaces() = default;
  /// `codes_alone`: weights keep no values beside their codes (ops::CodeMemory).
  CodePlaces(ops::OpContext& ctx, const TensorTable& table, DType compute, bool codes_alone)
      : ctx_(&ctx), compute_(compute), codes_alone_(codes_alone) {
    std::map<std::pair<Block, std::int64_t>, const BlockSpec*> last;  // of a layer's experts
    for (const BlockSpec& block : table.blocks()) {
      if (!block.is_matrix() || !block.rounds_inputs || block.expert < 0) continue;
      const BlockSpec*& greatest = last[{block.kind, block.layer}];
      if (greatest == nullptr || greatest->expert < block.expert) greatest = &block;
    }
    for (const auto& [of, block] : last) of_experts_.emplace(of, taken(block->expert + 1, block->shape));
  }
  /// Undefined for weights that take what they want.
  ops::CodeMemory of(const BlockSpec& block) const {
    if (ctx_ == nullptr || !block.rounds_inputs) return {};
    if (const auto found = of_experts_.find({block.kind, block.layer}); block.expert >= 0 && found != of_experts_.end())
      return found->second.of(block.expert, block.shape[0]);
    return codes_alone_ ? taken(1, block.shape) : ops::CodeMemory{};
  }

 private:
  ops::CodeMemory taken(std::int64_t count, const Shape& shape) const {
    ops::CodeMemory memory = ops::take_code_memory(*ctx_, count, shape[0], shape[1], compute_);
    memory.is_alone = codes_alone_ && memory.codes.defined();
    return memory;
  }
  ops::OpContext* ctx_ = nullptr;
  DType compute_ = DType::kF32;
  bool codes_alone_ = false;
  std::map<std::pair<Block, std::int64_t>, ops::CodeMemory> of_experts_;  ///< by kind and layer
};

/// Makes blocks from one array of all values in the compute dtype, of which the vectors are there: as parts of it, or, with `codes_alone`,
/// so that it is not wanted any more.
class Slicer {
 public:
  Slicer(ops::OpContext& ctx, const TensorTable& table, const Tensor& rounded, bool with_backward, bool codes_alone = false)
      : ctx_(ctx),
        rounded_(rounded),
        with_backward_(with_backward),
        codes_alone_(codes_alone),
        codes_(ctx, table, rounded.dtype(), codes_alone) {
    vectors_ = Tensor::empty(ctx_.runtime, {table.num_vector_elements()}, DType::kF32);
    if (table.num_vector_elements() > 0) ops::cast(ctx_, vectors_, rounded_.slice(0, table.num_vector_elements()));
  }
  Tensor vector(const BlockSpec& block) const { return part(vectors_, block); }
  /// Where everything else is packed anew, a part of the array would keep all of it alive.
  Tensor table(const BlockSpec& block) const {
    return ops::shares_weights(ctx_) && !codes_alone_ ? part(rounded_, block) : part(rounded_, block).clone();
  }
  ops::LinearWeightPtr matrix(const BlockSpec& block, ConstTensorView bias) const {
    const ops::CodeMemory memory = codes_.of(block);
    const Tensor values = codes_alone_ && !memory.is_alone ? part(rounded_, block).clone() : part(rounded_, block);
    return ops::share_linear(ctx_, values, bias, with_backward_, use_of(block), memory);
  }

 private:
  static Tensor part(const Tensor& from, const BlockSpec& block) {
    return from.slice(block.offset, block.shape.num_elements()).reshaped(block.shape);
  }
  ops::OpContext& ctx_;
  Tensor rounded_, vectors_;
  bool with_backward_, codes_alone_;
  CodePlaces codes_;
};

}  // namespace prl::nn
