#include "trainer/sft/row_packer.hpp"

#include <limits>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

void append(wire::MicroBatch& row, const SftSample& sample, const std::string& part) {
  const std::size_t n = sample.ids.size(), first = row.input_ids.size();
  row.input_ids.insert(row.input_ids.end(), sample.ids.begin(), sample.ids.end());
  for (std::size_t i = 0; i < n; ++i) {
    row.position_ids.push_back(static_cast<std::int32_t>(i));
    row.ce_weights.push_back(i > 0 && sample.mask[i] != 0 ? 1.0f : 0.0f);
  }
  row.loss_mask.resize(first + n, 0);
  row.advantages.resize(first + n, 0.0f);
  row.inference_logprobs.resize(first + n, 0.0f);
  row.temperatures.resize(first + n, 1.0f);
  row.sequence_lengths.push_back(static_cast<std::int32_t>(n));
  row.env_names.push_back(part);
}

}  // namespace

RowPacker::RowPacker(SampleStream& stream, std::int64_t capacity, std::int64_t position)
    : stream_(stream), part_names_(stream.part_names()), capacity_(capacity), position_(position) {
  if (capacity < 2)
    fail(ErrorCode::kInvalidArgument,
         "[data.seq_len] rows of {} tokens cannot be trained on: the first token of a sample is predicted by nothing", capacity);
}

std::optional<wire::MicroBatch> RowPacker::next_until(std::int64_t end) {
  wire::MicroBatch row;
  std::int64_t num_skipped = 0;
  while (position_ < end && static_cast<std::int64_t>(row.input_ids.size()) < capacity_) {
    const auto sample = stream_.at(position_, capacity_);
    if (!sample) {
      ++position_;
      if (++num_skipped >= stream_.epoch_size())
        fail(ErrorCode::kInvalidArgument,
             "[data] none of the {} rows has a token to train on within the first {}: check data.loss_mask and data.seq_len",
             stream_.epoch_size(), capacity_);
      continue;
    }
    num_skipped = 0;
    if (static_cast<std::int64_t>(row.input_ids.size() + sample->ids.size()) > capacity_) break;
    append(row, *sample, part_names_[sample->part]);
    ++position_;
  }
  if (row.input_ids.empty()) return std::nullopt;
  return row;
}

wire::MicroBatch RowPacker::next() { return *next_until(std::numeric_limits<std::int64_t>::max()); }

}  // namespace prl::trainer
