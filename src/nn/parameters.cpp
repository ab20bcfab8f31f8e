#include "nn/parameters.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::nn {

namespace {

/// Of a table that cannot be divided but for its matrix that is head and embedding, if that is to be.
std::vector<GradSection> undivided_sections(const TensorTable& table, bool splits_tied) {
  const std::int64_t end = table.num_master_elements();
  if (!splits_tied || !table.has_tied_head()) return {{GradSection::kRest, {0, end}}};
  const ElementRange tied = table.blocks()[table.find(Block::kEmbedding)].range();
  return {{GradSection::kHead, tied},
          {GradSection::kEmbedding, tied, true},
          {GradSection::kAdapters, {tied.end, end}},
          {GradSection::kRest, {0, tied.begin}}};
}

}  // namespace

std::vector<ExpertSection> expert_sections(const TensorTable& table) {
  std::vector<ExpertSection> sections;
  for (const GradSection& layer : grad_sections(table)) {
    if (layer.layer < 0) continue;
    ExpertSection section{layer.layer, {}};
    for (const BlockSpec& block : table.blocks())
      if (block.kind == Block::kGateUp && block.layer == layer.layer && block.expert >= 0) section.begin_of.push_back(block.offset);
    if (section.begin_of.empty()) continue;
    section.begin_of.push_back(layer.range.end);
    for (const BlockSpec& block : table.blocks())
      PRL_CHECK(block.layer != layer.layer || !block.is_matrix() || (block.expert >= 0) == (block.offset >= section.begin_of.front()),
                "the matrices of layer {} do not end with those of its experts", layer.layer);
    sections.push_back(std::move(section));
  }
  std::ranges::sort(sections, {}, &ExpertSection::layer);
  return sections;
}

std::vector<GradSection> grad_sections(const TensorTable& table, bool splits_tied, bool experts_apart) {
  if (experts_apart) {
    std::vector<GradSection> sections = grad_sections(table, splits_tied);
    for (const ExpertSection& experts : expert_sections(table))
      std::ranges::find(sections, experts.layer, &GradSection::layer)->range.end = experts.range().begin;
    return sections;
  }
  const std::vector<GradSection> whole = undivided_sections(table, splits_tied);
  // Ranges from one section to the next, in memory: vectors and what lies outside of layers, the layers, the head.
  std::vector<GradSection> sections{{GradSection::kRest, {0, 0}}};
  std::vector<const BlockSpec*> blocks;
  for (const BlockSpec& block : table.blocks())
    if (block.trainable && block.is_matrix()) blocks.push_back(&block);
  std::ranges::sort(blocks, {}, [](const BlockSpec* block) { return block->offset; });
  const auto section_of = [](const BlockSpec& block) {
    if (block.kind == Block::kLmHead) return GradSection::kHead;
    return block.layer < 0 ? GradSection::kRest : block.layer;
  };
  for (const BlockSpec* block : blocks) {
    if (is_lora(block->kind)) return whole;
    const std::int64_t layer = section_of(*block);
    if (layer == sections.back().layer) continue;
    if (std::ranges::count(sections, layer, &GradSection::layer) > 0) return whole;
    sections.back().range.end = block->offset;
    sections.push_back({layer, {block->offset, block->offset}});
  }
  sections.back().range.end = table.num_master_elements();
  if (std::ranges::none_of(sections, [](const GradSection& section) { return section.layer >= 0; })) return whole;
  if (splits_tied && table.has_tied_head()) {
    const ElementRange tied = table.blocks()[table.find(Block::kEmbedding)].range();
    const auto rest = std::ranges::find(sections, GradSection::kRest, &GradSection::layer);
    PRL_CHECK(rest->range.end == tied.end, "the embedding lies at {}, other matrices up to {}", tied.end, rest->range.end);
    rest->range.end = tied.begin;
    sections.push_back({GradSection::kHead, tied});
    sections.push_back({GradSection::kEmbedding, tied, true});
  }
  // Backward: the head first, the rest last.
  std::ranges::sort(sections, {}, [](const GradSection& section) {
    constexpr std::int64_t kLast = std::int64_t{1} << 40;
    if (section.layer == GradSection::kHead) return -kLast;
    if (section.layer == GradSection::kEmbedding) return kLast - 1;
    return section.layer == GradSection::kRest ? kLast : -section.layer;
  });
  return sections;
}

std::vector<ElementRange> stepwise_ranges(const TensorTable& table) {
  std::vector<ElementRange> ranges;
  for (const GradSection& section : grad_sections(table))
    if (section.layer < 0 && section.range.count() > 0) ranges.push_back(section.range);
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  return ranges;
}

std::vector<ElementRange> exact_ranges(const TensorTable& table) {
  std::vector<ElementRange> ranges;
  for (const TensorSpec& spec : table.tensors())
    if (spec.is_exact() && spec.trainable) ranges.push_back(spec.range());
  std::ranges::sort(ranges, {}, &ElementRange::begin);
  return ranges;
}

const Tensor& Parameters::all_grads() const {
  PRL_CHECK(!divides_grads(), "all gradients where those of layers share their memory");
  static const Tensor kUndefined;
  return section_grads_.empty() ? kUndefined : section_grads_.front();
}

void Parameters::divide_grads(bool by_section, bool splits_tied, int num_places, bool experts_apart) {
  PRL_CHECK(by_section || !experts_apart, "gradients of experts lie apart where gradients are divided");
  const bool splits_now = std::ranges::any_of(sections_, &GradSection::is_second);
  const bool is_alike =
      (splits_tied == splits_now || !table()->has_tied_head()) && num_places == num_places_ && experts_apart == experts_apart_;
  if (by_section == divides_grads() && (!by_section || is_alike)) return;
  num_places_ = num_places;
  experts_apart_ = experts_apart;
  section_grads_.clear();
  grads_of_blocks_.clear();
  tied_head_grad_ = {};
  for (NamedParameter& p : named()) p.grad = {};
  sections_ = {{GradSection::kRest, {0, table()->num_master_elements()}}};
  if (by_section) sections_ = grad_sections(*table(), splits_tied, experts_apart);
  ensure_grads();
}

void Parameters::section_is_done(std::int64_t layer) const {
  if (!hook_ || !divides_grads()) return;
  const auto found = std::ranges::find(sections_, layer, &GradSection::layer);
  if (found != sections_.end()) hook_(static_cast<std::size_t>(found - sections_.begin()));
}

void Parameters::ensure_grads() {
  if (!section_grads_.empty()) return;
  std::int64_t longest = 0;
  for (const GradSection& section : sections_)
    if (section.layer >= 0) longest = std::max(longest, section.range.count());
  const Tensor of_layers = Tensor::zeros(runtime(), {num_places_ * longest}, DType::kF32);
  grads_of_blocks_.assign(table()->blocks().size(), Tensor());
  for (const GradSection& section : sections_) {
    const std::int64_t n = section.range.count();
    const Tensor memory =
        section.layer >= 0 ? of_layers.slice(section.layer % num_places_ * longest, n) : Tensor::zeros(runtime(), {n}, DType::kF32);
    section_grads_.push_back(memory);
    const bool has_second = std::ranges::any_of(
        sections_, [&](const GradSection& other) { return other.is_second && !section.is_second && other.range == section.range; });
    if (has_second) {
      tied_head_grad_ = memory.reshaped(table()->blocks()[table()->find(Block::kEmbedding)].shape);
      continue;
    }
    const std::vector<Tensor> of_section = cut(memory, section.range);
    for (std::size_t i = 0; i < of_section.size(); ++i)
      if (of_section[i].defined()) grads_of_blocks_[i] = of_section[i];
    for (NamedParameter& p : named())
      if (section.range.contains(p.range())) p.grad = memory.slice(p.offset - section.range.begin, p.num_elements()).reshaped(p.shape);
  }
}

void Parameters::lend_expert_grads(ElementRange range, const Tensor& memory) {
  PRL_CHECK(experts_apart_ && (!memory.defined() || memory.num_elements() == range.count()), "memory for gradients of experts");
  const std::span<const BlockSpec> blocks = table()->blocks();
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i].expert >= 0 && range.contains(blocks[i].range()))
      grads_of_blocks_[i] = memory.defined()
                                ? memory.slice(blocks[i].offset - range.begin, blocks[i].shape.num_elements()).reshaped(blocks[i].shape)
                                : Tensor();
}

void Parameters::freeze(Block kind) {
  if (std::exchange(frozen_kinds_[static_cast<std::size_t>(kind)], true)) return;
  for (const BlockSpec& block : table()->blocks())
    if (block.kind == kind && block.trainable) frozen_.push_back(block.range());
  std::ranges::sort(frozen_, {}, &ElementRange::begin);
}

void Parameters::zero_grads() {
  ensure_grads();
  for (const Tensor& grads : section_grads_) runtime()->zero(grads.data(), grads.num_bytes());
  grads_are_fresh_ = false;
}

void Parameters::start_grads() {
  ensure_grads();
  // Backward passes only ever add to vectors, and to the embedding unless it is the head too.
  // They lie at the beginning of the section that comes last.
  runtime()->zero(section_grads_.back().data(), static_cast<std::size_t>(table()->num_vector_elements()) * sizeof(float));
  if (const Tensor& d_embedding = grad(Block::kEmbedding);
      d_embedding.defined() && (!table()->has_tied_head() || tied_head_grad_.defined()))
    runtime()->zero(d_embedding.data(), d_embedding.num_bytes());
  grads_are_fresh_ = true;
  keeps_layers_ = false;
}

void Parameters::start_next_row() {
  PRL_CHECK(!divides_grads(), "a section's gradients are of one row");
  start_grads();
  keeps_layers_ = stepwise_grads_.size() != 1 || stepwise_grads_.front().count() < table()->num_master_elements();
}

void Parameters::settle_grads() {
  if (grads_are_fresh_) zero_grads();
}

}  // namespace prl::nn
