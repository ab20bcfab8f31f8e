#include "trainer/sft/row_packer.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

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
  for (wire::PromptImage image : sample.images) {
    image.first += static_cast<std::int64_t>(first);
    row.images.push_back(std::move(image));
  }
  row.loss_mask.resize(first + n, 0);
  row.advantages.resize(first + n, 0.0f);
  row.inference_logprobs.resize(first + n, 0.0f);
  row.temperatures.resize(first + n, 1.0f);
  row.sequence_lengths.push_back(static_cast<std::int32_t>(n));
  row.env_names.push_back(part);
}

/// A sequence of `count` tokens of which none is a target. All are at position 0, which every model has.
void fill_up(wire::MicroBatch& row, std::int64_t count) {
  if (count == 0) return;
  const auto n = static_cast<std::size_t>(count);
  append(row, {.ids = std::vector<std::int32_t>(n, 0), .mask = std::vector<std::uint8_t>(n, 0)}, {});
  std::fill(row.position_ids.end() - count, row.position_ids.end(), 0);
}

/// Samples of a stream in turn, without those that are skipped.
struct Taker {
  SampleStream& stream;
  std::int64_t capacity;
  std::int64_t num_skipped = 0;  ///< one after another

  /// The sample at `position`, unless it is skipped. Error{kInvalidArgument} if a whole epoch was.
  std::optional<SftSample> at(std::int64_t position) {
    std::optional<SftSample> sample = stream.at(position, capacity);
    num_skipped = sample ? 0 : num_skipped + 1;
    if (num_skipped >= stream.epoch_size())
      fail(ErrorCode::kInvalidArgument,
           "[data] none of the {} rows has a token to train on within the first {}: check data.loss_mask and data.seq_len",
           stream.epoch_size(), capacity);
    return sample;
  }
};

}  // namespace

wire::MicroBatch Packer::next() { return *next_until(std::numeric_limits<std::int64_t>::max()); }

std::unique_ptr<Packer> make_packer(config::PackFunction function, SampleStream& stream, std::int64_t capacity) {
  if (function == config::PackFunction::kStack) return std::make_unique<StackPacker>(stream, capacity);
  return std::make_unique<RowPacker>(stream, capacity);
}

RowPacker::RowPacker(SampleStream& stream, std::int64_t capacity, std::int64_t position)
    : stream_(stream), part_names_(stream.part_names()), capacity_(capacity), position_(position) {
  if (capacity < 2)
    fail(ErrorCode::kInvalidArgument,
         "[data.seq_len] rows of {} tokens cannot be trained on: the first token of a sample is predicted by nothing", capacity);
}

std::optional<wire::MicroBatch> RowPacker::next_until(std::int64_t end) {
  wire::MicroBatch row;
  Taker taker{stream_, capacity_};
  while (position_ < end && static_cast<std::int64_t>(row.input_ids.size()) < capacity_) {
    const auto sample = taker.at(position_);
    if (sample && static_cast<std::int64_t>(row.input_ids.size() + sample->ids.size()) > capacity_) break;
    ++position_;
    if (sample) append(row, *sample, part_names_[sample->part]);
  }
  if (row.input_ids.empty()) return std::nullopt;
  return row;
}

StackPacker::StackPacker(SampleStream& stream, std::int64_t capacity)
    : stream_(stream), part_names_(stream.part_names()), capacity_(capacity) {
  for (std::int64_t length = capacity; length > 0 && length % config::kStackUnit == 0; length /= 2)
    buckets_.insert(buckets_.begin(), Bucket{.length = length});
  if (buckets_.empty())
    fail(ErrorCode::kInvalidArgument,
         "[data.pack_function] 'stack' has rows whose tokens are a multiple of {}; data.micro_batch_size * data.seq_len is {}",
         config::kStackUnit, capacity);
}

StackPacker::Bucket& StackPacker::bucket_of(const SftSample& sample) {
  const auto length = static_cast<std::int64_t>(sample.ids.size());
  return *std::ranges::find_if(buckets_, [&](const Bucket& bucket) { return bucket.length >= length; });
}

StackPacker::Bucket* StackPacker::oldest() {
  Bucket* found = nullptr;
  for (Bucket& bucket : buckets_)
    if (!bucket.samples.empty() && (found == nullptr || bucket.samples.front().position < found->samples.front().position)) found = &bucket;
  return found;
}

wire::MicroBatch StackPacker::flush(Bucket& bucket) {
  std::vector<Waiting> samples = std::exchange(bucket.samples, {});
  std::int64_t length = bucket.length;
  for (Bucket* longer = &bucket + 1; longer != buckets_.data() + buckets_.size(); ++longer) {
    if (static_cast<std::int64_t>(samples.size() + longer->samples.size()) * longer->length > capacity_) break;
    if (longer->samples.empty()) continue;
    length = longer->length;
    std::ranges::move(std::exchange(longer->samples, {}), std::back_inserter(samples));
  }
  std::ranges::sort(samples, {}, &Waiting::position);
  wire::MicroBatch row;
  for (const Waiting& waiting : samples) {
    append(row, waiting.sample, part_names_[waiting.sample.part]);
    fill_up(row, length - static_cast<std::int64_t>(waiting.sample.ids.size()));
  }
  for (auto i = static_cast<std::int64_t>(samples.size()); i < capacity_ / length; ++i) fill_up(row, length);
  return row;
}

std::optional<wire::MicroBatch> StackPacker::next_until(std::int64_t end) {
  Taker taker{stream_, capacity_};
  for (;;) {
    Bucket* const first = oldest();
    if (first != nullptr && (position_ >= end || position_ - first->samples.front().position >= kPatience)) return flush(*first);
    if (position_ >= end) return std::nullopt;
    std::optional<SftSample> sample = taker.at(position_++);
    if (!sample) continue;
    Bucket& bucket = bucket_of(*sample);
    bucket.samples.push_back({position_ - 1, std::move(*sample)});
    if (static_cast<std::int64_t>(bucket.samples.size()) * bucket.length >= capacity_) return flush(bucket);
  }
}

PackerState StackPacker::state() const {
  PackerState state{.position = position_};
  for (const Bucket& bucket : buckets_)
    for (const Waiting& waiting : bucket.samples) state.pending.push_back(waiting.position);
  std::ranges::sort(state.pending);
  return state;
}

void StackPacker::seek(PackerState state) {
  position_ = state.position;
  for (Bucket& bucket : buckets_) bucket.samples.clear();
  for (const std::int64_t position : state.pending)
    if (std::optional<SftSample> sample = stream_.at(position, capacity_))
      bucket_of(*sample).samples.push_back({position, std::move(*sample)});
}

}  // namespace prl::trainer
