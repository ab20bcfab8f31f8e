#include <cstring>

#include "autograd/experts.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "nn/weights.hpp"
#include "ops/hash.hpp"

namespace prl::nn {
namespace {

/// The names of tensors and what is to be hashed of each.
struct HashList {
  std::vector<std::string> names;
  std::vector<ops::HashedRows> items;
  std::vector<std::size_t> tensor_of;  ///< the name of each item: hashes of a tensor's rows add up
  std::vector<bool> is_part;           ///< of adapters: whether the device has a part of the tensor's rows
  /// Of the last name.
  void add(const ops::HashedRows& item) {
    items.push_back(item);
    tensor_of.push_back(names.size() - 1);
  }
};

/// A vector's elements `run` as rows of the matrix that files have in its place. Those of a device's part are whole rows, or one that is as
/// long as all rows' parts.
void as_rows_of_files(ops::HashedRows& item, const TensorSpec& spec, const RowRun& run) {
  const std::int64_t size = spec.num_taps > 0 ? spec.num_taps : spec.held.empty() ? spec.shape[0] / spec.num_stored_rows : run.count;
  item.plain = item.plain.reshaped({item.plain.shape.num_elements() / size, size});
  item.first_row /= size;
  item.num_rows = run.count / size;
  item.num_cols = size;
  item.first_number = run.first / size;
}

/// Whether the block is of an expert that another rank has.
bool is_elsewhere(const Weights& weights, std::size_t block) {
  const std::int64_t expert = weights.table->blocks()[block].expert, num = weights.config.num_experts;
  if (expert < 0) return false;
  const std::int64_t first = weights.experts.first(num);
  return expert < first || expert >= first + weights.experts.count(num);
}

/// Of blocks [begin, end) of the table that this rank has.
HashList blocks_of(const Weights& weights, std::size_t begin, std::size_t end) {
  HashList list;
  const TensorTable& table = *weights.table;
  for (std::size_t b = begin; b < end; ++b) {
    const Weights::PackedBlock& block = weights.blocks[b];
    if (is_elsewhere(weights, b)) continue;
    for (const TensorSpec& spec : table.tensors_of(table.blocks()[b])) {
      list.names.push_back(spec.name);
      std::int64_t first_row = spec.first_row;
      for (const RowRun& run : spec.held_rows()) {
        ops::HashedRows item{.packed = block.plain.defined() ? nullptr : block.packed.get(),
                             .plain = block.plain.defined() ? block.plain.view() : ConstTensorView{},
                             .first_row = first_row,
                             .num_rows = run.count,
                             .num_cols = spec.row_size(),
                             .first_number = run.first};
        first_row += run.count;
        if (run.is_copy) continue;
        // As files have it, from which adapters know their base.
        if (spec.is_matrix_in_files()) as_rows_of_files(item, spec, run);
        list.add(item);
      }
    }
  }
  return list;
}

HashList blocks_of(const Adapter& adapter) {
  HashList list;
  for (std::size_t i = 0; i < adapter.layers.size(); ++i) {
    const auto layer = static_cast<std::int64_t>(i);
    const auto num_blocks = static_cast<std::int64_t>((adapter.layers[i].experts.size() + 1) * kAdaptedBlocks.size());
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      const Block block = kAdaptedBlocks[static_cast<std::size_t>(b) % kAdaptedBlocks.size()];
      const std::int64_t expert = b / static_cast<std::int64_t>(kAdaptedBlocks.size()) - 1;
      const ops::LoraWeight* weight = adapter.find(block, layer, expert);
      if (weight == nullptr) continue;
      const std::span<const TensorSpec> as =
          adapter.table->tensors_of(adapter.table->blocks()[adapter.table->find(*lora_a_of(block), layer, expert)]);
      for (std::size_t p = 0; p < weight->parts.size(); ++p) {
        const ops::LoraPart& part = weight->parts[p];
        list.names.push_back(as[p].name);
        list.add({weight->a.get(), {}, part.first_rank, part.rank, weight->a->num_inputs()});
        list.is_part.push_back(false);
        list.names.push_back(module_of(module_of(as[p].name)) + ".lora_B.weight");
        const std::vector<RowRun> whole{{.first = 0, .count = part.num_outputs}};
        std::int64_t first_row = 0;
        const std::vector<RowRun> runs =
            adapter.part_of_model != nullptr ? adapted_tensor(*adapter.part_of_model, block, layer, expert, as[p].slot).held_rows() : whole;
        for (const RowRun& run : runs) {
          if (!run.is_copy) list.add({part.b.get(), {}, first_row, run.count, part.rank, run.first});
          first_row += run.count;
        }
        const BlockSpec& of_b = adapter.table->blocks()[adapter.table->find(*lora_b_of(as[p].slot), layer, expert)];
        list.is_part.push_back(part.num_outputs != of_b.shape[0]);
      }
    }
  }
  return list;
}

void add_hashes(ops::OpContext& ctx, WeightsChecksum& out, const HashList& list, DType dtype) {
  std::vector<std::uint64_t> hashes(list.items.size());
  ops::hash_rows(ctx, hashes, list.items, dtype);
  const std::size_t first = out.tensors.size();
  for (const std::string& name : list.names) out.tensors.emplace_back(name, 0);
  for (std::size_t i = 0; i < hashes.size(); ++i) out.tensors[first + list.tensor_of[i]].second += hashes[i];
}

/// All tensors, in the order of the table, of those that each rank has: everyone has those of no expert.
void gather_experts(WeightsChecksum& out, const Weights& weights) {
  if (weights.experts.size == 1) return;
  PRL_CHECK(weights.expert_ranks != nullptr, "the checksum of weights whose experts nobody has");
  const TensorTable& table = *weights.table;
  std::vector<std::uint64_t> mine(table.tensors().size(), 0);  // in the order of the table, 0 for those that are elsewhere
  std::size_t next = 0;
  for (std::size_t b = 0; b < table.blocks().size(); ++b)
    for (std::size_t i = 0; !is_elsewhere(weights, b) && i < table.blocks()[b].num_tensors; ++i)
      mine[table.blocks()[b].first_tensor + i] = out.tensors[next++].second;
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof mine[0]);
  const std::vector<std::string> of_ranks = weights.expert_ranks->gather_bytes(bytes);
  out.tensors.clear();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    std::uint64_t hash = mine[i];
    for (const std::string& of_rank : of_ranks) {
      std::uint64_t other = 0;
      PRL_CHECK(of_rank.size() == bytes.size(), "{} bytes of checksums, wanted {}", of_rank.size(), bytes.size());
      std::memcpy(&other, of_rank.data() + i * sizeof other, sizeof other);
      if (table.tensors()[i].expert >= 0) hash |= other;  // one rank has it, which may be this one
    }
    out.tensors.emplace_back(table.tensors()[i].name, hash);
  }
}

/// What the other devices hold of tensors that `out` has a part of.
void add_parts(WeightsChecksum& out, const Weights& weights) {
  for (const WeightsPtr& other : weights.others) {
    Weights base = *other;
    base.adapter = nullptr;
    const WeightsChecksum part = checksum(base);
    for (std::size_t i = 0; i < part.tensors.size(); ++i)
      if (weights.table->tensors()[i].is_shared) out.tensors[i].second += part.tensors[i].second;
  }
}

void add_adapter(ops::OpContext& ctx, WeightsChecksum& out, const Weights& weights) {
  const Adapter& adapter = *weights.adapter;
  const std::size_t first = out.tensors.size();
  const HashList own = blocks_of(adapter);
  add_hashes(ctx, out, own, adapter.dtype);
  for (std::size_t i = 0; i < adapter.others.size(); ++i) {
    ops::OpSession session(weights.others.at(i)->embedding_VH().runtime(), 0);
    WeightsChecksum part;
    add_hashes(session.context(), part, blocks_of(*adapter.others[i]), adapter.dtype);
    for (std::size_t t = 0; t < part.tensors.size(); ++t)
      if (own.is_part[t]) out.tensors[first + t].second += part.tensors[t].second;
  }
}

}  // namespace

WeightsChecksum checksum(ops::OpContext& ctx, const Weights& weights) {
  WeightsChecksum out;
  const std::span<const BlockSpec> blocks = weights.table->blocks();
  if (weights.base_checksum != nullptr) {
    out.tensors = weights.base_checksum->tensors;
  } else if (weights.layers == nullptr) {
    add_hashes(ctx, out, blocks_of(weights, 0, blocks.size()), weights.compute);
  } else {
    for (std::size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
      const std::int64_t layer = blocks[begin].layer;
      for (end = begin; end < blocks.size() && blocks[end].layer == layer;) ++end;
      if (layer >= 0) weights.layers->enter(layer, layer + 1 < weights.config.num_layers ? layer + 1 : -1);
      add_hashes(ctx, out, blocks_of(weights, begin, end), weights.compute);
    }
  }
  if (weights.base_checksum == nullptr) gather_experts(out, weights);
  if (weights.base_checksum == nullptr) add_parts(out, weights);
  if (weights.adapter != nullptr) add_adapter(ctx, out, weights);
  std::string all;
  for (const auto& [name, hash] : out.tensors) all.append(name).append(1, '\0').append(reinterpret_cast<const char*>(&hash), sizeof hash);
  out.combined = hash_bytes(std::string_view(all));
  return out;
}

WeightsChecksum checksum(const Weights& weights) {
  ops::OpSession session(weights.embedding_VH().runtime(), 0);
  return checksum(session.context(), weights);
}

}  // namespace prl::nn
