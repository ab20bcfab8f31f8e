#include "base/files.hpp"
#include "nn/weights.hpp"
#include "ops/hash.hpp"

namespace prl::nn {

WeightsChecksum checksum(ops::OpContext& ctx, const Weights& weights) {
  std::vector<ops::HashedRows> items;
  const TensorTable& table = *weights.table;
  for (std::size_t b = 0; b < table.blocks().size(); ++b) {
    const Weights::PackedBlock& block = weights.blocks[b];
    for (const TensorSpec& spec : table.tensors_of(table.blocks()[b])) {
      const std::int64_t num_cols = spec.is_matrix() ? spec.shape[1] : 1;
      if (block.plain.defined())
        items.push_back({nullptr, block.plain.view(), spec.first_row, spec.shape[0], num_cols});
      else
        items.push_back({block.packed.get(), {}, spec.first_row, spec.shape[0], num_cols});
    }
  }
  std::vector<std::uint64_t> hashes(items.size());
  ops::hash_rows(ctx, hashes, items, weights.compute);

  WeightsChecksum out;
  std::string all;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::string& name = table.tensors()[i].name;
    out.tensors.emplace_back(name, hashes[i]);
    all.append(name).append(1, '\0').append(reinterpret_cast<const char*>(&hashes[i]), sizeof hashes[i]);
  }
  out.combined = hash_bytes(std::string_view(all));
  return out;
}

WeightsChecksum checksum(const Weights& weights) {
  ops::OpSession session(weights.embedding_VH().runtime(), 0);
  return checksum(session.context(), weights);
}

}  // namespace prl::nn
