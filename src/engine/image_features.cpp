#include "engine/image_features.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::engine {

std::span<const nn::FeatureRows> ImageFeatures::of_step(const StepPlan& plan, std::span<const std::int32_t> query_start,
                                                        const nn::VisionTower* tower) {
  cache_.begin_pass(tower);
  rows_.clear();
  for (std::size_t r = 0; r < plan.rows.size(); ++r) {
    const PlanRow& row = plan.rows[r];
    for (const wire::PromptImage& image : row.sequence->request->images) {
      const std::int64_t begin = std::max(row.first_token, image.first), end = std::min(row.first_token + row.num_tokens, image.end());
      if (begin >= end) continue;
      if (tower == nullptr)
        fail(ErrorCode::kNotImplemented, "request {} has images, and the weights in use have no vision tower",
             row.sequence->request_id.value);
      const wire::ImagePixels& p = *image.pixels;
      const Tensor& all = cache_.features(p.hash, {p.rgb, p.height, p.width, p.mean, p.deviation});
      rows_.push_back({.rows_NH = all.view().rows(begin - image.first, end - begin), .first = query_start[r] + begin - row.first_token});
    }
  }
  return rows_;
}

}  // namespace prl::engine
