#pragma once

#include <cstdint>
#include <vector>

#include "nn/decoder.hpp"
#include "nn/feature_cache.hpp"
#include "nn/model_config.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// What the images of rows enter a model as: features of a frozen tower, without gradient, which are those that an engine computes, bit for
/// bit, and positions on three axes. One thread.
class RowImages {
 public:
  /// Without a tower rows with images are refused.
  RowImages(ops::OpContext& ctx, nn::VisionTowerPtr tower) : tower_(std::move(tower)), cache_(ctx) {}
  /// Sets `features` and `rope_positions_3T` of a batch that begins with all tokens of `row`, if it has images; they hold until the next
  /// call. Error{kInvalidArgument} naming the environment for a grid that is not the tower's, or a token that is no placeholder;
  /// {kNotImplemented} if there is no tower.
  void add(const wire::MicroBatch& row, nn::PackedBatch& batch);
  const nn::VisionTowerPtr& tower() const noexcept { return tower_; }

 private:
  void check(const wire::MicroBatch& row) const;
  void set_positions(const wire::MicroBatch& row, std::span<const std::int32_t> plain);

  nn::VisionTowerPtr tower_;
  nn::FeatureCache cache_;
  std::vector<nn::FeatureRows> features_;
  std::vector<std::int32_t> positions_3T_;
};

}  // namespace prl::trainer
