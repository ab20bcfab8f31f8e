#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "vision/image.hpp"
#include "wire/prompt_image.hpp"

namespace prl::vision {

/// How a model wants pictures: preprocessor_config.json of its folder, of Qwen's processors.
struct ProcessorConfig {
  std::int64_t patch_size = 14, temporal_patch_size = 2, merge_size = 2;
  std::int64_t min_pixels = 56 * 56, max_pixels = 28 * 28 * 1280;  ///< of a picture at the tower's size
  bool resizes = true;
  /// Of bytes: (byte - mean) / deviation.
  std::array<float, 3> mean{}, deviation{};
};

struct PictureSize {
  std::int64_t height = 0, width = 0;
  bool operator==(const PictureSize&) const = default;
};

/// Brings pictures to the size and the numbers that a vision tower takes, as transformers' Qwen2VLImageProcessor does by torchvision.
/// Threads  immutable.
class ImageProcessor {
 public:
  /// <folder>/preprocessor_config.json. Error{kNotFound|kCorrupt|kNotImplemented} names the file and the key.
  static ImageProcessor load(const std::filesystem::path& folder);
  explicit ImageProcessor(const ProcessorConfig& config) : config_(config) {}
  const ProcessorConfig& config() const noexcept { return config_; }
  /// Error{kInvalidArgument} for a picture whose sides differ by more than 200 times.
  std::shared_ptr<const wire::ImagePixels> process(const Image& image) const;
  /// A picture that was brought to its size before, by a processor like this. Error{kInvalidArgument} for sides that are no multiples of a
  /// token's, or more pixels than such a processor makes.
  std::shared_ptr<const wire::ImagePixels> take(Image image) const;
  /// The grid of tokens of a processed picture.
  wire::PromptImage place(std::shared_ptr<const wire::ImagePixels> pixels, std::int64_t first) const;

 private:
  void require_whole_tokens(const PictureSize& size, const Image& image) const;
  ProcessorConfig config_;
};

/// The nearest size of sides that are multiples of `factor` with about the same proportions and pixels between the bounds.
PictureSize smart_resize(PictureSize from, std::int64_t factor, std::int64_t min_pixels, std::int64_t max_pixels);

}  // namespace prl::vision
