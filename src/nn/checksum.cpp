#include "base/files.hpp"
#include "nn/models/family.hpp"
#include "nn/weights.hpp"
#include "ops/hash.hpp"

namespace prl::nn {
namespace {

/// Rows [first, first + num_rows) of one stored thing are one named tensor: of a packed matrix, or of a plain tensor.
struct Source {
  std::string name;
  const ops::LinearWeight* packed = nullptr;
  const Tensor* plain = nullptr;
  std::int64_t first_row = 0, num_rows = 0, num_cols = 0;
};

std::vector<Source> list_sources(const Weights& w) {
  const ModelConfig& c = w.config;
  const Family& family = find_family(c.model_type, "checksum");
  const std::int64_t Q = c.num_heads * c.head_dim, K = c.num_kv_heads * c.head_dim, F = c.intermediate_size;
  std::vector<Source> out;
  const auto matrix = [&](Slot slot, std::int64_t layer, const ops::LinearWeightPtr& weight, std::int64_t first, std::int64_t rows) {
    out.push_back({family.name_of(slot, layer), weight.get(), nullptr, first, rows, weight->num_inputs()});
  };
  const auto vector = [&](Slot slot, std::int64_t layer, const Tensor& tensor, std::int64_t first, std::int64_t count) {
    if (tensor.defined()) out.push_back({family.name_of(slot, layer), nullptr, &tensor, first, count, 1});
  };
  out.push_back({family.name_of(Slot::kEmbedding, -1), nullptr, &w.embedding_VH, 0, c.vocab_size, c.hidden_size});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const Weights::Layer& l = w.layers[static_cast<std::size_t>(i)];
    vector(Slot::kInputNorm, i, l.input_norm, 0, c.hidden_size);
    matrix(Slot::kQ, i, l.qkv, 0, Q);
    matrix(Slot::kK, i, l.qkv, Q, K);
    matrix(Slot::kV, i, l.qkv, Q + K, K);
    vector(Slot::kQBias, i, l.qkv_bias, 0, Q);
    vector(Slot::kKBias, i, l.qkv_bias, Q, K);
    vector(Slot::kVBias, i, l.qkv_bias, Q + K, K);
    vector(Slot::kQNorm, i, l.q_norm, 0, c.head_dim);
    vector(Slot::kKNorm, i, l.k_norm, 0, c.head_dim);
    matrix(Slot::kO, i, l.o, 0, c.hidden_size);
    vector(Slot::kOBias, i, l.o_bias, 0, c.hidden_size);
    vector(Slot::kPostNorm, i, l.post_norm, 0, c.hidden_size);
    matrix(Slot::kGate, i, l.gate_up, 0, F);
    matrix(Slot::kUp, i, l.gate_up, F, F);
    matrix(Slot::kDown, i, l.down, 0, c.hidden_size);
  }
  vector(Slot::kFinalNorm, -1, w.final_norm, 0, c.hidden_size);
  if (!c.tie_word_embeddings) matrix(Slot::kLmHead, -1, w.lm_head, 0, c.vocab_size);
  return out;
}

}  // namespace

WeightsChecksum checksum(ops::OpContext& ctx, const Weights& weights) {
  const std::vector<Source> sources = list_sources(weights);
  std::vector<ops::HashedRows> items;
  for (const Source& s : sources)
    items.push_back(
        {s.packed, s.plain != nullptr ? ConstTensorView(s.plain->view()) : ConstTensorView{}, s.first_row, s.num_rows, s.num_cols});
  std::vector<std::uint64_t> hashes(items.size());
  ops::hash_rows(ctx, hashes, items, weights.compute);

  WeightsChecksum out;
  std::string all;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    out.tensors.emplace_back(sources[i].name, hashes[i]);
    all.append(sources[i].name).append(1, '\0').append(reinterpret_cast<const char*>(&hashes[i]), sizeof hashes[i]);
  }
  out.combined = hash_bytes(std::string_view(all));
  return out;
}

WeightsChecksum checksum(const Weights& weights) {
  ops::OpSession session(weights.embedding_VH.runtime(), 0);
  return checksum(session.context(), weights);
}

}  // namespace prl::nn
