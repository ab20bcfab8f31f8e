#include "nn/adapter.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace prl::nn {
namespace {

std::size_t index_of(Block matrix) { return static_cast<std::size_t>(std::ranges::find(kAdaptedBlocks, matrix) - kAdaptedBlocks.begin()); }

/// Where a tensor's rows begin in the block of the model.
std::int64_t first_output(const TensorTable& model, Block matrix, std::int64_t layer, Slot slot) {
  const std::size_t block = model.find(matrix, layer);
  PRL_CHECK(block != TensorTable::kNone, "an adapter of a block that the model lacks");
  for (const TensorSpec& spec : model.tensors_of(model.blocks()[block]))
    if (spec.slot == slot) return spec.first_row;
  fail(ErrorCode::kInternal, "an adapter of a tensor that the block lacks");
}

}  // namespace

const ops::LoraWeight* Adapter::find(Block matrix, std::int64_t layer) const noexcept {
  const std::size_t i = index_of(matrix);
  if (i == kAdaptedBlocks.size() || layer < 0 || layer >= static_cast<std::int64_t>(layers.size())) return nullptr;
  const ops::LoraWeight& weight = layers[static_cast<std::size_t>(layer)].blocks[i];
  return weight.a != nullptr ? &weight : nullptr;
}

std::size_t Adapter::num_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Layer& layer : layers)
    for (const ops::LoraWeight& weight : layer.blocks) {
      if (weight.a == nullptr) continue;
      sum += weight.a->num_bytes();
      for (const ops::LoraPart& part : weight.parts) sum += part.b->num_bytes();
    }
  return sum;
}

std::int64_t Adapter::max_rank() const noexcept {
  std::int64_t most = 0;
  for (const Layer& layer : layers)
    for (const ops::LoraWeight& weight : layer.blocks)
      for (const ops::LoraPart& part : weight.parts) most = std::max(most, part.rank);
  return most;
}

std::size_t most_adapter_bytes(const ModelConfig& model, std::int64_t rank, DType dtype) {
  std::int64_t values = 0;
  for (const TensorSpec& spec : make_tensor_table(model)->tensors())
    if (spec.is_matrix() && lora_b_of(spec.slot)) values += rank * (spec.shape[0] + spec.shape[1]);
  return static_cast<std::size_t>(values) * size_of(dtype);
}

AdapterPtr make_adapter(const AdapterConfig& config, const ModelConfig& model, TensorTablePtr table, DType dtype,
                        const std::function<ops::LinearWeightPtr(const BlockSpec&)>& matrix) {
  const TensorTablePtr of_model = make_tensor_table(model);
  auto adapter = std::make_shared<Adapter>();
  adapter->config = config;
  adapter->table = table;
  adapter->dtype = dtype;
  adapter->layers.resize(static_cast<std::size_t>(model.num_layers));
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    for (const Block block : kAdaptedBlocks) {
      const std::size_t a = table->find(*lora_a_of(block), layer);
      if (a == TensorTable::kNone) continue;
      ops::LoraWeight& weight = adapter->layers[static_cast<std::size_t>(layer)].blocks[index_of(block)];
      weight.a = matrix(table->blocks()[a]);
      for (const TensorSpec& of_a : table->tensors_of(table->blocks()[a])) {
        const std::size_t b = table->find(*lora_b_of(of_a.slot), layer);
        PRL_CHECK(b != TensorTable::kNone, "{} has no B", of_a.name);
        const BlockSpec& spec = table->blocks()[b];
        weight.parts.push_back({.first_output = first_output(*of_model, block, layer, of_a.slot),
                                .num_outputs = spec.shape[0],
                                .first_rank = of_a.first_row,
                                .rank = of_a.shape[0],
                                .scale = of_a.lora_scale,
                                .b = matrix(spec)});
      }
    }
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
