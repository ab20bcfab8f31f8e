#include "nn/feature_cache.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::nn {

void FeatureCache::begin_pass(const VisionTower* tower) {
  if (tower != tower_) {
    entries_.clear();
    num_bytes_ = 0;
    tower_ = tower;
  }
  while (num_bytes_ > most_bytes_ && !entries_.empty() && entries_.back().last_pass != pass_) {
    num_bytes_ -= entries_.back().rows.num_bytes();
    entries_.pop_back();
  }
  ++pass_;
}

const Tensor& FeatureCache::features(const std::array<std::uint64_t, 2>& hash, const TowerImage& image) {
  PRL_CHECK(tower_ != nullptr, "features without a tower");
  auto found = std::ranges::find(entries_, hash, &Entry::hash);
  if (found == entries_.end()) {
    Tensor rows = tower_->features(ctx_, image);
    ++num_computed_;
    num_bytes_ += rows.num_bytes();
    entries_.push_front({.hash = hash, .rows = std::move(rows), .last_pass = pass_});
    found = entries_.begin();
  }
  found->last_pass = pass_;
  entries_.splice(entries_.begin(), entries_, found);
  return entries_.front().rows;
}

}  // namespace prl::nn
