#include "vision/prompt.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::vision {

std::vector<wire::PromptImage> place_images(const ImageProcessor& processor, std::int32_t placeholder,
                                            std::span<const std::shared_ptr<const wire::ImagePixels>> images,
                                            std::vector<std::int32_t>& ids) {
  if (const auto num_places = std::ranges::count(ids, placeholder); num_places != static_cast<std::ptrdiff_t>(images.size()))
    fail(ErrorCode::kInvalidArgument,
         "{} images and {} placeholders of images in the rendered text; it may not hold the placeholder's own text", images.size(),
         num_places);
  std::vector<wire::PromptImage> placed;
  std::vector<std::int32_t> wide;
  for (const std::int32_t id : ids) {
    if (id != placeholder) {
      wide.push_back(id);
      continue;
    }
    placed.push_back(processor.place(images[placed.size()], static_cast<std::int64_t>(wide.size())));
    wide.insert(wide.end(), static_cast<std::size_t>(placed.back().num_tokens()), id);
  }
  ids = std::move(wide);
  return placed;
}

}  // namespace prl::vision
