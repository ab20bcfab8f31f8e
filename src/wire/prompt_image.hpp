#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace prl::wire {

/// A picture that has been brought to the size at which a vision tower takes it.
struct ImagePixels {
  std::vector<std::uint8_t> rgb;  ///< [height, width, 3]
  std::int64_t height = 0, width = 0;
  std::array<float, 3> mean{}, deviation{};  ///< of red, green, blue: a value enters as (byte - mean) / deviation
  std::array<std::uint64_t, 2> hash{};       ///< hash_of() all of the above
};
std::array<std::uint64_t, 2> hash_of(const ImagePixels& pixels) noexcept;

/// An image within a prompt: its tokens stand from `first` on, row after row of a grid, all of them the model's placeholder.
struct PromptImage {
  std::shared_ptr<const ImagePixels> pixels;
  std::int64_t first = 0, rows = 0, cols = 0;
  std::int64_t num_tokens() const noexcept { return rows * cols; }
  std::int64_t end() const noexcept { return first + num_tokens(); }
};

/// What a token of a prompt with images (ascending) turns with in time, height and width, as Qwen's models count: an image takes as many
/// positions as its longer side has tokens.
inline std::array<std::int32_t, 3> rope_position(std::span<const PromptImage> images, std::int64_t token) noexcept {
  std::int64_t position = token;
  for (const PromptImage& image : images) {
    if (image.first > token) break;
    if (token < image.end()) {
      const std::int64_t base = position - (token - image.first), within = token - image.first;
      return {static_cast<std::int32_t>(base), static_cast<std::int32_t>(base + within / image.cols),
              static_cast<std::int32_t>(base + within % image.cols)};
    }
    position += (image.rows > image.cols ? image.rows : image.cols) - image.num_tokens();
  }
  const auto same = static_cast<std::int32_t>(position);
  return {same, same, same};
}

/// Of tokens [0, num_tokens) of a prompt with images, one axis behind the other: [3, num_tokens].
std::vector<std::int32_t> rope_positions(std::span<const PromptImage> images, std::int64_t num_tokens);

/// Where a sequence with these images can be cut so that at most `num_tokens` are left and no image is divided.
std::int64_t uncut_length(std::span<const PromptImage> images, std::int64_t num_tokens) noexcept;

}  // namespace prl::wire
