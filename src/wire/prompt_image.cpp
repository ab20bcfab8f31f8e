#include "wire/prompt_image.hpp"

#include "base/files.hpp"

namespace prl::wire {

std::array<std::uint64_t, 2> hash_of(const ImagePixels& pixels) noexcept {
  const std::uint64_t of_numbers = hash_bytes(std::as_bytes(std::span(pixels.deviation)),
                                              hash_bytes(std::as_bytes(std::span(pixels.mean)), static_cast<std::uint64_t>(pixels.width)));
  std::array<std::uint64_t, 2> hash{};
  for (std::uint64_t i = 0; i < hash.size(); ++i) hash[i] = hash_bytes(std::as_bytes(std::span(pixels.rgb)), of_numbers + i);
  return hash;
}

std::vector<std::int32_t> rope_positions(std::span<const PromptImage> images, std::int64_t num_tokens) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(3 * num_tokens));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::array<std::int32_t, 3> at = rope_position(images, token);
    for (std::size_t axis = 0; axis < at.size(); ++axis)
      out[axis * static_cast<std::size_t>(num_tokens) + static_cast<std::size_t>(token)] = at[axis];
  }
  return out;
}

std::int64_t uncut_length(std::span<const PromptImage> images, std::int64_t num_tokens) noexcept {
  for (const PromptImage& image : images)
    if (image.first < num_tokens && num_tokens < image.end()) return image.first;
  return num_tokens;
}

}  // namespace prl::wire
