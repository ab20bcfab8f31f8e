#include "ops/lora.hpp"

#include <numeric>

#include "ops/linear.hpp"
#include "ops/op_table.hpp"
#include "ops/pointwise.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class LoraTest : public OpTest {};

constexpr std::int64_t kInputs = 70;

/// An adapter of a weight whose outputs are two parts, with the values its products see.
struct Adapter {
  LoraWeight weight;
  std::vector<float> a;               ///< [R, K]
  std::vector<std::vector<float>> b;  ///< per part [outputs, rank]

  Adapter(Session& s, std::vector<LoraPart> parts, DType dtype, std::uint64_t seed, std::int64_t K = kInputs) {
    std::int64_t R = 0;
    for (LoraPart& part : parts) {
      part.first_rank = R;
      R += part.rank;
      Tensor values = s.random({part.num_outputs, part.rank}, dtype, seed * 100 + static_cast<std::uint64_t>(R), 0.5f);
      part.b = pack_linear(s.ctx, values, {}, dtype, true, WeightUse::kAdapter);
      b.push_back(testing::values(values));
    }
    Tensor values = s.random({R, K}, dtype, seed, 0.2f);
    a = testing::values(values);
    weight = {pack_linear(s.ctx, values, {}, dtype, true, WeightUse::kAdapter), std::move(parts)};
  }
};

LoraPart part(std::int64_t first_output, std::int64_t num_outputs, std::int64_t rank, float scale) {
  return {.first_output = first_output, .num_outputs = num_outputs, .rank = rank, .scale = scale, .b = nullptr};
}

double rounded(double value, DType dtype) {
  return dtype == DType::kBF16 ? to_f32(to_bf16(static_cast<float>(value))) : static_cast<double>(static_cast<float>(value));
}

/// A x of one row.
std::vector<double> low_rank(const Adapter& adapter, const Tensor& x, std::int64_t t) {
  const std::int64_t K = x.shape()[1], R = adapter.weight.num_ranks();
  std::vector<double> h(static_cast<std::size_t>(R));
  for (std::int64_t r = 0; r < R; ++r) {
    double sum = 0;
    for (std::int64_t k = 0; k < K; ++k) sum += static_cast<double>(get(x, t * K + k)) * adapter.a[static_cast<std::size_t>(r * K + k)];
    h[static_cast<std::size_t>(r)] = rounded(sum, adapter.weight.dtype());
  }
  return h;
}

void add_row(const Adapter& adapter, const Tensor& x, std::int64_t t, std::vector<double>& y, std::int64_t N) {
  const std::vector<double> h = low_rank(adapter, x, t);
  for (std::size_t p = 0; p < adapter.weight.parts.size(); ++p) {
    const LoraPart& part = adapter.weight.parts[p];
    for (std::int64_t n = 0; n < part.num_outputs; ++n) {
      double sum = 0;
      for (std::int64_t r = 0; r < part.rank; ++r)
        sum += h[static_cast<std::size_t>(part.first_rank + r)] * adapter.b[p][static_cast<std::size_t>(n * part.rank + r)];
      y[static_cast<std::size_t>(t * N + part.first_output + n)] += static_cast<double>(part.scale) * sum;
    }
  }
}

std::vector<double> as_doubles(const Tensor& t) {
  const std::vector<float> v = values(t);
  return {v.begin(), v.end()};
}

/// Adapters of ranks 1 to 512 side by side, in both dtypes, and rows without one.
TEST_P(LoraTest, AddsEachRowsOwnAdapter) {
  Session s(kind());
  const std::int64_t T = 40, N = 96;
  std::vector<Adapter> adapters;
  adapters.emplace_back(s, std::vector{part(0, 64, 16, 2.0f), part(64, 32, 8, 0.5f)}, dtype(), 1);
  adapters.emplace_back(s, std::vector{part(64, 32, 1, 1.5f)}, dtype(), 2);
  adapters.emplace_back(s, std::vector{part(0, 96, 512, 0.25f)}, dtype(), 3);
  adapters.emplace_back(s, std::vector{part(0, 64, 5, 1.0f), part(64, 32, 33, 1.0f)}, DType::kF32, 4);
  const Tensor x = s.random({T, kInputs}, dtype(), 5);
  Tensor y = s.random({T, N}, dtype(), 6);
  std::vector<double> want = as_doubles(y);
  std::vector<std::vector<std::int32_t>> rows(adapters.size());
  for (std::int64_t t = 0; t < T; ++t) {
    if (const auto k = static_cast<std::size_t>(t * 7 % 5); k < adapters.size()) {
      rows[k].push_back(static_cast<std::int32_t>(t));
      add_row(adapters[k], x, t, want, N);
    }
  }
  std::vector<LoraRows> groups;
  for (std::size_t k = 0; k < adapters.size(); ++k) groups.push_back({&adapters[k].weight, rows[k]});
  const Tensor before = y.clone();
  add_lora(s.ctx, y, x, groups);
  EXPECT_LT(worst_error(values(y), want, 10.0), tolerance(dtype(), 3e-6));
  for (std::int64_t t = 0; t < T; ++t)
    if (t * 7 % 5 == 4) {
      EXPECT_TRUE(same_bits(y.slice(t, 1).clone(), before.slice(t, 1).clone())) << "row " << t << " has no adapter";
    }
}

/// The contract of serving many adapters: a row's bits are its own.
TEST_P(LoraTest, RowsDoNotDependOnOthersOrThreads) {
  constexpr std::int64_t kRows = 150, kOutputs = 200, kWide = 300;
  Session one(kind(), 1), two(kind(), 2), three(kind(), 3);
  std::vector<Adapter> adapters;
  for (std::uint64_t k = 0; k < 16; ++k)
    adapters.emplace_back(one, std::vector{part(0, 120, 1 + static_cast<std::int64_t>(k) * 5, 2.0f), part(120, 80, 16, 1.0f)}, dtype(), k,
                          kWide);
  const Tensor x = one.random({kRows, kWide}, dtype(), 50), base = one.random({kRows, kOutputs}, dtype(), 51);
  // Alone: each row in a batch of one.
  Tensor alone = base.clone();
  for (std::int64_t t = 0; t < kRows; ++t) {
    if (t % 17 == 16) continue;
    const std::int32_t row = 0;
    add_lora(one.ctx, alone.slice(t, 1).view(), x.slice(t, 1).view(),
             std::vector{LoraRows{&adapters[static_cast<std::size_t>(t % 17)].weight, {&row, 1}}});
  }
  std::vector<std::vector<std::int32_t>> rows(adapters.size());
  for (std::int64_t t = 0; t < kRows; ++t)
    if (t % 17 < 16) rows[static_cast<std::size_t>(t % 17)].push_back(static_cast<std::int32_t>(t));
  for (Session* s : {&one, &two, &three}) {
    std::vector<LoraRows> groups;
    for (std::size_t k = 0; k < adapters.size(); ++k) groups.push_back({&adapters[k].weight, rows[k]});
    Tensor mixed = base.clone();
    add_lora(s->ctx, mixed, x, groups);
    EXPECT_TRUE(same_bits(mixed, alone));
  }
  // All rows with one adapter, as in training, in batches of several sizes.
  std::vector<std::int32_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  Tensor whole = base.clone(), unnamed = base.clone();
  add_lora(two.ctx, whole, x, std::vector{LoraRows{&adapters[7].weight, all}});
  add_lora(three.ctx, unnamed, x, std::vector{LoraRows{&adapters[7].weight, {}}});
  EXPECT_TRUE(same_bits(whole, unnamed));
  for (const std::int64_t count : {1, 2, 31, 64, 65, 149}) {
    Tensor part = base.slice(1, count).clone();
    add_lora(three.ctx, part, x.slice(1, count).view(),
             std::vector{LoraRows{&adapters[7].weight, std::span(all).first(static_cast<std::size_t>(count))}});
    EXPECT_TRUE(same_bits(part, whole.slice(1, count).clone())) << count << " rows";
  }
}

/// Tables of adapters on the device give what groups give, whatever the order of slots and tiles.
TEST_P(LoraTest, IndexedRowsHaveTheSameBits) {
  Session s(kind());
  if (!has_lora_index(s.ctx)) GTEST_SKIP() << "this device adds adapters in groups alone";
  constexpr std::int64_t kRows = 90, kOutputs = 200, kWide = 328, kAdapters = 5;
  std::vector<Adapter> adapters;
  for (std::uint64_t k = 0; k < kAdapters; ++k)
    adapters.emplace_back(s, std::vector{part(0, 120, 1 + static_cast<std::int64_t>(k) * 9, 2.0f), part(120, 80, 16, 1.0f)}, dtype(), k,
                          kWide);
  Tensor entries = Tensor::empty(s.runtime, {kAdapters + 1, static_cast<std::int64_t>(kLoraEntryBytes)}, DType::kU8);
  const auto entry = [&](std::size_t slot) {
    return std::span(reinterpret_cast<std::byte*>(entries.data()) + slot * kLoraEntryBytes, kLoraEntryBytes);
  };
  ASSERT_TRUE(write_lora_entry(s.ctx, entry(kAdapters), nullptr, dtype()));
  bool is_indexed = true;
  for (std::size_t k = 0; k < kAdapters; ++k)
    is_indexed = write_lora_entry(s.ctx, entry(kAdapters - 1 - k), &adapters[k].weight, dtype()) && is_indexed;
  EXPECT_EQ(is_indexed, dtype() == DType::kBF16);
  if (!is_indexed) return;
  const Tensor x = s.random({kRows, kWide}, dtype(), 50), base = s.random({kRows, kOutputs}, dtype(), 51);
  std::vector<std::vector<std::int32_t>> rows(kAdapters);
  std::vector<std::int32_t> with_nothing, tiles;
  for (std::int32_t t = 0; t < kRows; ++t) (t % 7 < 5 ? rows[static_cast<std::size_t>(t % 7)] : with_nothing).push_back(t);
  std::vector<LoraRows> groups;
  append_lora_tiles(tiles, kAdapters, with_nothing);
  tiles.insert(tiles.end(), {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});  // rows of no slot
  for (std::size_t k = 0; k < kAdapters; ++k) {
    append_lora_tiles(tiles, static_cast<std::int32_t>(kAdapters - 1 - k), rows[k]);
    groups.push_back({&adapters[k].weight, rows[k]});
  }
  Tensor grouped = base.clone(), indexed = base.clone(), on_device = s.ints(tiles);
  add_lora(s.ctx, grouped, x, groups);
  const TensorView tile_rows = on_device.view().reshaped({static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, kLoraTileWords});
  add_lora_indexed(s.ctx, indexed, x, {entries.view(), tile_rows, 37});
  EXPECT_TRUE(same_bits(grouped, indexed));
  EXPECT_FALSE(same_bits(grouped, base));
}

/// A chain of products, as a step of decoding enqueues it, recorded and not: each kernel begins while others still run.
TEST_P(LoraTest, AdaptersBesideTheProductHaveTheSameBits) {
  Session s(kind());
  if (!has_lora_index(s.ctx) || dtype() != DType::kBF16) GTEST_SKIP() << "this device adds adapters in groups alone";
  constexpr std::int64_t kMatrices = 6, kAdapters = 3, kMany = 300;
  const std::int64_t wide = 1024, inner = 3072;
  std::vector<LinearWeightPtr> weights;
  std::vector<Adapter> adapters;
  std::vector<Tensor> entries;
  for (std::uint64_t i = 0; i < kMatrices; ++i) {
    const std::int64_t K = i % 2 == 0 ? wide : inner, N = i % 2 == 0 ? inner : wide;
    weights.push_back(pack_linear(s.ctx, s.random({N, K}, DType::kF32, 70 + i, 0.05f), {}, dtype(), false));
    Tensor of_matrix = Tensor::empty(s.runtime, {kAdapters, static_cast<std::int64_t>(kLoraEntryBytes)}, DType::kU8);
    for (std::uint64_t k = 0; k < kAdapters; ++k) {
      adapters.emplace_back(s, std::vector{part(0, N / 2, 1 + static_cast<std::int64_t>(k) * 20, 2.0f), part(N / 2, N / 2, 16, 1.0f)},
                            dtype(), 10 * i + k, K);
      ASSERT_TRUE(write_lora_entry(s.ctx, std::span(reinterpret_cast<std::byte*>(of_matrix.data()) + k * kLoraEntryBytes, kLoraEntryBytes),
                                   &adapters.back().weight, dtype()));
    }
    entries.push_back(of_matrix);
  }
  const Tensor norm = s.filled({inner}, DType::kF32, 1.0f), x = s.random({kMany, wide}, dtype(), 50);
  const Tensor unread = s.ints({0});
  Tensor signals = s.ints(std::vector<std::int32_t>(kMatrices, 0));
  std::string different;
  bool is_beside_at_all = false;
  for (const std::int64_t rows : {1, 8, 17, 32, 100, 128, 300}) {
    std::vector<std::vector<std::int32_t>> of(kAdapters);
    for (std::int32_t t = 0; t < rows; ++t)
      if (t % 4 < kAdapters) of[static_cast<std::size_t>(t % 4)].push_back(t);
    std::vector<std::int32_t> tiles;
    for (std::size_t k = 0; k < kAdapters; ++k) append_lora_tiles(tiles, static_cast<std::int32_t>(k), of[k]);
    const Tensor on_device = s.ints(tiles);
    const TensorView tile_rows = on_device.view().reshaped({static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, kLoraTileWords});
    const Tensor first = x.slice(0, rows).clone();
    const auto make = [&](bool is_beside, Tensor& in, Tensor& out) {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const LoraIndex index{entries[i].view(), tile_rows, 41, signals.slice(static_cast<std::int64_t>(i), 1).view()};
        const std::int64_t K = weights[i]->num_inputs(), N = weights[i]->num_outputs();
        const TensorView from = in.view().columns(0, K), y = out.view().columns(0, N);
        const bool is_taken = is_beside && linear_lora(s.ctx, y, from, *weights[i], index);
        is_beside_at_all = is_beside_at_all || is_taken;
        if (!is_taken) {
          linear(s.ctx, y, from, *weights[i]);
          add_lora_indexed(s.ctx, y, from, index);
        }
        rms_norm(s.ctx, in.view().columns(0, N), y, norm.slice(0, N), 1e-6f);
      }
    };
    const auto begin = [&](Tensor& in) {
      s.runtime->zero(in.data(), in.num_bytes());
      for (std::int64_t t = 0; t < rows; ++t)
        s.runtime->copy_within(in.slice(t, 1).data(), first.slice(t, 1).data(), first.slice(t, 1).num_bytes());
    };
    Tensor want = s.filled({rows, inner}, dtype(), 0), got = want.clone(), of_want = want.clone(), of_got = want.clone();
    begin(want);
    make(false, want, of_want);
    begin(got);
    make(true, got, of_got);
    if (!same_bits(want, got)) different += " " + std::to_string(rows);
    begin(got);
    const auto recorded = s.runtime->record([&] { make(true, got, of_got); });
    if (recorded == nullptr) continue;
    for (int i = 0; i < 20; ++i) {
      begin(got);
      const int nothing = 0;
      recorded->upload(unread.data(), &nothing, sizeof nothing);
      recorded->run();
      if (!same_bits(want, got)) different += " " + std::to_string(rows) + " recorded";
    }
  }
  EXPECT_EQ(different, "");
  EXPECT_TRUE(same_bits(signals, s.ints(std::vector<std::int32_t>(kMatrices, 0))));
  EXPECT_EQ(is_beside_at_all, s.ctx.table->linear_lora != nullptr);
}

/// Sizes at which training, prefill and decode take different kernels.
TEST_P(LoraTest, OneAdapterInTheProductHasTheSameBits) {
  Session s(kind());
  if (!has_lora_index(s.ctx) || dtype() != DType::kBF16) GTEST_SKIP() << "this device adds adapters in groups alone";
  struct Case {
    std::int64_t K, N, rank;
    std::vector<LoraPart> parts;
    bool has_norm, has_residual, swiglu, has_bias;
  };
  const auto parts_of = [](std::vector<std::int64_t> outputs, std::int64_t rank) {
    std::vector<LoraPart> parts;
    std::int64_t first = 0;
    for (const std::int64_t n : outputs) {
      parts.push_back(part(first, n, rank, 0.3f + 0.5f * static_cast<float>(parts.size())));
      first += n;
    }
    return parts;
  };
  const Case cases[] = {
      {1024, 4096, 16, parts_of({2048, 1024, 1024}, 16), false, false, false, false},
      {1024, 4096, 16, parts_of({2048, 1024, 1024}, 16), true, false, false, false},
      {896, 1152, 8, parts_of({896, 128, 128}, 8), true, false, false, true},
      {576, 960, 20, parts_of({576, 192, 192}, 20), false, false, false, true},
      {576, 960, 16, {part(576, 192, 16, 2.0f)}, true, false, false, false},
      {2048, 1024, 16, parts_of({1024}, 16), false, true, false, false},
      {3072, 1024, 32, parts_of({1024}, 32), false, true, false, false},
      {1536, 576, 5, parts_of({576}, 5), false, true, false, false},
      {1024, 6144, 16, parts_of({3072, 3072}, 16), false, false, true, false},
      {1024, 6144, 8, parts_of({3072, 3072}, 8), true, false, true, false},
      {2560, 1600, 32, parts_of({800, 800}, 32), false, false, true, false},
      {1024, 1536, 16, {part(768, 768, 16, 1.5f)}, true, false, true, false},
      {576, 19456, 32, parts_of({9728, 9728}, 32), false, false, true, false},
      {576, 9728, 64, parts_of({9728}, 64), false, false, false, false},
  };
  std::string different;
  int num_taken = 0;
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    const Case& c = cases[i];
    const Tensor bias = s.random({c.N}, DType::kF32, 3 + i);
    const LinearWeightPtr weight =
        pack_linear(s.ctx, s.random({c.N, c.K}, DType::kF32, 70 + i, 0.05f), c.has_bias ? bias.view() : ConstTensorView{}, dtype(), false);
    Tensor entries = Tensor::empty(s.runtime, {2, static_cast<std::int64_t>(kLoraEntryBytes)}, DType::kU8);
    const Adapter other(s, parts_of({c.N}, 4), dtype(), 5, c.K), adapter(s, c.parts, dtype(), 10 + i, c.K);
    for (std::size_t k = 0; k < 2; ++k)
      ASSERT_TRUE(write_lora_entry(s.ctx, std::span(reinterpret_cast<std::byte*>(entries.data()) + k * kLoraEntryBytes, kLoraEntryBytes),
                                   k == 0 ? &other.weight : &adapter.weight, dtype()));
    const Tensor norm = s.random({c.K}, DType::kF32, 8);
    const std::int64_t N = c.swiglu ? c.N / 2 : c.N;
    for (const std::int64_t rows : {1, 2, 8, 13, 16, 32, 50, 64, 100, 128, 200}) {
      const Tensor x = s.random({rows, c.K}, dtype(), 50 + i), residual = s.random({rows, N}, dtype(), 51 + i);
      std::vector<std::int32_t> of, tiles;
      for (std::int32_t t = 0; t < rows; ++t)
        if (t % 7 != 3) of.push_back(t);
      append_lora_tiles(tiles, 1, of);
      tiles.resize(tiles.size() + kLoraTileWords, -1);
      const Tensor on_device = s.ints(tiles);
      const LoraIndex index{.entries = entries.view(),
                            .tiles = on_device.view().reshaped({static_cast<std::int64_t>(tiles.size()) / kLoraTileWords, kLoraTileWords}),
                            .max_rank = c.rank,
                            .single = &adapter.weight,
                            .single_entry = entries.slice(1, 1).view().reshaped({static_cast<std::int64_t>(kLoraEntryBytes)})};
      Tensor got = s.filled({rows, N}, dtype(), -1.0f);
      LinearFusion fusion{.norm_K = {}, .residual_TN = {}, .swiglu = c.swiglu, .lora = &index};
      if (c.has_norm) fusion.norm_K = norm.view();
      if (c.has_residual) fusion.residual_TN = residual.view();
      if (!linear_fused(s.ctx, got, x, *weight, fusion)) continue;
      ++num_taken;
      Tensor normed = x.clone(), y = s.filled({rows, c.N}, dtype(), 0), want = s.filled({rows, N}, dtype(), 0);
      if (c.has_norm) rms_norm(s.ctx, normed, x, norm, 1e-6f);
      linear(s.ctx, y, normed, *weight);
      add_lora_indexed(s.ctx, y, normed, index);
      if (c.swiglu)
        swiglu(s.ctx, want, y);
      else if (c.has_residual)
        add(s.ctx, want, residual, y);
      else
        want = y.clone();
      if (!same_bits(want, got)) different += std::to_string(i) + ":" + std::to_string(rows) + " ";
    }
  }
  EXPECT_EQ(different, "");
  EXPECT_GE(num_taken, s.ctx.table->linear_lora != nullptr ? 90 : 0);
}

TEST_P(LoraTest, WideRowsAndManyRanksHaveTheSameBitsInEveryBatch) {
  Session s(kind());
  constexpr std::int64_t kRows = 200, kOutputs = 1536, kWide = 1024;
  const Adapter adapter(s, {part(0, 1024, 64, 2.0f), part(1024, 512, 24, 1.0f)}, dtype(), 3, kWide);
  const Tensor x = s.random({kRows, kWide}, dtype(), 50), base = s.random({kRows, kOutputs}, dtype(), 51);
  Tensor whole = base.clone(), alone = base.clone();
  add_lora(s.ctx, whole, x, std::vector{LoraRows{&adapter.weight, {}}});
  for (std::int64_t t = 0; t < kRows; t += 13) {
    add_lora(s.ctx, alone.slice(t, 1).view(), x.slice(t, 1).view(), std::vector{LoraRows{&adapter.weight, {}}});
    EXPECT_TRUE(same_bits(alone.slice(t, 1).clone(), whole.slice(t, 1).clone())) << "row " << t;
  }
}

TEST_P(LoraTest, Gradients) {
  Session s(kind());
  const std::int64_t T = 37, N = 60, K = kInputs;
  for (const DType of_adapter : {dtype(), DType::kF32}) {
    const Adapter adapter(s, {part(0, 40, 7, 2.0f), part(40, 20, 3, 0.75f)}, of_adapter, 1);
    const Tensor x = s.random({T, K}, dtype(), 2), dy = s.random({T, N}, dtype(), 3);
    const std::int64_t R = adapter.weight.num_ranks();
    std::vector<double> want_da(static_cast<std::size_t>(R * K), 1.0), want_dx(static_cast<std::size_t>(T * K), 0.0);
    std::vector<std::vector<double>> want_db;
    std::vector<Tensor> db;
    std::vector<TensorView> db_views;
    for (const LoraPart& part : adapter.weight.parts) {
      want_db.emplace_back(static_cast<std::size_t>(part.num_outputs * part.rank), 1.0);
      db.push_back(s.filled({part.num_outputs, part.rank}, DType::kF32, 1.0f));
    }
    for (Tensor& t : db) db_views.push_back(t.view());
    for (std::int64_t t = 0; t < T; ++t) {
      const std::vector<double> h = low_rank(adapter, x, t);
      for (std::size_t p = 0; p < db.size(); ++p) {
        const LoraPart& part = adapter.weight.parts[p];
        for (std::int64_t r = 0; r < part.rank; ++r) {
          double dh = 0;
          for (std::int64_t n = 0; n < part.num_outputs; ++n) {
            const double dy_n = get(dy, t * N + part.first_output + n);
            want_db[p][static_cast<std::size_t>(n * part.rank + r)] +=
                static_cast<double>(part.scale) * dy_n * h[static_cast<std::size_t>(part.first_rank + r)];
            dh += static_cast<double>(part.scale) * dy_n * adapter.b[p][static_cast<std::size_t>(n * part.rank + r)];
          }
          for (std::int64_t k = 0; k < K; ++k) {
            const auto at = static_cast<std::size_t>((part.first_rank + r) * K + k);
            want_da[at] += dh * get(x, t * K + k);
            want_dx[static_cast<std::size_t>(t * K + k)] += dh * adapter.a[at];
          }
        }
      }
    }
    Tensor da = s.filled({R, K}, DType::kF32, 1.0f), dx = s.filled({T, K}, dtype(), 0.0f);
    lora_backward(s.ctx, dx, da, db_views, dy, x, adapter.weight, /*accumulate_dx=*/true, /*accumulate=*/true);
    const double bound = of_adapter == DType::kBF16 ? 1e-2 : 1e-5;
    EXPECT_LT(worst_error(values(da), want_da, 20.0), bound);
    EXPECT_LT(worst_error(values(dx), want_dx, 5.0), tolerance(dtype(), 1e-5) * 2);
    for (std::size_t p = 0; p < db.size(); ++p) EXPECT_LT(worst_error(values(db[p]), want_db[p], 20.0), bound) << "part " << p;

    // Overwriting gives what adding to zeros gives, and without dx the others stay the same.
    Tensor da_again = s.poisoned({R, K}, DType::kF32), da_sum = s.filled({R, K}, DType::kF32, 0.0f);
    lora_backward(s.ctx, {}, da_again, db_views, dy, x, adapter.weight, false, false);
    for (Tensor& t : db) EXPECT_TRUE(std::isfinite(get(t, 0)));
    lora_backward(s.ctx, dx, da_sum, db_views, dy, x, adapter.weight, false, true);
    EXPECT_TRUE(same_bits(da_again, da_sum));
  }
}

TEST_P(LoraTest, GradientsDoNotDependOnThreads) {
  Tensor first_da, first_db, first_dx;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    const Adapter adapter(s, {part(0, 90, 16, 2.0f)}, dtype(), 1, 130);
    const Tensor x = s.random({1100, 130}, dtype(), 5), dy = s.random({1100, 90}, dtype(), 6);
    Tensor da = s.filled({16, 130}, DType::kF32, 0.5f), db = s.filled({90, 16}, DType::kF32, 0.25f), dx = s.poisoned({1100, 130}, dtype());
    const TensorView db_view = db.view();
    lora_backward(s.ctx, dx, da, {&db_view, 1}, dy, x, adapter.weight, false, true);
    if (!first_da.defined()) {
      first_da = da.clone();
      first_db = db.clone();
      first_dx = dx.clone();
    }
    EXPECT_TRUE(same_bits(da, first_da) && same_bits(db, first_db) && same_bits(dx, first_dx)) << threads;
  }
}

TEST_P(LoraTest, DropoutFollowsItsSeed) {
  Session s(kind());
  const Tensor x = s.filled({64, 100}, dtype(), 1.0f);
  Tensor y = s.poisoned({64, 100}, dtype()), again = s.poisoned({64, 100}, dtype()), other = s.poisoned({64, 100}, dtype());
  dropout(s.ctx, y, x, {.seed = 11, .probability = 0.25f}, false);
  dropout(s.ctx, again, x, {.seed = 11, .probability = 0.25f}, false);
  dropout(s.ctx, other, x, {.seed = 12, .probability = 0.25f}, false);
  EXPECT_TRUE(same_bits(y, again));
  EXPECT_FALSE(same_bits(y, other));
  std::int64_t dropped = 0;
  const auto kept = static_cast<float>(rounded(1.0 / 0.75, dtype()));
  for (std::int64_t i = 0; i < y.num_elements(); ++i) {
    const bool is_zero = get(y, i) == 0.0f;
    EXPECT_TRUE(is_zero || std::abs(get(y, i) - kept) < 1e-6f) << get(y, i);
    EXPECT_EQ(is_zero, is_dropped(11, static_cast<std::uint64_t>(i), dropout_threshold(0.25f)));
    dropped += is_zero ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(dropped) / 6400, 0.25, 0.02);
  dropout(s.ctx, again, x, {.seed = 11, .probability = 0.25f}, true);
  for (std::int64_t i = 0; i < y.num_elements(); ++i) EXPECT_NEAR(get(again, i), 2 * get(y, i), 0.01f);
  dropout(s.ctx, y, x, {.seed = 11, .probability = 0.0f}, false);
  EXPECT_TRUE(same_bits(y, x));
}

TEST_P(LoraTest, ShapeErrorsNameTheOp) {
  Session s(kind());
  const Adapter adapter(s, {part(0, 40, 7, 2.0f)}, dtype(), 1);
  const Tensor x = s.random({2, kInputs}, dtype(), 2), narrow = s.random({2, kInputs - 1}, dtype(), 2);
  Tensor y = s.poisoned({2, 40}, dtype()), small = s.poisoned({2, 39}, dtype());
  const auto message = [&](Tensor& out, const Tensor& in, std::vector<std::int32_t> rows) -> std::string {
    try {
      add_lora(s.ctx, out, in, std::vector{LoraRows{&adapter.weight, rows}});
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kShape);
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(message(y, narrow, {0}), ::testing::HasSubstr("[add_lora]"));
  EXPECT_THAT(message(small, x, {0}), ::testing::HasSubstr("not among the outputs"));
  EXPECT_THAT(message(y, x, {1, 0}), ::testing::HasSubstr("must rise"));
  EXPECT_THAT(message(y, x, {2}), ::testing::HasSubstr("must rise within the batch"));
}

PRL_OP_TEST_KINDS(LoraTest);

}  // namespace
}  // namespace prl::ops
