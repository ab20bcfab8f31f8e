#pragma once

#include <array>
#include <cstdint>
#include <list>

#include "nn/vision_tower.hpp"

namespace prl::nn {

/// Features of pictures, which a tower gives once for each and which are kept for the next passes. They depend on the picture and the
/// weights alone, so that what is forgotten comes again with the same bits. One thread.
class FeatureCache {
 public:
  /// Bytes of features beyond which those that were used longest ago are forgotten; those of the last pass stay.
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;

  explicit FeatureCache(ops::OpContext& ctx, std::size_t most_bytes = kMostBytes) : ctx_(ctx), most_bytes_(most_bytes) {}
  /// What features() gives from now on is of `tower`, which is borrowed: features of another are forgotten. nullptr: of none.
  void begin_pass(const VisionTower* tower);
  /// Of a picture with that hash, which is of all that `image` has. Stays until begin_pass().
  const Tensor& features(const std::array<std::uint64_t, 2>& hash, const TowerImage& image);
  std::int64_t num_computed() const noexcept { return num_computed_; }

 private:
  struct Entry {
    std::array<std::uint64_t, 2> hash{};
    Tensor rows;
    std::uint64_t last_pass = 0;  ///< that used it
  };

  ops::OpContext& ctx_;
  const std::size_t most_bytes_;
  const VisionTower* tower_ = nullptr;
  std::list<Entry> entries_;  ///< what was used last comes first
  std::size_t num_bytes_ = 0;
  std::uint64_t pass_ = 0;
  std::int64_t num_computed_ = 0;
};

}  // namespace prl::nn
