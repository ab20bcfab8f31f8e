#include "trainer/row_images.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::trainer {

void RowImages::check(const wire::MicroBatch& row) const {
  const auto env_of = [&](std::int64_t token) -> const std::string& {
    std::size_t s = 0;
    for (std::int64_t end = row.sequence_lengths[0]; token >= end; end += row.sequence_lengths[s]) ++s;
    return row.env_names[s];
  };
  if (tower_ == nullptr)
    fail(ErrorCode::kNotImplemented,
         "a sample of '{}' has images, and the trainer computes with text alone: set model.vlm (of a model with a vision tower)",
         env_of(row.images.front().first));
  const nn::VisionConfig& vision = tower_->config();
  const std::int64_t side = vision.patch_size * vision.merge_size;
  for (const wire::PromptImage& image : row.images) {
    if (image.pixels->height != image.rows * side || image.pixels->width != image.cols * side)
      fail(ErrorCode::kInvalidArgument,
           "an image of '{}' has {} x {} pixels for a grid of {} x {} tokens; each token of the vision tower of {} is {} x {} pixels: "
           "was it brought to its size for another model?",
           env_of(image.first), image.pixels->width, image.pixels->height, image.rows, image.cols, vision.folder.string(), side, side);
    for (std::int64_t token = image.first; token < image.end(); ++token)
      if (const std::int32_t id = row.input_ids[static_cast<std::size_t>(token)]; id != vision.image_token_id)
        fail(ErrorCode::kInvalidArgument, "an image of '{}' stands on token {} of a row, which is id {}, wanted the placeholder {}",
             env_of(image.first), token, id, vision.image_token_id);
  }
}

/// Padding behind a sequence counts from 0 again, and turns as text does.
void RowImages::set_positions(const wire::MicroBatch& row, std::span<const std::int32_t> plain) {
  positions_3T_.clear();
  for (int axis = 0; axis < 3; ++axis) positions_3T_.insert(positions_3T_.end(), plain.begin(), plain.end());
  std::int64_t begin = 0;
  auto image = row.images.begin();
  for (const std::int32_t length : row.sequence_lengths) {
    std::vector<wire::PromptImage> of_sequence;
    for (; image != row.images.end() && image->first < begin + length; ++image) {
      of_sequence.push_back(*image);
      of_sequence.back().first -= begin;
    }
    for (std::int64_t i = 0; i < length && !of_sequence.empty(); ++i) {
      const auto token = static_cast<std::size_t>(begin + i);
      if (plain[token] != i) break;
      const std::array<std::int32_t, 3> at = wire::rope_position(of_sequence, i);
      for (std::size_t axis = 0; axis < at.size(); ++axis) positions_3T_[axis * plain.size() + token] = at[axis];
    }
    begin += length;
  }
}

void RowImages::add(const wire::MicroBatch& row, nn::PackedBatch& batch) {
  if (row.images.empty()) return;
  check(row);
  if (batch.exchange != nullptr) fail(ErrorCode::kNotImplemented, "model.cp: devices cannot share rows with images yet; set it to 1");
  set_positions(row, batch.positions_T);
  cache_.begin_pass(tower_.get());
  features_.clear();
  for (const wire::PromptImage& image : row.images) {
    const wire::ImagePixels& p = *image.pixels;
    const Tensor& rows = cache_.features(p.hash, {p.rgb, p.height, p.width, p.mean, p.deviation});
    features_.push_back({.rows_NH = rows.view(), .first = image.first});
  }
  batch.features = features_;
  batch.rope_positions_3T = positions_3T_;
}

}  // namespace prl::trainer
