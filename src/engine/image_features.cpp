#include "engine/image_features.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::engine {

std::span<const nn::FeatureRows> ImageFeatures::of_step(const StepPlan& plan, std::span<const std::int32_t> query_start,
                                                        const nn::VisionTower* tower) {
  if (tower != tower_) {
    entries_.clear();
    num_bytes_ = 0;
    tower_ = tower;
  }
  ++step_;
  rows_.clear();
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    const PlanRow& row = plan.rows[r];
    for (const wire::PromptImage& image : row.sequence->request->images) {
      const std::int64_t begin = std::max(row.first_token, image.first), end = std::min(row.first_token + row.num_tokens, image.end());
      if (begin >= end) continue;
      if (tower == nullptr)
        fail(ErrorCode::kNotImplemented, "request {} has images, and the weights in use have no vision tower",
             row.sequence->request_id.value);
      const Tensor& all = features_of(*image.pixels, *tower);
      rows_.push_back({.rows_NH = all.view().rows(begin - image.first, end - begin), .first = query_start[r] + begin - row.first_token});
    }
  }
  forget_old();
  return rows_;
}

const Tensor& ImageFeatures::features_of(const wire::ImagePixels& pixels, const nn::VisionTower& tower) {
  auto found = std::ranges::find(entries_, pixels.hash, &Entry::hash);
  if (found == entries_.end()) {
    Tensor rows = tower.features(
        ctx_, {.rgb = pixels.rgb, .height = pixels.height, .width = pixels.width, .mean = pixels.mean, .deviation = pixels.deviation});
    ++num_computed_;
    num_bytes_ += rows.num_bytes();
    entries_.push_front({.hash = pixels.hash, .rows = std::move(rows)});
    found = entries_.begin();
  }
  found->last_step = step_;
  entries_.splice(entries_.begin(), entries_, found);
  return entries_.front().rows;
}

void ImageFeatures::forget_old() {
  while (num_bytes_ > kMostBytes && !entries_.empty() && entries_.back().last_step != step_) {
    num_bytes_ -= entries_.back().rows.num_bytes();
    entries_.pop_back();
  }
}

}  // namespace prl::engine
