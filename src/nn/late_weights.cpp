#include "nn/late_weights.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "nn/weight_blocks.hpp"

namespace prl::nn {

LateWeights::LateWeights(ops::OpContext& ctx, const Parameters& parameters, DType compute, PolicyVersion version, bool with_backward,
                         const WeightsPtr& previous, LateValues late)
    : ctx_(ctx),
      with_backward_(with_backward),
      late_(std::move(late)),
      weights_(start_weights(ctx, parameters.config(), parameters.table(), compute, version, previous)),
      num_parts_(late_.parts.size()) {
  const TensorTable& table = *weights_->table;
  PRL_CHECK(num_parts_ > 0 && late_.parts[0].contains({0, table.num_vector_elements()}), "late weights whose vectors do not come first");
  num_wanted_.assign(static_cast<std::size_t>(parameters.config().num_layers), num_first_);
  for (const BlockSpec& block : table.blocks()) {
    if (!block.is_matrix()) continue;
    const auto part = std::ranges::find_if(late_.parts, [&](ElementRange range) { return range.contains(block.range()); });
    PRL_CHECK(part != late_.parts.end(), "no part of late weights has elements [{}, {})", block.range().begin, block.range().end);
    const auto wanted = static_cast<std::size_t>(part - late_.parts.begin()) + 1;
    if (block.layer >= 0)
      for (std::int64_t layer = std::max<std::int64_t>(block.layer - 1, 0); layer <= block.layer; ++layer)
        num_wanted_[static_cast<std::size_t>(layer)] = std::max(num_wanted_[static_cast<std::size_t>(layer)], wanted);
    else if (block.kind != Block::kLmHead)
      num_first_ = std::max(num_first_, wanted);
  }
  if (num_wanted_.empty()) num_first_ = num_parts_;
  // The head follows the last layer.
  if (!num_wanted_.empty()) num_wanted_.back() = num_parts_;
  if (ops::shares_weights(ctx)) weights_->flat = late_.values;
  weights_->layers = this;
  shared_ = weights_;
}

LateWeights::~LateWeights() { weights_->layers = nullptr; }

void LateWeights::bring(std::size_t n) {
  while (num_arrived_ < n) {
    late_.await(num_arrived_);
    if (slicer_ == nullptr) slicer_ = std::make_unique<Slicer>(ctx_, *weights_->table, late_.values, with_backward_);
    fill_weights(*weights_, ctx_, with_backward_, *slicer_, late_.parts[num_arrived_]);
    ++num_arrived_;
  }
  if (!is_complete()) return;
  weights_->layers = nullptr;
  slicer_.reset();
  late_ = {};
}

void LateWeights::enter(std::int64_t layer, std::int64_t) {
  if (!is_complete()) bring(num_wanted_[static_cast<std::size_t>(layer)]);
}

}  // namespace prl::nn
