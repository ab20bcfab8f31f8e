#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.hpp"
#include "ops/latent.hpp"
#include "ops/test_support.hpp"

// Attention to latents: what it gives is what attention of heads gives, and a row's bits are those of training, prefill and decode.

namespace prl::ops {
namespace {

using namespace testing;

class LatentAttentionTest : public OpTest {};

struct LatentSizes {
  std::int64_t H, N, R, V, L;
  std::vector<std::int32_t> lengths;
  bool neighbours = true;
  friend std::ostream& operator<<(std::ostream& out, const LatentSizes& s) {
    return out << s.H << " heads of " << s.N << "+" << s.R << " and " << s.V << ", latents of " << s.L;
  }
};

std::vector<std::int32_t> sequence_starts(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> out = {0};
  for (const std::int32_t n : lengths) out.push_back(out.back() + n);
  return out;
}

/// Queries, latents and the matrix of one layer.
struct LatentLayer {
  Session& s;
  LatentSizes sizes;
  DType dtype;
  LatentHeads heads;
  std::vector<std::int32_t> cu;
  std::int64_t T, E;
  Tensor q, down, w, positions;
  LinearWeightPtr up;
  RopeTable rope;
  float scale;

  LatentLayer(Session& session, const LatentSizes& z, DType type)
      : s(session),
        sizes(z),
        dtype(type),
        heads{z.H, z.N + z.R > z.V ? z.N + z.R : z.V, z.N, z.R, z.V, z.neighbours},
        cu(sequence_starts(z.lengths)),
        T(cu.back()),
        E(z.R + z.L),
        q(s.random({T, z.H * (z.N + z.R)}, type, 1)),
        down(s.random({T, z.L + z.R}, type, 2)),
        w(s.random({z.H * (z.N + z.V), z.L}, type, 3, 1.0f / std::sqrt(static_cast<float>(z.L)))),
        up(pack_linear(s.ctx, w, {}, type, /*with_backward=*/true)),
        scale(1.0f / std::sqrt(static_cast<float>(z.N + z.R))) {
    std::vector<std::int32_t> at;
    for (const std::int32_t length : z.lengths)
      for (std::int32_t t = 0; t < length; ++t) at.push_back(t);
    positions = s.ints(at);
    const std::int64_t longest = std::max<std::int64_t>(1, *std::ranges::max_element(z.lengths)), half = z.R / 2;
    rope = {s.filled({longest, half}, DType::kF32, 0), s.filled({longest, half}, DType::kF32, 0)};
    for (std::int64_t i = 0; i < longest * half; ++i) {
      const double angle = static_cast<double>(i / half) / std::pow(100.0, static_cast<double>(i % half) / static_cast<double>(half));
      rope.cos_PR2.as<float>()[i] = static_cast<float>(std::cos(angle));
      rope.sin_PR2.as<float>()[i] = static_cast<float>(std::sin(angle));
    }
  }
  ConstTensorView latent() { return down.view().columns(0, sizes.L); }
  ConstTensorView rotary() { return down.view().columns(sizes.L, sizes.R); }
  struct Heads {
    Tensor q, k;  ///< [T, H E], [T, E]
  };
  Heads queries() {
    Heads out{s.poisoned({T, sizes.H * E}, dtype), s.poisoned({T, E}, dtype)};
    latent_queries(s.ctx, out.q, out.k, q, latent(), rotary(), *up, heads, rope, positions);
    return out;
  }
  ConstTensorView queries_of(const Tensor& rows) const { return rows.view().reshaped({rows.shape()[0], sizes.H, E}); }
  ConstTensorView keys_of(const Heads& qk) const { return qk.k.view().reshaped({T, 1, E}); }
  VarlenAttention dense(const Heads& qk) const {
    VarlenAttention a;
    a.q_THD = queries_of(qk.q);
    a.k_TKD = keys_of(qk);
    a.cu_seqlens = cu;
    a.scale = scale;
    return a;
  }
  /// [T, H L] of whole sequences.
  Tensor attended(const Heads& qk, Tensor& lse) const {
    Tensor out = s.poisoned({T, sizes.H * sizes.L}, dtype);
    attention_varlen(s.ctx, out.view().reshaped({T, sizes.H, sizes.L}), lse, dense(qk));
    return out;
  }

  double rotated(const Tensor& of, std::int64_t first, std::int64_t t, std::int64_t r) const {
    const std::int64_t half = sizes.R / 2, pair = r % half, at = positions.as<std::int32_t>()[t] * half + pair;
    const auto value = [&](std::int64_t i) {
      return static_cast<double>(get(of, first + (sizes.neighbours ? 2 * pair + i : pair + i * half)));
    };
    const double c = static_cast<double>(rope.cos_PR2.as<float>()[at]), sine = static_cast<double>(rope.sin_PR2.as<float>()[at]);
    return r < half ? value(0) * c - value(1) * sine : value(1) * c + value(0) * sine;
  }
  /// Attention of heads in fp64: [T, H V] and [T, H].
  void reference(std::vector<double>& out, std::vector<double>& lse) const {
    const auto& [H, N, R, V, L, lengths, neighbours] = sizes;
    const std::int64_t Q = N + R, U = N + V;
    std::vector<double> keys(static_cast<std::size_t>(T * H * U)), turned(static_cast<std::size_t>(T * R));
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t n = 0; n < H * U; ++n) {
        double sum = 0;
        for (std::int64_t l = 0; l < L; ++l)
          sum += static_cast<double>(get(down, t * (L + R) + l)) * static_cast<double>(get(w, n * L + l));
        keys[static_cast<std::size_t>(t * H * U + n)] = sum;
      }
      for (std::int64_t r = 0; r < R; ++r) turned[static_cast<std::size_t>(t * R + r)] = rotated(down, t * (L + R) + L, t, r);
    }
    for (std::size_t i = 0; i < lengths.size(); ++i)
      for (std::int64_t t = cu[i]; t < cu[i + 1]; ++t)
        for (std::int64_t h = 0; h < H; ++h) {
          std::vector<double> p;
          for (std::int64_t j = cu[i]; j <= t; ++j) {
            double dot = 0;
            for (std::int64_t n = 0; n < N; ++n)
              dot += static_cast<double>(get(q, t * H * Q + h * Q + n)) * keys[static_cast<std::size_t>(j * H * U + h * U + n)];
            for (std::int64_t r = 0; r < R; ++r)
              dot += rotated(q, t * H * Q + h * Q + N, t, r) * turned[static_cast<std::size_t>(j * R + r)];
            p.push_back(dot * static_cast<double>(scale));
          }
          const double top = *std::ranges::max_element(p);
          double sum = 0;
          for (double& x : p) sum += x = std::exp(x - top);
          lse.push_back(top + std::log(sum));
          for (std::int64_t v = 0; v < V; ++v) {
            double x = 0;
            for (std::size_t j = 0; j < p.size(); ++j)
              x += p[j] / sum * keys[static_cast<std::size_t>((cu[i] + static_cast<std::int64_t>(j)) * H * U + h * U + N + v)];
            out.push_back(x);
          }
        }
  }
};

TEST_P(LatentAttentionTest, GivesWhatHeadsGive) {
  Session s(kind());
  for (const LatentSizes& sizes :
       {LatentSizes{1, 16, 16, 16, 16, {1, 3}}, LatentSizes{3, 24, 16, 8, 48, {65, 2}, false}, LatentSizes{16, 32, 64, 32, 128, {70}},
        LatentSizes{20, 16, 32, 24, 512, {33, 0, 20}}, LatentSizes{70, 8, 16, 8, 32, {40}}}) {
    LatentLayer layer(s, sizes, dtype());
    Tensor lse = s.poisoned({layer.T, sizes.H}, DType::kF32), y = s.poisoned({layer.T, sizes.H * sizes.V}, dtype());
    latent_values(s.ctx, y, layer.attended(layer.queries(), lse), *layer.up, layer.heads);
    std::vector<double> want, want_lse;
    layer.reference(want, want_lse);
    EXPECT_LT(worst_error(values(y), want, 1.0), dtype() == DType::kBF16 ? 3e-2 : 2e-5) << sizes;
    EXPECT_LT(worst_error(values(lse), want_lse, 1.0), dtype() == DType::kBF16 ? 2e-2 : 2e-5) << sizes;
  }
}

/// A product of a head is a row's own, whatever the other rows are.
TEST_P(LatentAttentionTest, RowsOfProductsDoNotDependOnOthers) {
  Session s(kind());
  const LatentSizes sizes{5, 24, 16, 40, 80, {130}};
  LatentLayer layer(s, sizes, dtype());
  const LatentLayer::Heads qk = layer.queries();
  Tensor x = s.random({layer.T, sizes.H * sizes.L}, dtype(), 7), y = s.poisoned({layer.T, sizes.H * sizes.V}, dtype());
  latent_values(s.ctx, y, x, *layer.up, layer.heads);
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1}, {129, 1}, {64, 1}, {3, 17}, {60, 70}}) {
    Tensor some = s.poisoned({count, sizes.H * layer.E}, dtype()), key = s.poisoned({count, layer.E}, dtype());
    Tensor values = s.poisoned({count, sizes.H * sizes.V}, dtype()), places = layer.positions.slice(first, count);
    latent_queries(s.ctx, some, key, layer.q.slice(first, count), layer.latent().rows(first, count), layer.rotary().rows(first, count),
                   *layer.up, layer.heads, layer.rope, places);
    EXPECT_TRUE(same_bits(some, qk.q.slice(first, count)) && same_bits(key, qk.k.slice(first, count))) << first;
    latent_values(s.ctx, values, x.slice(first, count), *layer.up, layer.heads);
    EXPECT_TRUE(same_bits(values, y.slice(first, count))) << first;
  }
}

/// A cache with shuffled blocks that holds all keys of a layer.
struct LatentCache {
  std::int64_t block_size, blocks_each;
  Tensor k;
  std::vector<std::int32_t> table;
  LatentCache(const LatentLayer& layer, std::int64_t size) : block_size(size) {
    blocks_each = (*std::ranges::max_element(layer.sizes.lengths) + size - 1) / size;
    const auto count = static_cast<std::int64_t>(layer.sizes.lengths.size()) * blocks_each;
    k = layer.s.poisoned({count + 1, 1, size, layer.E}, layer.dtype);
    for (std::int64_t i = 0; i < count; ++i) table.push_back(static_cast<std::int32_t>(count - i));
  }
  KvLayer layer() { return {k, {}}; }
  std::int32_t slot(std::size_t sequence, std::int32_t t) const {
    const auto block = static_cast<std::size_t>(blocks_each) * sequence + static_cast<std::size_t>(t / block_size);
    return static_cast<std::int32_t>(table[block] * block_size + t % block_size);
  }
  std::vector<std::int32_t> slots(const LatentLayer& layer) const {
    std::vector<std::int32_t> out;
    for (std::size_t i = 0; i < layer.sizes.lengths.size(); ++i)
      for (std::int32_t t = 0; t < layer.sizes.lengths[i]; ++t) out.push_back(slot(i, t));
    return out;
  }
};

Tensor chosen_rows(const Session& s, const Tensor& all, const std::vector<std::int64_t>& rows) {
  Tensor out = Tensor::empty(s.runtime, {static_cast<std::int64_t>(rows.size()), all.shape().num_cols()}, all.dtype());
  for (std::size_t r = 0; r < rows.size(); ++r)
    std::memcpy(out.slice(static_cast<std::int64_t>(r), 1).data(), all.slice(rows[r], 1).data(),
                all.num_bytes() / static_cast<std::size_t>(all.shape()[0]));
  return out;
}

/// Each row's bits through the cache, `step` new tokens of a sequence at a time.
void check_paged(Session& s, LatentLayer& layer, const Tensor& queries, const Tensor& want, LatentCache& cache, std::int32_t step,
                 std::int32_t first = 0) {
  const LatentSizes& z = layer.sizes;
  std::vector<std::int32_t> done(z.lengths.size());
  for (std::size_t i = 0; i < done.size(); ++i) done[i] = std::min(first, z.lengths[i] - 1);
  for (;;) {
    std::vector<std::int32_t> start = {0}, context;
    std::vector<std::int64_t> rows;
    for (std::size_t i = 0; i < z.lengths.size(); ++i) {
      const std::int32_t n = std::min(step, z.lengths[i] - done[i]);
      for (std::int32_t t = 0; t < n; ++t) rows.push_back(layer.cu[i] + done[i] + t);
      start.push_back(start.back() + n);
      done[i] += n;
      context.push_back(done[i]);
    }
    if (rows.empty()) return;
    const auto count = static_cast<std::int64_t>(rows.size());
    const Tensor some = chosen_rows(s, queries, rows);
    Tensor out = s.poisoned({count, z.H * z.L}, layer.dtype);
    PagedAttention a;
    a.q_THD = layer.queries_of(some);
    a.layer = cache.layer();
    a.query_start = start;
    a.context_len = context;
    a.block_table = cache.table;
    a.max_blocks = static_cast<std::int32_t>(cache.blocks_each);
    a.scale = layer.scale;
    attention_paged(s.ctx, out.view().reshaped({count, z.H, z.L}), a);
    for (std::size_t r = 0; r < rows.size(); ++r)
      ASSERT_TRUE(same_bits(out.slice(static_cast<std::int64_t>(r), 1), want.slice(rows[r], 1)))
          << z << " token " << rows[r] << " block " << cache.block_size << " step " << step;
  }
}

TEST_P(LatentAttentionTest, PagedEqualsVarlenBitForBit) {
  Session s(kind());
  for (const LatentSizes& sizes :
       {LatentSizes{1, 8, 16, 8, 16, {67, 1}}, LatentSizes{6, 16, 32, 16, 112, {100, 1, 129}}, LatentSizes{20, 16, 64, 16, 512, {70, 130}},
        LatentSizes{40, 16, 16, 16, 64, {70}}, LatentSizes{80, 8, 16, 8, 32, {66, 3}}}) {
    LatentLayer layer(s, sizes, dtype());
    const LatentLayer::Heads qk = layer.queries();
    Tensor lse = s.poisoned({layer.T, sizes.H}, DType::kF32);
    const Tensor want = layer.attended(qk, lse);
    for (const std::int64_t block_size : {4, 16, 64, 128}) {
      LatentCache cache(layer, block_size);
      kv_write(s.ctx, cache.layer(), layer.keys_of(qk), 0, {}, 0, cache.slots(layer));
      for (const std::int32_t step : {1, 5, 64, 1000}) {
        if (step == 1 && block_size != 16) continue;
        check_paged(s, layer, qk.q, want, cache, step);
      }
    }
  }
}

/// Beyond a chunk of keys, decoded from indices on the device where it can: chunks add up as in training.
TEST_P(LatentAttentionTest, LongContextsAreSplitWithoutATrace) {
  Session s(kind());
  const std::int32_t longest = 2 * kAttentionChunk + 70;
  const std::vector<std::int32_t> lengths = {longest, kAttentionChunk, 5};
  std::vector<LatentSizes> all = {LatentSizes{1, 8, 16, 8, 16, lengths}, LatentSizes{5, 8, 16, 8, 16, lengths}};
  // GPUs have kernels for more or fewer rows, and for latents of the usual size; the first key is as long as other models' keys are.
  if (kind().is_cuda)
    all = {LatentSizes{1, 8, 16, 8, 48, lengths}, LatentSizes{20, 8, 16, 8, 32, lengths}, LatentSizes{70, 8, 16, 8, 32, lengths},
           LatentSizes{20, 8, 64, 8, 512, lengths}};
  for (const LatentSizes& sizes : all) {
    const std::int64_t H = sizes.H;
    LatentLayer layer(s, sizes, dtype());
    const LatentLayer::Heads qk = layer.queries();
    Tensor lse = s.poisoned({layer.T, H}, DType::kF32);
    const Tensor want = layer.attended(qk, lse);
    LatentCache cache(layer, 32);
    const std::vector<std::int32_t> slots = cache.slots(layer);
    kv_write(s.ctx, cache.layer(), layer.keys_of(qk), 0, {}, 0, slots);
    check_paged(s, layer, qk.q, want, cache, 1, longest - 2);
    check_paged(s, layer, qk.q, want, cache, 700);
    if (!can_decode_by_index(s.ctx)) continue;
    // Keys of the last tokens are written by index, and a sequence that is not there changes nothing.
    std::vector<std::int64_t> rows;
    std::vector<std::int32_t> last_slots, context;
    for (std::size_t i = 0; i < sizes.lengths.size(); ++i) {
      rows.push_back(layer.cu[i + 1] - 1);
      context.push_back(sizes.lengths[i]);
      last_slots.push_back(slots[static_cast<std::size_t>(rows.back())]);
      for (std::int64_t e = 0; e < layer.E; ++e) Session::set(cache.k, last_slots.back() * layer.E + e, std::nanf(""));
    }
    rows.push_back(0);
    context.push_back(0);
    last_slots.push_back(-1);
    cache.table.resize(rows.size() * static_cast<std::size_t>(cache.blocks_each));
    const auto count = static_cast<std::int64_t>(rows.size());
    Tensor q = s.poisoned({static_cast<std::int64_t>(rows.size()), H * layer.E}, dtype());
    const Tensor of_q = chosen_rows(s, layer.q, rows), of_kv = chosen_rows(s, layer.down, rows);
    std::vector<std::int32_t> places;
    for (const std::int64_t row : rows) places.push_back(layer.positions.as<std::int32_t>()[row]);
    const Tensor slot_B = s.ints(last_slots), context_B = s.ints(context), all_blocks = s.ints(cache.table);
    const DecodeIndex index{slot_B, context_B, all_blocks.view().reshaped({count, cache.blocks_each})};
    Tensor out = s.poisoned({count, H, sizes.L}, dtype());
    const Tensor positions = s.ints(places);
    latent_queries_to_cache(s.ctx, q, cache.layer(), slot_B, of_q, of_kv.view().columns(0, sizes.L), of_kv.view().columns(sizes.L, sizes.R),
                            *layer.up, layer.heads, layer.rope, positions);
    EXPECT_TRUE(same_bits(q, chosen_rows(s, qk.q, rows)));
    Tensor plan = Tensor::empty(s.runtime, {static_cast<std::int64_t>(decode_plan_bytes(s.ctx, index, cache.block_size))}, DType::kU8);
    plan_decode(s.ctx, plan, layer.queries_of(q), cache.layer(), index);
    attention_decode(s.ctx, out, layer.queries_of(q), cache.layer(), index, plan, layer.scale);
    for (std::int64_t r = 0; r + 1 < count; ++r)
      EXPECT_EQ(std::memcmp(out.slice(r, 1).data(), want.slice(rows[static_cast<std::size_t>(r)], 1).data(),
                            want.num_bytes() / static_cast<std::size_t>(layer.T)),
                0)
          << H << " heads, sequence " << r;
    EXPECT_TRUE(std::isnan(get(out, (count - 1) * H * sizes.L))) << "the row of a sequence that is not there";
  }
}

TEST_P(LatentAttentionTest, SizesThatDoNotFitAreRefused) {
  Session s(kind());
  LatentLayer layer(s, {2, 8, 16, 8, 32, {3}}, dtype());
  const LatentLayer::Heads qk = layer.queries();
  Tensor lse = s.poisoned({3, 2}, DType::kF32), out = s.poisoned({3, 2, 24}, dtype()), q = qk.q, k = qk.k;
  VarlenAttention a = layer.dense(qk);
  EXPECT_THROW(attention_varlen(s.ctx, out, lse, a), Error) << "values of 24 elements";
  Tensor short_row = s.filled({3, 4}, dtype(), 0.0f);
  EXPECT_THROW(latent_values(s.ctx, short_row, q, *layer.up, layer.heads), Error);
  LatentHeads other = layer.heads;
  other.plain_dim = 16;
  EXPECT_THROW(latent_queries(s.ctx, q, k, layer.q, layer.latent(), layer.rotary(), *layer.up, other, layer.rope, layer.positions), Error);
  Tensor fits = s.poisoned({3, 2, 32}, dtype()), dq = s.poisoned({3, 2, 48}, dtype()), dk = s.poisoned({3, 1, 48}, dtype());
  EXPECT_THROW(attention_varlen_backward(s.ctx, dq, dk, dk, 0, 0, 0, fits, fits, lse, a), Error) << "no backward pass";
}

PRL_OP_TEST_KINDS(LatentAttentionTest);

}  // namespace
}  // namespace prl::ops
