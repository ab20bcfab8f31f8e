#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "nn/vision_config.hpp"
#include "nn/weight_files.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// One picture as a tower takes it: bytes of red, green and blue, row after row, of a size that whole squares of merged patches fill. A
/// value enters as (byte - mean) / deviation.
struct TowerImage {
  std::span<const std::uint8_t> rgb;
  std::int64_t height = 0, width = 0;
  std::array<float, 3> mean{}, deviation{};
};

/// A vision tower ready to compute with: what an image's tokens enter the decoder as. Immutable, and frozen: no trainer changes it, so that
/// weights without a tower leave the one that is there.
///
/// Numerics  as the decoder's: products in the compute dtype with sums in fp32, norms and softmax in fp32; position embeddings are
///           interpolated in fp32. Features depend on the image and the weights alone, not on other images.
/// Threads   any number, each with a context of its own.
class VisionTower {
 public:
  /// From the files of a Hugging Face folder; nullptr if they have no tower. Error{kCorrupt} naming file and tensor if one is missing, has
  /// another shape or no float type, holds anything but finite numbers, or is no part of such a tower.
  static std::shared_ptr<const VisionTower> load(ops::OpContext& ctx, const VisionConfig& config, const std::filesystem::path& folder,
                                                 DType compute);
  /// [num_tokens(image), output_size] in the compute dtype, the tokens row after row. What is computed is queued.
  Tensor features(ops::OpContext& ctx, const TowerImage& image) const;
  const VisionConfig& config() const noexcept { return config_; }
  DType compute() const noexcept { return compute_; }
  std::size_t num_bytes() const noexcept { return num_bytes_; }

 private:
  friend class TowerLoader;
  struct Norm {
    Tensor weight, bias;
  };
  struct Layer {
    Norm norm1, norm2;
    ops::LinearWeightPtr qkv, proj, fc1, fc2;
  };
  VisionTower() = default;
  Tensor embed_patches(ops::OpContext& ctx, const TowerImage& image) const;
  ops::RopeTable rope_of(ops::OpContext& ctx, std::int64_t rows, std::int64_t cols) const;
  void run_layer(ops::OpContext& ctx, const Layer& layer, const Tensor& x, const ops::RopeTable& rope, const Tensor& positions) const;

  VisionConfig config_;
  DType compute_ = DType::kF32;
  std::int64_t padded_dim_ = 0;  ///< of heads: the smallest size that there are kernels for
  std::size_t num_bytes_ = 0;
  std::vector<float> positions_;  ///< [num_positions, hidden_size], values of the compute dtype
  ops::LinearWeightPtr patches_, merge1_, merge2_;
  Norm merge_norm_;
  std::vector<Layer> layers_;
};
using VisionTowerPtr = std::shared_ptr<const VisionTower>;

/// What the weights of a tower take, and at most what an image of `num_tokens` takes while its features are computed.
std::size_t tower_bytes(const VisionConfig& config, DType compute) noexcept;
std::size_t tower_pass_bytes(const VisionConfig& config, std::int64_t num_tokens, DType compute) noexcept;

/// The tensors of the tower in `config.folder` as they are to be saved: the same values, fp32 ones in files of any type.
/// Error{kNotFound|kCorrupt}.
std::vector<WeightSource> tower_sources(const VisionConfig& config);

}  // namespace prl::nn
