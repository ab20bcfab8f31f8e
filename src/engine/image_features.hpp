#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "engine/step_plan.hpp"
#include "nn/decoder.hpp"
#include "nn/vision_tower.hpp"

namespace prl::engine {

/// What the tokens of images enter a step as: features that a tower gives once for each picture and that are kept for the next parts of
/// its prompt, and for other prompts with it. They depend on the picture and the weights alone, so that what is forgotten comes again with
/// the same bits. One thread.
class ImageFeatures {
 public:
  /// Bytes of features beyond which those that were used longest ago are forgotten; those of a step stay until the next.
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;

  explicit ImageFeatures(ops::OpContext& ctx) : ctx_(ctx) {}
  /// The step's rows, by the first row of each of the plan's rows in the batch; computes what is not there. `tower` is that of the
  /// weights in use: those of another are forgotten. Error{kNotImplemented} if a row has tokens of an image and there is none.
  std::span<const nn::FeatureRows> of_step(const StepPlan& plan, std::span<const std::int32_t> query_start, const nn::VisionTower* tower);
  std::int64_t num_computed() const noexcept { return num_computed_; }

 private:
  struct Entry {
    std::array<std::uint64_t, 2> hash{};
    Tensor rows;
    std::uint64_t last_step = 0;
  };
  const Tensor& features_of(const wire::ImagePixels& pixels, const nn::VisionTower& tower);
  void forget_old();

  ops::OpContext& ctx_;
  const nn::VisionTower* tower_ = nullptr;
  std::list<Entry> entries_;  ///< what was used last comes first
  std::size_t num_bytes_ = 0;
  std::uint64_t step_ = 0;
  std::int64_t num_computed_ = 0;
  std::vector<nn::FeatureRows> rows_;
};

}  // namespace prl::engine
