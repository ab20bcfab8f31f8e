#include "nn/adapter_bank.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::nn {
namespace {

constexpr std::size_t kFirstSlots = 8;
/// Shapes of adapters for which work is recorded apart; adapters of further ones are added by tiles.
constexpr std::size_t kMostShapes = 8;

std::size_t entry_index(std::int64_t layer, std::size_t matrix) { return static_cast<std::size_t>(layer) * kAdaptedBlocks.size() + matrix; }

void append_shape(std::vector<std::int64_t>& shape, const ops::LoraWeight* weight) {
  shape.push_back(weight != nullptr ? static_cast<std::int64_t>(weight->parts.size()) : 0);
  if (weight == nullptr) return;
  for (const ops::LoraPart& part : weight->parts)
    shape.insert(shape.end(), {part.first_output, part.num_outputs, part.first_rank, part.rank});
}

}  // namespace

std::optional<std::size_t> AdapterBank::slot_of(const Adapter* adapter) const {
  // An adapter that is gone may have left its address to another.
  for (std::size_t slot = 0; slot < slots_.size(); ++slot)
    if (slots_[slot].adapter.lock().get() == adapter) return slot;
  return std::nullopt;
}

std::size_t AdapterBank::free_slot() {
  std::optional<std::size_t> oldest;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].adapter.expired()) return slot;
    if (slots_[slot].last_use != num_steps_ && (!oldest || slots_[slot].last_use < slots_[*oldest].last_use)) oldest = slot;
  }
  if (oldest) return *oldest;
  grow(std::max(kFirstSlots, 2 * slots_.size()));
  return free_slot();
}

void AdapterBank::grow(std::size_t num_slots) {
  const std::size_t slot_bytes = has_entries_.size() * ops::kLoraEntryBytes;
  slots_.resize(num_slots);
  host_.resize(num_slots * slot_bytes);
  Tensor grown = Tensor::empty(ctx_.runtime, {static_cast<std::int64_t>(num_slots), static_cast<std::int64_t>(slot_bytes)}, DType::kU8);
  ctx_.runtime->synchronize();  // enqueued work may read the table that goes
  table_ = std::move(grown);
  ctx_.runtime->copy_from_host(table_.data(), host_.data(), host_.size());
  ++generation_;
}

bool AdapterBank::write(std::size_t slot, const Adapter& adapter) {
  const std::size_t slot_bytes = has_entries_.size() * ops::kLoraEntryBytes;
  const std::span<std::byte> entries = std::span(host_).subspan(slot * slot_bytes, slot_bytes);
  std::vector<std::int64_t> shape;
  if (adapter.adapts_experts()) return false;
  for (std::int64_t layer = 0; layer < num_layers_; ++layer)
    for (std::size_t matrix = 0; matrix < kAdaptedBlocks.size(); ++matrix) {
      const std::size_t at = entry_index(layer, matrix);
      const ops::LoraWeight* weight = adapter.find(kAdaptedBlocks[matrix], layer);
      if (!ops::write_lora_entry(ctx_, entries.subspan(at * ops::kLoraEntryBytes, ops::kLoraEntryBytes), weight, compute_)) return false;
      append_shape(shape, weight);
      if (weight == nullptr || has_entries_[at]) continue;
      has_entries_[at] = true;
      ++generation_;
    }
  ctx_.runtime->copy_from_host(static_cast<std::byte*>(table_.data()) + slot * slot_bytes, entries.data(), slot_bytes);
  slots_[slot].adapter = adapter.weak_from_this();
  if (std::ranges::find(shapes_, shape) == shapes_.end() && shapes_.size() < kMostShapes) shapes_.push_back(shape);
  const auto found = std::ranges::find(shapes_, shape);
  slots_[slot].shape = found != shapes_.end() ? static_cast<std::size_t>(found - shapes_.begin()) + 1 : 0;
  if (single_slot_ == slot) single_slot_.reset();
  if (adapter.max_rank() > max_rank_) {
    max_rank_ = adapter.max_rank();
    ++generation_;
  }
  return true;
}

bool AdapterBank::bring(const ModelConfig& config, DType compute, std::span<const AdapterRows> rows) {
  if (!ops::has_lora_index(ctx_)) return false;
  if (num_layers_ != config.num_layers || compute_ != compute) {
    num_layers_ = config.num_layers;
    compute_ = compute;
    slots_.clear();
    has_entries_.assign(static_cast<std::size_t>(num_layers_) * kAdaptedBlocks.size(), false);
    shapes_.clear();
    single_ = Tensor::empty(ctx_.runtime, {static_cast<std::int64_t>(has_entries_.size() * ops::kLoraEntryBytes)}, DType::kU8);
    single_slot_.reset();
    signals_ = Tensor::empty(ctx_.runtime, {static_cast<std::int64_t>(has_entries_.size())}, DType::kI32);
    ctx_.runtime->zero(signals_.data(), signals_.num_bytes());
    ++generation_;
  }
  ++num_steps_;
  for (const AdapterRows& of : rows)
    if (const auto slot = slot_of(of.adapter)) slots_[*slot].last_use = num_steps_;
  for (const AdapterRows& of : rows) {
    if (slot_of(of.adapter)) continue;
    const std::size_t slot = free_slot();
    slots_[slot].adapter.reset();
    if (!write(slot, *of.adapter)) return false;
    slots_[slot].last_use = num_steps_;
  }
  return true;
}

void AdapterBank::append_tiles(std::vector<std::int32_t>& tiles, std::span<const AdapterRows> rows) const {
  for (const AdapterRows& of : rows) {
    const auto slot = slot_of(of.adapter);
    PRL_CHECK(slot.has_value(), "an adapter of the step is in no slot");
    ops::append_lora_tiles(tiles, static_cast<std::int32_t>(*slot), of.rows);
  }
}

std::optional<ops::LoraIndex> AdapterBank::index(Block matrix, std::int64_t layer, const AdapterTiles& tiles) const {
  const auto found = std::ranges::find(kAdaptedBlocks, matrix);
  if (found == kAdaptedBlocks.end() || layer < 0 || layer >= num_layers_) return std::nullopt;
  const std::size_t at = entry_index(layer, static_cast<std::size_t>(found - kAdaptedBlocks.begin()));
  if (!has_entries_[at]) return std::nullopt;
  const auto entry_bytes = static_cast<std::int64_t>(ops::kLoraEntryBytes), first = static_cast<std::int64_t>(at) * entry_bytes;
  ops::LoraIndex out{.entries = table_.view().columns(first, entry_bytes),
                     .tiles = tiles.tiles,
                     .max_rank = max_rank_,
                     .signal = signals_.slice(static_cast<std::int64_t>(at), 1).view()};
  if (tiles.single == nullptr) return out;
  out.single = tiles.single->find(matrix, layer);
  out.single_entry = single_.slice(first, entry_bytes).view();
  return out.single != nullptr ? std::optional(out) : std::nullopt;
}

void AdapterBank::use_single(const Adapter& adapter) {
  const auto slot = slot_of(&adapter);
  PRL_CHECK(slot.has_value(), "an adapter of the step is in no slot");
  if (single_slot_ == slot) return;
  ctx_.runtime->copy_within(single_.data(), static_cast<const std::byte*>(table_.data()) + *slot * single_.num_bytes(),
                            single_.num_bytes());
  single_slot_ = slot;
}

std::size_t AdapterBank::shape_of(const Adapter& adapter) const {
  const auto slot = slot_of(&adapter);
  PRL_CHECK(slot.has_value(), "an adapter of the step is in no slot");
  return slots_[*slot].shape;
}

}  // namespace prl::nn
