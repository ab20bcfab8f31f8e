#include "engine/image_keys.hpp"

#include <span>

#include "base/files.hpp"

namespace prl::engine {

namespace {

/// `hash_of` an image: what tells it from others.
template <typename Image, typename HashOf>
BlockHash chain_images(std::span<const Image> images, BlockHash before, std::int64_t first, std::int64_t count, HashOf hash_of) noexcept {
  for (const Image& image : images)
    if (image.first >= first && image.first < first + count) before = {hash_bytes(std::as_bytes(std::span(hash_of(image))), before.value)};
  return before;
}

}  // namespace

BlockHash link_of_block(const Sequence& sequence, BlockHash before, std::int64_t first, std::int64_t count) noexcept {
  return chain_images(
      std::span<const wire::PromptImage>(sequence.request->images), before, first, count,
      [](const wire::PromptImage& image) -> const auto& { return image.pixels->hash; });
}

std::vector<ImageMark> marks_of(std::span<const wire::PromptImage> images) {
  std::vector<ImageMark> marks;
  for (const wire::PromptImage& image : images) marks.push_back({.first = image.first, .hash = image.pixels->hash});
  return marks;
}

BlockHash link_of_block(std::span<const ImageMark> images, BlockHash before, std::int64_t first, std::int64_t count) noexcept {
  return chain_images(
      images, before, first, count, [](const ImageMark& image) -> const auto& { return image.hash; });
}

}  // namespace prl::engine
