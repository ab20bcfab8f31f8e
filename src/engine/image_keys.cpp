#include "engine/image_keys.hpp"

#include <span>

#include "base/files.hpp"

namespace prl::engine {

BlockHash link_of_block(const Sequence& sequence, BlockHash before, std::int64_t first, std::int64_t count) noexcept {
  for (const wire::PromptImage& image : sequence.request->images)
    if (image.first >= first && image.first < first + count)
      before = {hash_bytes(std::as_bytes(std::span(image.pixels->hash)), before.value)};
  return before;
}

std::vector<ImageMark> marks_of(std::span<const wire::PromptImage> images) {
  std::vector<ImageMark> marks;
  for (const wire::PromptImage& image : images) marks.push_back({.first = image.first, .hash = image.pixels->hash});
  return marks;
}

BlockHash link_of_block(std::span<const ImageMark> images, BlockHash before, std::int64_t first, std::int64_t count) noexcept {
  for (const ImageMark& image : images)
    if (image.first >= first && image.first < first + count) before = {hash_bytes(std::as_bytes(std::span(image.hash)), before.value)};
  return before;
}

}  // namespace prl::engine
