#pragma once

#include <cstdint>
#include <filesystem>

namespace prl::nn {

/// The vision tower of a model as `vision_config` describes it (Qwen 3.5): a transformer over the patches of one image.
struct VisionConfig {
  std::int64_t num_layers = 27, hidden_size = 1152, intermediate_size = 4304, num_heads = 16;
  std::int64_t patch_size = 16;       ///< pixels of a patch's side
  std::int64_t temporal_patch = 2;    ///< frames of a patch; an image is as many like ones
  std::int64_t merge_size = 2;        ///< patches of the side of a square that becomes one token
  std::int64_t output_size = 0;       ///< the decoder's hidden_size
  std::int64_t num_positions = 2304;  ///< learned, of a square grid
  double rope_theta = 10000.0;
  std::int32_t image_token_id = -1;  ///< the placeholder of a token of an image
  /// Parts of a head's pairs that turn with height and width: ops::RopeSections.
  std::int64_t height_section = 11, width_section = 10;
  std::filesystem::path folder = {};  ///< whose files have the tower's tensors
  bool operator==(const VisionConfig&) const = default;

  std::int64_t head_dim() const noexcept { return hidden_size / num_heads; }
  /// Values of a patch: channel, frame, row, column.
  std::int64_t patch_values() const noexcept { return 3 * temporal_patch * patch_size * patch_size; }
  std::int64_t patches_of_token() const noexcept { return merge_size * merge_size; }
};

}  // namespace prl::nn
