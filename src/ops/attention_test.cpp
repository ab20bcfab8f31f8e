#include "ops/attention.hpp"

#include <algorithm>
#include <map>

#include "ops/attention_cases.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class AttentionTest : public OpTest {};

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> out = {0};
  for (const std::int32_t n : lengths) out.push_back(out.back() + n);
  return out;
}

/// q, k, v as slices of one fused projection, as models have them.
struct Problem {
  AttentionCase c;
  std::vector<std::int32_t> cu;
  std::int64_t T, width;
  Tensor qkv, sinks;
  VarlenAttention args;

  Problem(Session& s, const AttentionCase& kase, DType dtype, std::uint64_t seed = 1)
      : c(kase), cu(cumulative(kase.lengths)), T(cu.back()), width((c.Hq + 2 * c.Hkv) * c.D) {
    qkv = s.random({std::max<std::int64_t>(T, 1), width}, dtype, seed);
    args.q_THD = slice(0, c.Hq);
    args.k_TKD = slice(c.Hq, c.Hkv);
    args.v_TKD = slice(c.Hq + c.Hkv, c.Hkv);
    args.q_token_stride = args.k_token_stride = args.v_token_stride = width;
    args.cu_seqlens = cu;
    args.scale = 1.0f / std::sqrt(static_cast<float>(c.D));
    args.window = c.window;
    if (!c.has_sinks) return;
    sinks = s.random({c.Hq}, DType::kF32, seed + 100, 2.0f);
    args.sinks_H = sinks;
  }
  bool sees(std::int64_t query, std::int64_t key) const { return c.window == 0 || key > query - c.window; }
  ConstTensorView slice(std::int64_t first_head, std::int64_t heads) const {
    return {qkv.as<char>() + first_head * c.D * static_cast<std::int64_t>(size_of(qkv.dtype())),
            {T, heads, c.D},
            qkv.dtype(),
            qkv.runtime()->device(),
            c.D};
  }
  double q(std::int64_t t, std::int64_t h, std::int64_t d) const { return get(qkv, t * width + h * c.D + d); }
  double k(std::int64_t t, std::int64_t h, std::int64_t d) const { return get(qkv, t * width + (c.Hq + h) * c.D + d); }
  double v(std::int64_t t, std::int64_t h, std::int64_t d) const { return get(qkv, t * width + (c.Hq + c.Hkv + h) * c.D + d); }

  struct Reference {
    std::vector<double> out, lse, dq, dk, dv, dsinks;
  };
  /// Plain softmax attention and its gradient in fp64.
  Reference reference(const std::vector<float>& dout) const {
    Reference r;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    r.out.resize(size(T * c.Hq * c.D));
    r.lse.resize(size(T * c.Hq));
    r.dq.resize(r.out.size());
    r.dk.resize(size(T * c.Hkv * c.D));
    r.dv.resize(r.dk.size());
    r.dsinks.resize(size(c.Hq));
    for (std::size_t s = 0; s + 1 < cu.size(); ++s)
      for (std::int64_t t = cu[s]; t < cu[s + 1]; ++t)
        for (std::int64_t h = 0; h < c.Hq; ++h) {
          const std::int64_t g = h / (c.Hq / c.Hkv);
          std::vector<double> p;
          double top = -1e300, sum = 0, delta = 0;
          for (std::int64_t j = cu[s]; j <= t; ++j) {
            double dot = 0;
            for (std::int64_t d = 0; d < c.D; ++d) dot += q(t, h, d) * k(j, g, d);
            p.push_back(sees(t, j) ? dot * static_cast<double>(args.scale) : -1e300);
            top = std::max(top, p.back());
          }
          const double sink = c.has_sinks ? static_cast<double>(sinks.as<float>()[h]) : -1e300;
          top = std::max(top, sink);
          for (double& x : p) sum += x = std::exp(x - top);
          sum += std::exp(sink - top);
          for (double& x : p) x /= sum;
          r.lse[size(t * c.Hq + h)] = top + std::log(sum);
          std::vector<double> dp(p.size());
          for (std::size_t j = 0; j < p.size(); ++j)
            for (std::int64_t d = 0; d < c.D; ++d) {
              const std::size_t at = size((t * c.Hq + h) * c.D + d);
              const double x = v(cu[s] + static_cast<std::int64_t>(j), g, d);
              r.out[at] += p[j] * x;
              if (!dout.empty()) dp[j] += static_cast<double>(dout[at]) * x;
            }
          if (dout.empty()) continue;
          for (std::size_t j = 0; j < p.size(); ++j) delta += p[j] * dp[j];
          r.dsinks[size(h)] -= std::exp(sink - top) / sum * delta;
          for (std::size_t j = 0; j < p.size(); ++j)
            for (std::int64_t d = 0; d < c.D; ++d) {
              const std::int64_t key = cu[s] + static_cast<std::int64_t>(j);
              const double ds = p[j] * (dp[j] - delta) * static_cast<double>(args.scale);
              r.dq[size((t * c.Hq + h) * c.D + d)] += ds * k(key, g, d);
              r.dk[size((key * c.Hkv + g) * c.D + d)] += ds * q(t, h, d);
              r.dv[size((key * c.Hkv + g) * c.D + d)] += p[j] * static_cast<double>(dout[size((t * c.Hq + h) * c.D + d)]);
            }
        }
    return r;
  }
};

/// A paged cache with shuffled blocks, written through kv_write.
struct Cache {
  std::int64_t block_size, blocks_each;
  Tensor k, v;
  std::vector<std::int32_t> table;

  Cache(Session& s, const Problem& p, std::int64_t size) : block_size(size) {
    std::int32_t longest = 1;
    for (const std::int32_t n : p.c.lengths) longest = std::max(longest, n);
    blocks_each = (longest + block_size - 1) / block_size;
    const auto count = static_cast<std::int64_t>(p.c.lengths.size()) * blocks_each;
    k = s.poisoned({count + 1, p.c.Hkv, block_size, p.c.D}, p.qkv.dtype());
    v = s.poisoned({count + 1, p.c.Hkv, block_size, p.c.D}, p.qkv.dtype());
    table.resize(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i)
      table[static_cast<std::size_t>(i)] = static_cast<std::int32_t>((i * 7 + 3) % count + (count % 7 == 0 ? 1 : 0));
    std::vector<bool> seen(static_cast<std::size_t>(count + 1));
    for (auto& b : table) {
      while (seen[static_cast<std::size_t>(b)]) b = static_cast<std::int32_t>((b + 1) % (count + 1));
      seen[static_cast<std::size_t>(b)] = true;
    }
    std::vector<std::int32_t> slots;
    for (std::size_t i = 0; i < p.c.lengths.size(); ++i)
      for (std::int32_t t = 0; t < p.c.lengths[i]; ++t)
        slots.push_back(static_cast<std::int32_t>(
            table[i * static_cast<std::size_t>(blocks_each) + static_cast<std::size_t>(t / block_size)] * block_size + t % block_size));
    kv_write(s.ctx, {k, v}, p.args.k_TKD, p.width, p.args.v_TKD, p.width, slots);
  }
};

/// p.reference(dout), which costs far more than what is compared with it: computed once for all instruction sets, whose inputs are alike.
const Problem::Reference& reference_of(const Problem& p, DType dtype, const std::vector<float>& dout) {
  static std::map<std::pair<std::string, DType>, std::pair<std::vector<float>, Problem::Reference>> known;
  std::vector<float> inputs = values(p.qkv);
  inputs.insert(inputs.end(), dout.begin(), dout.end());
  auto& [of, reference] = known[{p.c.name, dtype}];
  if (of != inputs) of = inputs, reference = p.reference(dout);
  return reference;
}

TEST_P(AttentionTest, AgreesWithPlainSoftmax) {
  Session s(kind());
  for (const AttentionCase& c : kAttentionCases) {
    SCOPED_TRACE(c.name);
    Problem p(s, c, dtype());
    Tensor out = s.poisoned({p.T, c.Hq, c.D}, dtype()), lse = s.poisoned({p.T, c.Hq}, DType::kF32);
    attention_varlen(s.ctx, out, lse, p.args);
    const auto& want = reference_of(p, dtype(), {});
    EXPECT_LT(worst_error(values(out), want.out, 1.0), tolerance(dtype(), 3e-6));
    EXPECT_LT(worst_error(values(lse), want.lse, 1.0), 3e-6);
  }
}

TEST_P(AttentionTest, GradientAgreesWithPlainSoftmax) {
  Session s(kind());
  for (const AttentionCase& c : kAttentionCases) {
    SCOPED_TRACE(c.name);
    Problem p(s, c, dtype());
    Tensor out = s.poisoned({p.T, c.Hq, c.D}, dtype()), lse = s.poisoned({p.T, c.Hq}, DType::kF32),
           dout = s.random({p.T, c.Hq, c.D}, dtype(), 9);
    attention_varlen(s.ctx, out, lse, p.args);
    const auto& want = reference_of(p, dtype(), values(dout));
    Tensor dq = s.poisoned({p.T, c.Hq, c.D}, dtype()), dk = s.poisoned({p.T, c.Hkv, c.D}, dtype()),
           dv = s.poisoned({p.T, c.Hkv, c.D}, dtype());
    attention_varlen_backward(s.ctx, dq, dk, dv, 0, 0, 0, dout, out, lse, p.args);
    const double bound = dtype() == DType::kBF16 ? 2e-2 : 1e-5;  // bf16: delta is formed from the rounded output
    EXPECT_LT(worst_error(values(dq), want.dq, 1.0), bound);
    EXPECT_LT(worst_error(values(dk), want.dk, 1.0), bound);
    EXPECT_LT(worst_error(values(dv), want.dv, 1.0), bound);
    if (!c.has_sinks) continue;
    Tensor dsinks = s.filled({c.Hq}, DType::kF32, 1.0f);
    attention_sinks_backward(s.ctx, dsinks, dout, out, lse, p.sinks);
    std::vector<double> with_before = want.dsinks;
    for (double& x : with_before) x += 1.0;
    EXPECT_LT(worst_error(values(dsinks), with_before, 1.0), bound);
  }
}

/// One that no row gives a weight changes nothing but, perhaps, a last bit of the scale; a great one takes all.
TEST_P(AttentionTest, SinksOfAnySizeAreTakenAsTheyAre) {
  Session s(kind());
  Problem p(s, {"", 2, 1, 32, {70}, 0, true}, dtype());
  Tensor out = s.poisoned({p.T, 2, 32}, dtype()), lse = s.poisoned({p.T, 2}, DType::kF32);
  const auto run = [&](float sink) {
    for (std::int64_t h = 0; h < 2; ++h) p.sinks.as<float>()[h] = sink;
    attention_varlen(s.ctx, out, lse, p.args);
  };
  run(-300.0f);
  Tensor plain = s.poisoned({p.T, 2, 32}, dtype()), plain_lse = s.poisoned({p.T, 2}, DType::kF32);
  VarlenAttention without = p.args;
  without.sinks_H = {};
  attention_varlen(s.ctx, plain, plain_lse, without);
  const std::vector<float> wanted = values(plain);
  EXPECT_LT(worst_error(values(out), {wanted.begin(), wanted.end()}, 1.0), tolerance(dtype(), 1e-6));
  run(300.0f);
  for (const float x : values(out)) ASSERT_EQ(x, 0.0f);
  for (const float x : values(lse)) ASSERT_EQ(x, 300.0f);
  const Tensor dout = s.random({p.T, 2, 32}, dtype(), 9);
  Tensor dsinks = s.filled({2}, DType::kF32, 0.0f);
  attention_sinks_backward(s.ctx, dsinks, dout, out, lse, p.sinks);
  for (const float x : values(dsinks)) EXPECT_EQ(x, 0.0f);
}

TEST_P(AttentionTest, GradientsOfSinksDoNotDependOnThreads) {
  Tensor first;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    Problem p(s, {"", 6, 2, 32, {700, 3, 520}, 0, true}, dtype());
    Tensor out = s.poisoned({p.T, 6, 32}, dtype()), lse = s.poisoned({p.T, 6}, DType::kF32), dsinks = s.filled({6}, DType::kF32, 0.0f);
    attention_varlen(s.ctx, out, lse, p.args);
    attention_sinks_backward(s.ctx, dsinks, s.random({p.T, 6, 32}, dtype(), 9), out, lse, p.sinks);
    if (!first.defined()) first = dsinks.clone();
    EXPECT_TRUE(same_bits(dsinks, first)) << threads;
  }
}

TEST_P(AttentionTest, GradientIntoStridedViewsAndAnyNumberOfThreads) {
  const AttentionCase c{"", 6, 2, 32, {70, 3, 90}};
  Tensor first;
  for (const int threads : {1, 2, 3}) {
    Session s(kind(), threads);
    Problem p(s, c, dtype());
    Tensor out = s.poisoned({p.T, c.Hq, c.D}, dtype()), lse = s.poisoned({p.T, c.Hq}, DType::kF32),
           dout = s.random({p.T, c.Hq, c.D}, dtype(), 9);
    attention_varlen(s.ctx, out, lse, p.args);
    Tensor fused = s.poisoned({p.T, p.width}, dtype());
    const auto part = [&](std::int64_t head, std::int64_t heads) {
      return TensorView{fused.as<char>() + head * c.D * static_cast<std::int64_t>(size_of(dtype())),
                        {p.T, heads, c.D},
                        dtype(),
                        s.runtime->device(),
                        c.D};
    };
    attention_varlen_backward(s.ctx, part(0, c.Hq), part(c.Hq, c.Hkv), part(c.Hq + c.Hkv, c.Hkv), p.width, p.width, p.width, dout, out, lse,
                              p.args);
    for (const float x : values(fused)) ASSERT_FALSE(std::isnan(x));
    if (!first.defined()) first = fused.clone();
    EXPECT_TRUE(same_bits(fused, first)) << threads;
  }
}

/// Training, chunked prefill and decode over pages of any size, alone or mixed, give the same bits.
TEST_P(AttentionTest, PagedEqualsVarlenBitForBit) {
  for (const AttentionCase& c :
       {AttentionCase{"", 6, 2, 64, {150, 1, 67}}, AttentionCase{"", 2, 2, 80, {129, 30}}, AttentionCase{"", 6, 2, 64, {150, 1, 67}, 33},
        AttentionCase{"", 2, 2, 80, {229, 30}, 70}, AttentionCase{"", 6, 2, 64, {150, 1, 67}, 33, true}}) {
    Session one(kind(), 1), two(kind(), 2), three(kind(), 3);
    Problem p(one, c, dtype());
    Tensor want = one.poisoned({p.T, c.Hq, c.D}, dtype());
    attention_varlen(one.ctx, want, {}, p.args);
    int round = 0;
    for (const std::int64_t block_size : {1, 16, 64, 128}) {
      for (const std::int32_t step : {1, 7, 64, 1000}) {
        if (step == 1 && block_size != 16) continue;  // token by token is slow
        Session& s = ++round % 3 == 0 ? one : round % 3 == 1 ? two : three;
        Cache cache(s, p, block_size);
        // All sequences side by side, each `step` queries further per call.
        std::vector<std::int32_t> done(c.lengths.size(), 0);
        for (;;) {
          std::vector<std::int32_t> start = {0}, context;
          std::vector<std::int64_t> rows;
          for (std::size_t i = 0; i < c.lengths.size(); ++i) {
            const std::int32_t n = std::min(step, c.lengths[i] - done[i]);
            for (std::int32_t t = 0; t < n; ++t) rows.push_back(p.cu[i] + done[i] + t);
            start.push_back(start.back() + n);
            done[i] += n;
            context.push_back(std::max(done[i], 1));
          }
          const auto T = static_cast<std::int64_t>(rows.size());
          if (T == 0) break;
          Tensor q = s.poisoned({T, c.Hq, c.D}, dtype()), out = s.poisoned({T, c.Hq, c.D}, dtype());
          const std::size_t row_bytes = static_cast<std::size_t>(c.Hq * c.D) * size_of(dtype());
          for (std::int64_t r = 0; r < T; ++r)
            std::memcpy(q.as<char>() + static_cast<std::size_t>(r) * row_bytes, p.qkv.slice(rows[static_cast<std::size_t>(r)], 1).data(),
                        row_bytes);
          attention_paged(s.ctx, out,
                          {.q_THD = q,
                           .layer = {cache.k, cache.v},
                           .query_start = start,
                           .context_len = context,
                           .block_table = cache.table,
                           .max_blocks = static_cast<std::int32_t>(cache.blocks_each),
                           .scale = p.args.scale,
                           .window = c.window,
                           .sinks_H = p.args.sinks_H});
          for (std::int64_t r = 0; r < T; ++r)
            ASSERT_TRUE(same_bits(out.slice(r, 1), want.slice(rows[static_cast<std::size_t>(r)], 1)))
                << "token " << rows[static_cast<std::size_t>(r)] << " block " << block_size << " step " << step;
        }
      }
    }
  }
}

class LongAttention : public AttentionTest {
 protected:
  void check(std::int64_t window, bool has_sinks = false);
};
void LongAttention::check(std::int64_t window, bool has_sinks) {
  const AttentionCase c{"", 2, 1, 16, {2 * kAttentionChunk + 70}, window, has_sinks};
  Session one(kind(), 1), three(kind(), 3);
  Problem p(one, c, dtype());
  Tensor want = one.poisoned({p.T, c.Hq, c.D}, dtype()), lse = one.poisoned({p.T, c.Hq}, DType::kF32);
  attention_varlen(one.ctx, want, lse, p.args);
  const auto exact = [&](std::int64_t t) {
    std::vector<double> out(static_cast<std::size_t>(c.D), 0.0), w;
    double top = -1e300, sum = 0;
    for (std::int64_t j = 0; j <= t; ++j) {
      double dot = 0;
      for (std::int64_t d = 0; d < c.D; ++d) dot += p.q(t, 1, d) * p.k(j, 0, d);
      w.push_back(p.sees(t, j) ? dot * static_cast<double>(p.args.scale) : -1e300);
      top = std::max(top, w.back());
    }
    for (double& x : w) sum += x = std::exp(x - top);
    if (has_sinks) sum += std::exp(static_cast<double>(p.sinks.as<float>()[1]) - top);
    for (std::int64_t j = 0; j <= t; ++j)
      for (std::int64_t d = 0; d < c.D; ++d) out[static_cast<std::size_t>(d)] += w[static_cast<std::size_t>(j)] / sum * p.v(j, 0, d);
    return out;
  };
  for (const std::int64_t t : {std::int64_t{1023}, std::int64_t{1024}, p.T - 1}) {
    const auto row = values(want.slice(t, 1));
    EXPECT_LT(worst_error({row.begin() + c.D, row.end()}, exact(t), 1.0), tolerance(dtype(), 3e-6)) << t;
  }
  Cache cache(three, p, 16);
  for (const std::int32_t count : {1, 5, 40, 300}) {
    const std::vector<std::int32_t> start = {0, count}, context = {static_cast<std::int32_t>(p.T)};
    Tensor out = three.poisoned({count, c.Hq, c.D}, dtype());
    attention_paged(three.ctx, out,
                    {.q_THD = {p.qkv.slice(p.T - count, count).data(), {count, c.Hq, c.D}, dtype(), three.runtime->device(), c.D},
                     .q_token_stride = p.width,
                     .layer = {cache.k, cache.v},
                     .query_start = start,
                     .context_len = context,
                     .block_table = cache.table,
                     .max_blocks = static_cast<std::int32_t>(cache.blocks_each),
                     .scale = p.args.scale,
                     .window = window,
                     .sinks_H = p.args.sinks_H});
    EXPECT_TRUE(same_bits(out, want.slice(p.T - count, count))) << count;
  }
}

/// Beyond one chunk of keys: the split decode of few queries adds in the order of the training kernel.
TEST_P(LongAttention, ContextsAreSplitWithoutATrace) { check(0); }
TEST_P(LongAttention, SinksJoinAfterTheLastChunk) {
  check(0, true);
  check(1100, true);
}
/// Windows that begin in a chunk before that of the query, in the query's own, or with a chunk.
TEST_P(LongAttention, WindowsAreSplitWithoutATrace) {
  for (const std::int64_t window : {60, 71, 1024, 1100}) {
    SCOPED_TRACE(window);
    check(window);
  }
}

/// The window that holds all keys is none, to the bit.
TEST_P(AttentionTest, AWindowOfAllKeysIsNone) {
  Session s(kind());
  Problem p(s, {"", 4, 2, 32, {150, 66}}, dtype());
  Tensor dout = s.random({p.T, 4, 32}, dtype(), 9);
  std::vector<Tensor> found[2];
  for (const bool has_window : {false, true}) {
    p.args.window = has_window ? 150 : 0;
    Tensor out = s.poisoned({p.T, 4, 32}, dtype()), lse = s.poisoned({p.T, 4}, DType::kF32), dq = s.poisoned({p.T, 4, 32}, dtype()),
           dk = s.poisoned({p.T, 2, 32}, dtype()), dv = s.poisoned({p.T, 2, 32}, dtype());
    attention_varlen(s.ctx, out, lse, p.args);
    attention_varlen_backward(s.ctx, dq, dk, dv, 0, 0, 0, dout, out, lse, p.args);
    found[has_window ? 1 : 0] = {out, lse, dq, dk, dv};
  }
  for (std::size_t i = 0; i < found[0].size(); ++i) EXPECT_TRUE(same_bits(found[0][i], found[1][i])) << i;
}

TEST_P(AttentionTest, ASequenceDoesNotSeeItsNeighbours) {
  Session s(kind());
  const AttentionCase together{"", 4, 2, 32, {50, 80, 20}}, alone{"", 4, 2, 32, {80}};
  Problem p(s, together, dtype());
  Tensor all = s.poisoned({p.T, 4, 32}, dtype()), lse = s.poisoned({p.T, 4}, DType::kF32);
  attention_varlen(s.ctx, all, lse, p.args);
  Problem q(s, alone, dtype());
  std::memcpy(q.qkv.data(), p.qkv.slice(50, 80).data(), q.qkv.num_bytes());
  Tensor one = s.poisoned({80, 4, 32}, dtype()), one_lse = s.poisoned({80, 4}, DType::kF32);
  attention_varlen(s.ctx, one, one_lse, q.args);
  EXPECT_TRUE(same_bits(one, all.slice(50, 80)));
  EXPECT_TRUE(same_bits(one_lse, lse.slice(50, 80)));
}

TEST_P(AttentionTest, LargeScoresDoNotOverflow) {
  Session s(kind());
  Problem p(s, {"", 1, 1, 16, {100}}, dtype());
  p.args.scale = 300.0f;
  Tensor out = s.poisoned({p.T, 1, 16}, dtype()), lse = s.poisoned({p.T, 1}, DType::kF32);
  attention_varlen(s.ctx, out, lse, p.args);
  EXPECT_LT(worst_error(values(out), p.reference({}).out, 1.0),
            tolerance(dtype(), 2e-3));  // scores of several thousand carry their own rounding
}

TEST_P(AttentionTest, SkippedSlotsAreLeftAlone) {
  Session s(kind());
  Tensor k = s.filled({2, 1, 2, 16}, dtype(), 3.0f), v = s.filled({2, 1, 2, 16}, dtype(), 4.0f),
         new_k = s.filled({2, 1, 16}, dtype(), 1.0f), new_v = s.filled({2, 1, 16}, dtype(), 2.0f);
  const std::vector<std::int32_t> slots = {-1, 3};
  kv_write(s.ctx, {k, v}, new_k, 0, new_v, 0, slots);
  const auto count = [](const Tensor& t, float value) { return std::ranges::count(values(t), value); };
  EXPECT_EQ(count(k, 1.0f), 16);
  EXPECT_EQ(count(k, 3.0f), 48);
  EXPECT_EQ(count(v, 2.0f), 16);
  EXPECT_EQ(count(v, 4.0f), 48);
  const std::vector<std::int32_t> outside = {0, 4};
  EXPECT_THROW(kv_write(s.ctx, {k, v}, new_k, 0, new_v, 0, outside), Error);
}

PRL_OP_TEST_KINDS(AttentionTest);
PRL_OP_TEST_KINDS(LongAttention);

}  // namespace
}  // namespace prl::ops
