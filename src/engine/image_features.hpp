#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_plan.hpp"
#include "nn/decoder.hpp"
#include "nn/feature_cache.hpp"

namespace prl::engine {

/// What the tokens of images enter a step as, which are kept for the next parts of their prompts, and for other prompts with them. One
/// thread.
class ImageFeatures {
 public:
  explicit ImageFeatures(ops::OpContext& ctx) : cache_(ctx) {}
  /// The step's rows, by the first row of each of the plan's rows in the batch; computes what is not there. `tower` is that of the
  /// weights in use: features of another are forgotten. Error{kNotImplemented} if a row has tokens of an image and there is none.
  std::span<const nn::FeatureRows> of_step(const StepPlan& plan, std::span<const std::int32_t> query_start, const nn::VisionTower* tower);

 private:
  nn::FeatureCache cache_;
  std::vector<nn::FeatureRows> rows_;
};

}  // namespace prl::engine
