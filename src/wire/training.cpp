#include "wire/training.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "wire/checks.hpp"
#include "wire/image_codec.hpp"
#include "wire/msgpack.hpp"

namespace prl::wire {

namespace {

// Positions of a micro-batch's fields in its array. 11 holds where images stand, in place of tensors; 12 (token types) follows from it and
// is always nil.
constexpr std::size_t kNumRequired = 9;
constexpr std::size_t kRefLogprobs = 9, kRoutedExperts = 10, kImages = 11, kMmTokenTypes = 12, kRlWeights = 13, kCeWeights = 14,
                      kRefKlWeights = 15, kNumFields = 16;

// A step of a very large job is far below these; a message above them is not ours.
constexpr std::size_t kMaxRanks = 65536;
constexpr std::size_t kMaxMicroBatches = 1 << 20;

void write_optional(MsgpackWriter& out, const std::vector<float>& stream) {
  if (stream.empty())
    out.nil();
  else
    out.reals(stream);
}

void write_experts(MsgpackWriter& out, const RoutedExperts& experts) {
  if (experts.empty()) return out.nil();
  const ExpertBytes bytes = encode(experts);
  out.array(3);
  out.binary(bytes.data);
  out.array(3);
  for (const std::int64_t size : {experts.num_tokens(), experts.num_layers, experts.top_k}) out.integer(size);
  out.string(bytes.dtype);
}

void write(MsgpackWriter& out, const MicroBatch& b, PictureTable& pictures) {
  std::size_t num_fields = kNumFields;
  if (b.ref_kl_weights.empty()) {
    num_fields = kRefKlWeights;
    if (b.ce_weights.empty()) {
      num_fields = kCeWeights;
      if (b.rl_weights.empty())
        num_fields = !b.images.empty()           ? kMmTokenTypes
                     : !b.routed_experts.empty() ? kImages
                     : !b.ref_logprobs.empty()   ? kRoutedExperts
                                                 : kNumRequired;
    }
  }
  out.array(num_fields);
  out.integers(b.input_ids);
  out.booleans(b.loss_mask);
  out.reals(b.advantages);
  out.reals(b.inference_logprobs);
  out.integers(b.position_ids);
  out.integers(b.sequence_lengths);
  out.reals(b.temperatures);
  out.array(b.env_names.size());
  for (const std::string& name : b.env_names) out.string(name);
  out.integers(b.sequence_lengths);
  for (std::size_t field = kRefLogprobs; field < num_fields; ++field) {
    if (field == kRefLogprobs)
      write_optional(out, b.ref_logprobs);
    else if (field == kRoutedExperts)
      write_experts(out, b.routed_experts);
    else if (field == kImages)
      write_images(out, b.images, pictures);
    else if (field == kRlWeights)
      write_optional(out, b.rl_weights);
    else if (field == kCeWeights)
      write_optional(out, b.ce_weights);
    else if (field == kRefKlWeights)
      write_optional(out, b.ref_kl_weights);
    else
      out.nil();
  }
}

std::vector<float> read_optional(MsgpackReader& in, std::string_view field) {
  return in.take_nil() ? std::vector<float>{} : in.reals(field);
}

RoutedExperts read_experts(MsgpackReader& in) {
  constexpr std::string_view kField = "routed_experts";
  if (in.take_nil()) return {};
  if (const std::size_t n = in.array(kField); n != 3)
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: wanted data, shape and dtype, found {} members", kField, n);
  const std::string_view data = in.binary("routed_experts.data");
  std::array<std::int64_t, 3> shape{};
  if (const std::size_t n = in.array("routed_experts.shape"); n != shape.size())
    fail(ErrorCode::kCorrupt, "[msgpack] field {}.shape: wanted 3 numbers, found {}", kField, n);
  for (std::int64_t& size : shape) size = in.integer("routed_experts.shape");
  return decode_experts(kField, data, in.string("routed_experts.dtype"), shape[0], shape[1], shape[2]);
}

MicroBatch read_micro_batch(MsgpackReader& in, std::vector<std::size_t>& pictures) {
  MicroBatch b;
  const std::size_t num_fields = in.array("micro_batch");
  if (num_fields < kNumRequired || num_fields > kNumFields)
    fail(ErrorCode::kCorrupt, "[msgpack] field micro_batch: wanted {} to {} fields, found {}", kNumRequired, kNumFields, num_fields);
  b.input_ids = in.integers("input_ids");
  b.loss_mask = in.booleans("loss_mask");
  b.advantages = in.reals("advantages");
  b.inference_logprobs = in.reals("inference_logprobs");
  b.position_ids = in.integers("position_ids");
  b.sequence_lengths = in.integers("sequence_lengths");
  b.temperatures = in.reals("temperatures");
  const std::size_t num_names = in.array("env_names");
  b.env_names.reserve(std::min(num_names, b.sequence_lengths.size()));
  for (std::size_t i = 0; i < num_names; ++i) b.env_names.push_back(in.string("env_names"));
  if (in.integers("seq_lens") != b.sequence_lengths) fail(ErrorCode::kCorrupt, "[msgpack] field seq_lens disagrees with sequence_lengths");
  for (std::size_t field = kRefLogprobs; field < num_fields; ++field) {
    if (field == kRefLogprobs)
      b.ref_logprobs = read_optional(in, "ref_logprobs");
    else if (field == kRoutedExperts)
      b.routed_experts = read_experts(in);
    else if (field == kImages)
      b.images = read_images(in, pictures);
    else if (field == kRlWeights)
      b.rl_weights = read_optional(in, "rl_weights");
    else if (field == kCeWeights)
      b.ce_weights = read_optional(in, "ce_weights");
    else if (field == kRefKlWeights)
      b.ref_kl_weights = read_optional(in, "ref_kl_weights");
    else if (!in.take_nil())
      fail(ErrorCode::kNotImplemented, "[msgpack] field mm_token_type_ids is set; images are told by field 11 alone");
  }
  return b;
}

}  // namespace

std::string encode(const TrainingBatch& batch) {
  const auto has_images = [](const auto& rank) { return std::ranges::any_of(rank, [](const MicroBatch& b) { return !b.images.empty(); }); };
  const bool has_pictures = std::ranges::any_of(batch.ranks, has_images);
  MsgpackWriter out;
  PictureTable pictures;
  out.array(has_pictures ? 3 : 2);
  out.integer(batch.step);
  out.array(batch.ranks.size());
  for (const auto& rank : batch.ranks) {
    out.array(rank.size());
    for (const MicroBatch& micro_batch : rank) write(out, micro_batch, pictures);
  }
  if (has_pictures) write_pictures(out, pictures);
  return out.take();
}

TrainingBatch decode_training_batch(std::string_view bytes) {
  MsgpackReader in(bytes);
  TrainingBatch batch;
  const std::size_t num_fields = in.array("training_batch");
  if (num_fields != 2 && num_fields != 3)
    fail(ErrorCode::kCorrupt, "[msgpack] field training_batch: wanted 2 or 3 fields, found {}", num_fields);
  batch.step = in.integer("step");
  if (batch.step < 0) fail(ErrorCode::kCorrupt, "[msgpack] field step is {}: must not be negative", batch.step);
  const std::size_t num_ranks = in.array("ranks");
  if (num_ranks > kMaxRanks) fail(ErrorCode::kCorrupt, "[msgpack] field ranks: {} ranks, at most {} are allowed", num_ranks, kMaxRanks);
  std::vector<std::vector<std::vector<std::size_t>>> numbers;  // of pictures, of each row
  const auto with_context = [](std::size_t r, std::size_t i, const auto& body) {
    try {
      body();
    } catch (const Error& error) {
      throw error.with_context(fmt::format("micro-batch {} of rank {}", i, r));
    }
  };
  for (std::size_t r = 0; r < num_ranks; ++r) {
    const std::size_t num_micro_batches = in.array("micro_batches");
    if (num_micro_batches > kMaxMicroBatches)
      fail(ErrorCode::kCorrupt, "[msgpack] field micro_batches: {} of rank {}, at most {} are allowed", num_micro_batches, r,
           kMaxMicroBatches);
    auto& rank = batch.ranks.emplace_back();
    auto& of_rank = numbers.emplace_back();
    for (std::size_t i = 0; i < num_micro_batches; ++i)
      with_context(r, i, [&] { rank.push_back(read_micro_batch(in, of_rank.emplace_back())); });
  }
  std::vector<std::shared_ptr<const ImagePixels>> pictures;
  if (num_fields == 3) pictures = read_pictures(in);
  if (!in.at_end())
    fail(ErrorCode::kCorrupt, "[msgpack] the training batch ends at byte {}, but the message has {}", in.offset(), bytes.size());
  for (std::size_t r = 0; r < batch.ranks.size(); ++r)
    for (std::size_t i = 0; i < batch.ranks[r].size(); ++i)
      with_context(r, i, [&] {
        give_pictures(batch.ranks[r][i].images, numbers[r][i], pictures);
        check(batch.ranks[r][i]);
      });
  return batch;
}

}  // namespace prl::wire
