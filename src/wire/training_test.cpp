#include "wire/training.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "wire/checks.hpp"
#include "wire/msgpack.hpp"

namespace prl::wire {
namespace {

MicroBatch make_row(std::uint64_t seed, std::vector<std::int32_t> lengths) {
  Rng rng(seed);
  MicroBatch row;
  row.sequence_lengths = lengths;
  for (const std::int32_t n : lengths) {
    row.env_names.push_back(fmt::format("env-{}", n));
    for (std::int32_t p = 0; p < n; ++p) {
      row.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(200000)));
      row.loss_mask.push_back(p > 0 && rng.next_below(2) == 1);
      row.advantages.push_back(static_cast<float>(rng.next_normal()));
      row.inference_logprobs.push_back(-static_cast<float>(rng.next_double()));
      row.position_ids.push_back(p);
      row.temperatures.push_back(0.5f + static_cast<float>(rng.next_double()));
    }
  }
  return row;
}

std::vector<float> stream_of(const MicroBatch& row, float value) {
  std::vector<float> stream(row.input_ids.size(), value);
  std::size_t first = 0;
  for (const std::int32_t n : row.sequence_lengths) {
    stream[first] = 0;
    first += static_cast<std::size_t>(n);
  }
  return stream;
}

TrainingBatch make_batch() {
  TrainingBatch batch;
  batch.step = 300;
  batch.ranks = {{make_row(1, {5, 3}), make_row(2, {1})}, {make_row(3, {70000})}, {}};
  batch.ranks[0][0].ref_logprobs = stream_of(batch.ranks[0][0], -2.5f);
  batch.ranks[0][1].ce_weights = stream_of(batch.ranks[0][1], 0.1f);
  batch.ranks[1][0].rl_weights = stream_of(batch.ranks[1][0], 1.0f);
  batch.ranks[1][0].ref_kl_weights = stream_of(batch.ranks[1][0], 0.5f);
  for (auto& [row, last] : {std::pair{&batch.ranks[0][1], 127}, {&batch.ranks[1][0], 300}}) {
    row->routed_experts = {.start = 0, .num_layers = 3, .top_k = 2, .ids = {}};
    for (std::size_t i = 0; i < 6 * row->input_ids.size(); ++i)
      row->routed_experts.ids.push_back(static_cast<std::uint16_t>(i % static_cast<std::size_t>(last + 1)));
  }
  return batch;
}

void expect_equal(const MicroBatch& a, const MicroBatch& b) {
  EXPECT_EQ(a.input_ids, b.input_ids);
  EXPECT_EQ(a.loss_mask, b.loss_mask);
  EXPECT_EQ(a.advantages, b.advantages);
  EXPECT_EQ(a.inference_logprobs, b.inference_logprobs);
  EXPECT_EQ(a.position_ids, b.position_ids);
  EXPECT_EQ(a.sequence_lengths, b.sequence_lengths);
  EXPECT_EQ(a.temperatures, b.temperatures);
  EXPECT_EQ(a.env_names, b.env_names);
  EXPECT_EQ(a.ref_logprobs, b.ref_logprobs);
  EXPECT_EQ(a.rl_weights, b.rl_weights);
  EXPECT_EQ(a.ce_weights, b.ce_weights);
  EXPECT_EQ(a.ref_kl_weights, b.ref_kl_weights);
  EXPECT_EQ(a.routed_experts, b.routed_experts);
}

ErrorCode code_of(std::string_view bytes) {
  try {
    decode_training_batch(bytes);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(TrainingCodec, RoundTrip) {
  const TrainingBatch batch = make_batch();
  const TrainingBatch again = decode_training_batch(encode(batch));
  EXPECT_EQ(again.step, batch.step);
  ASSERT_EQ(again.ranks.size(), batch.ranks.size());
  for (std::size_t r = 0; r < batch.ranks.size(); ++r) {
    ASSERT_EQ(again.ranks[r].size(), batch.ranks[r].size());
    for (std::size_t i = 0; i < batch.ranks[r].size(); ++i) expect_equal(again.ranks[r][i], batch.ranks[r][i]);
  }
}

// Another implementation of MessagePack reads the same values at the positions of the wire format.
TEST(TrainingCodec, AnotherReaderSeesTheFields) {
  const TrainingBatch batch = make_batch();
  const auto json = nlohmann::json::from_msgpack(encode(batch));
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0], 300);
  const auto& first = json[1][0][0];
  ASSERT_EQ(first.size(), 10u) << "trailing defaults are left out";
  EXPECT_EQ(first[0].get<std::vector<std::int32_t>>(), batch.ranks[0][0].input_ids);
  EXPECT_TRUE(first[1][0].is_boolean());
  EXPECT_EQ(first[2].get<std::vector<float>>(), batch.ranks[0][0].advantages);
  EXPECT_EQ(first[7][1], "env-3");
  EXPECT_EQ(first[8], first[5]);
  EXPECT_EQ(first[9][1], -2.5);
  const auto& second = json[1][0][1];
  ASSERT_EQ(second.size(), 15u);
  EXPECT_TRUE(second[9].is_null());
  EXPECT_TRUE(second[13].is_null());
  EXPECT_EQ(second[10][0].get_binary(), (std::vector<std::uint8_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(second[10][1], (std::vector<int>{1, 3, 2}));
  EXPECT_EQ(second[10][2], "uint8");
  EXPECT_EQ(json[1][1][0][10][2], "uint16") << "an expert above 255";
  EXPECT_EQ(json[1][1][0].size(), 16u);
}

// What another writer makes of the same values decodes too (float64 numbers, wider integers).
TEST(TrainingCodec, ReadsAnotherWriter) {
  const auto json = nlohmann::json::parse(R"([7, [[[[5, 6], [false, true], [0, 1.5], [0.0, -0.1], [0, 1], [2], [1, 1.0], ["e"], [2]]]]])");
  const auto packed = nlohmann::json::to_msgpack(json);
  const TrainingBatch batch = decode_training_batch({reinterpret_cast<const char*>(packed.data()), packed.size()});
  EXPECT_EQ(batch.step, 7);
  EXPECT_EQ(batch.ranks[0][0].inference_logprobs, (std::vector<float>{0.0f, -0.1f}));
  EXPECT_EQ(batch.ranks[0][0].advantages, (std::vector<float>{0.0f, 1.5f}));
}

TEST(TrainingCodec, EveryTruncationIsCorrupt) {
  TrainingBatch batch = make_batch();
  batch.ranks = {{batch.ranks[0][0]}};
  const std::string bytes = encode(batch);
  for (std::size_t n = 0; n < bytes.size(); ++n) ASSERT_EQ(code_of(bytes.substr(0, n)), ErrorCode::kCorrupt) << n;
  EXPECT_EQ(code_of(bytes + '\0'), ErrorCode::kCorrupt) << "trailing bytes";
}

TEST(TrainingCodec, FlippedBytesNeverCrash) {
  TrainingBatch batch = make_batch();
  batch.ranks = {{batch.ranks[0][0], batch.ranks[0][1]}};
  const std::string bytes = encode(batch);
  Rng rng(11);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = bytes;
    for (std::uint64_t flips = 1 + rng.next_below(3); flips > 0; --flips)
      damaged[rng.next_below(damaged.size())] = static_cast<char>(rng.next_below(256));
    try {
      const TrainingBatch decoded = decode_training_batch(damaged);
      for (const auto& rank : decoded.ranks)
        for (const MicroBatch& row : rank) check(row);
    } catch (const Error& error) {
      ASSERT_THAT(error.code(), ::testing::AnyOf(ErrorCode::kCorrupt, ErrorCode::kNotImplemented)) << error.what();
    }
  }
}

TEST(TrainingCodec, HostileSizesCostNothing) {
  EXPECT_EQ(code_of("\xdd\xff\xff\xff\xff"), ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(std::string("\x92\x01\xdd\x7f\xff\xff\xff", 7)), ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(std::string(1 << 20, '\x91')), ErrorCode::kCorrupt) << "deep nesting";
}

TEST(TrainingCodec, SemanticDamageIsNamed) {
  const auto reason = [](auto change) -> std::string {
    TrainingBatch batch;
    batch.ranks = {{make_row(1, {5, 3})}};
    change(batch.ranks[0][0]);
    try {
      decode_training_batch(encode(batch));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      return error.what();
    }
    return "accepted";
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(reason([](MicroBatch& b) { b.advantages.pop_back(); }), HasSubstr("advantages has 7 entries"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.sequence_lengths = {5, 4}; }), HasSubstr("adds up to 9"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.sequence_lengths = {8, 0}; }), HasSubstr("sequence_lengths holds 0"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.inference_logprobs[6] = std::numeric_limits<float>::quiet_NaN(); }),
              ::testing::AllOf(HasSubstr("inference_logprobs is nan at token 6"), HasSubstr("env-3")));
  EXPECT_THAT(reason([](MicroBatch& b) { b.inference_logprobs[6] = 0.5f; }),
              ::testing::AllOf(HasSubstr("inference_logprobs is 0.5 at token 6"), HasSubstr("env-3"), HasSubstr("at most 0")));
  EXPECT_THAT(reason([](MicroBatch& b) { b.ref_logprobs.assign(8, 0.25f); }), HasSubstr("ref_logprobs is 0.25 at token 0"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.temperatures[0] = 0; }), HasSubstr("temperatures"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.input_ids[2] = -1; }), HasSubstr("input_ids is -1"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.loss_mask[5] = 1; }), HasSubstr("first token of sequence 1"));
  EXPECT_THAT(reason([](MicroBatch& b) { b.env_names.pop_back(); }), HasSubstr("env_names"));
}

TEST(Msgpack, IntegersOfEverySize) {
  for (const std::int64_t value : {std::int64_t{0},
                                   std::int64_t{127},
                                   std::int64_t{128},
                                   std::int64_t{255},
                                   std::int64_t{256},
                                   std::int64_t{65535},
                                   std::int64_t{65536},
                                   std::int64_t{4294967295},
                                   std::int64_t{4294967296},
                                   std::numeric_limits<std::int64_t>::max(),
                                   std::int64_t{-1},
                                   std::int64_t{-32},
                                   std::int64_t{-33},
                                   std::int64_t{-128},
                                   std::int64_t{-129},
                                   std::int64_t{-32768},
                                   std::int64_t{-32769},
                                   std::int64_t{-2147483648LL},
                                   std::int64_t{-2147483649LL},
                                   std::numeric_limits<std::int64_t>::min()}) {
    MsgpackWriter out;
    out.integer(value);
    EXPECT_EQ(MsgpackReader(out.bytes()).integer("x"), value);
    EXPECT_EQ(nlohmann::json::from_msgpack(out.bytes()).get<std::int64_t>(), value);
  }
}

}  // namespace
}  // namespace prl::wire
