#include "nn/adapter.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace prl::nn {
namespace {

std::size_t index_of(Block matrix) { return static_cast<std::size_t>(std::ranges::find(kAdaptedBlocks, matrix) - kAdaptedBlocks.begin()); }

}  // namespace

const TensorSpec& adapted_tensor(const TensorTable& model, Block matrix, std::int64_t layer, std::int64_t expert, Slot slot) {
  const std::size_t block = model.find(matrix, layer, expert);
  PRL_CHECK(block != TensorTable::kNone, "an adapter of a block that the model lacks");
  for (const TensorSpec& spec : model.tensors_of(model.blocks()[block]))
    if (spec.slot == slot) return spec;
  fail(ErrorCode::kInternal, "an adapter of a tensor that the block lacks");
}

const ops::LoraWeight* Adapter::find(Block matrix, std::int64_t layer, std::int64_t expert) const noexcept {
  const std::size_t i = index_of(matrix);
  if (i == kAdaptedBlocks.size() || layer < 0 || layer >= static_cast<std::int64_t>(layers.size())) return nullptr;
  const Layer& of_layer = layers[static_cast<std::size_t>(layer)];
  if (expert >= static_cast<std::int64_t>(of_layer.experts.size())) return nullptr;
  const ops::LoraWeight& weight = expert < 0 ? of_layer.blocks[i] : of_layer.experts[static_cast<std::size_t>(expert)][i];
  return weight.a != nullptr ? &weight : nullptr;
}

namespace {

/// Calls `take` with each weight that there is.
template <typename Fn>
void for_each_weight(const std::vector<Adapter::Layer>& layers, const Fn& take) {
  const auto take_all = [&](const Adapter::Blocks& blocks) {
    for (const ops::LoraWeight& weight : blocks)
      if (weight.a != nullptr) take(weight);
  };
  for (const Adapter::Layer& layer : layers) {
    take_all(layer.blocks);
    for (const Adapter::Blocks& expert : layer.experts) take_all(expert);
  }
}

}  // namespace

std::size_t Adapter::num_bytes() const noexcept {
  std::size_t sum = 0;
  for_each_weight(layers, [&](const ops::LoraWeight& weight) {
    sum += weight.a->num_bytes();
    for (const ops::LoraPart& part : weight.parts) sum += part.b->num_bytes();
  });
  return sum;
}

bool Adapter::adapts_experts() const noexcept {
  return std::ranges::any_of(layers, [](const Layer& layer) { return !layer.experts.empty(); });
}

std::int64_t Adapter::max_rank() const noexcept {
  std::int64_t most = 0;
  for_each_weight(layers, [&](const ops::LoraWeight& weight) {
    for (const ops::LoraPart& part : weight.parts) most = std::max(most, part.rank);
  });
  return most;
}

std::size_t most_adapter_bytes(const ModelConfig& model, std::int64_t rank, DType dtype, Shard shard) {
  std::int64_t values = 0;
  for (const TensorSpec& spec : make_tensor_table(model, shard)->tensors())
    if (spec.is_matrix() && lora_b_of(spec.slot)) values += rank * (spec.shape[0] + spec.shape[1]);
  return static_cast<std::size_t>(values) * size_of(dtype);
}

AdapterPtr make_adapter(const AdapterConfig& config, const ModelConfig& model, TensorTablePtr table, DType dtype,
                        const std::function<ops::LinearWeightPtr(const BlockRows&)>& matrix, Shard shard) {
  const TensorTablePtr of_model = make_tensor_table(model, shard);
  auto adapter = std::make_shared<Adapter>();
  adapter->config = config;
  adapter->table = table;
  adapter->dtype = dtype;
  adapter->shard = shard;
  if (shard.size > 1) adapter->part_of_model = of_model;
  adapter->layers.resize(static_cast<std::size_t>(model.num_layers));
  const auto fill = [&](Adapter::Blocks& blocks, std::int64_t layer, std::int64_t expert) {
    for (const Block block : kAdaptedBlocks) {
      const std::size_t a = table->find(*lora_a_of(block), layer, expert);
      if (a == TensorTable::kNone) continue;
      ops::LoraWeight& weight = blocks[index_of(block)];
      weight.a = matrix({table->blocks()[a], {{.first = 0, .count = table->blocks()[a].shape[0]}}});
      for (const TensorSpec& of_a : table->tensors_of(table->blocks()[a])) {
        const std::size_t b = table->find(*lora_b_of(of_a.slot), layer, expert);
        PRL_CHECK(b != TensorTable::kNone, "{} has no B", of_a.name);
        const TensorSpec& adapted = adapted_tensor(*of_model, block, layer, expert, of_a.slot);
        weight.parts.push_back({.first_output = adapted.first_row,
                                .num_outputs = adapted.shape[0],
                                .first_rank = of_a.first_row,
                                .rank = of_a.shape[0],
                                .scale = of_a.lora_scale,
                                .b = matrix({table->blocks()[b], adapted.held_rows()})});
      }
    }
  };
  const bool adapts_experts =
      std::ranges::any_of(table->blocks(), [](const BlockSpec& block) { return block.expert >= 0 && is_lora(block.kind); });
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    Adapter::Layer& of_layer = adapter->layers[static_cast<std::size_t>(layer)];
    fill(of_layer.blocks, layer, -1);
    of_layer.experts.resize(static_cast<std::size_t>(adapts_experts ? model.num_experts : 0));
    for (std::size_t expert = 0; expert < of_layer.experts.size(); ++expert)
      fill(of_layer.experts[expert], layer, static_cast<std::int64_t>(expert));
  }
  return adapter;
}

void init_adapter(Parameters& parameters, std::uint64_t seed) {
  for (std::size_t i = 0; i < parameters.named().size(); ++i) {
    const NamedParameter& p = parameters.named()[i];
    if (!is_lora(p.block)) continue;
    std::vector<float> values(static_cast<std::size_t>(p.num_elements()), 0.0f);
    if (is_lora_a(p.block)) {
      Rng rng(mix_seed(seed, i));
      const double bound = 1.0 / std::sqrt(static_cast<double>(p.shape[1]));
      for (float& value : values) value = static_cast<float>((2.0 * rng.next_double() - 1.0) * bound);
    }
    parameters.write_held(p.offset, values);
  }
}

}  // namespace prl::nn
