#include "ops/attention.hpp"
#include "base/normal_draws.hpp"

#include <algorithm>

#include "ops/attention_cases.hpp"
#include "ops/cuda/attention/bodies.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/op_table.hpp"
#include "ops/test_support.hpp"

// Attention on the GPU against the CPU bodies, and against itself: dense, paged, chunked, batched, planned on the device.

namespace prl::ops {
namespace {

using namespace testing;
using cuda::AttentionFamily;

struct FamilyAndType {
  AttentionFamily family;
  DType dtype;
};
std::ostream& operator<<(std::ostream& out, const FamilyAndType& f) {
  return out << (f.family == AttentionFamily::kHopper ? "hopper_" : "plain_") << to_string(f.dtype);
}

/// The bodies to compare with.
struct CpuSession {
  std::shared_ptr<DeviceRuntime> runtime = make_cpu_runtime();
  OpSession session{runtime, 0};
  OpContext& ctx = session.context();

  Tensor filled(Shape shape, DType dtype, float value) {
    Tensor t = Tensor::empty(runtime, shape, dtype);
    for (std::int64_t i = 0; i < t.num_elements(); ++i) Session::set(t, i, value);
    return t;
  }
  Tensor poisoned(Shape shape, DType dtype) { return filled(shape, dtype, std::numeric_limits<float>::quiet_NaN()); }
  Tensor random(Shape shape, DType dtype, std::uint64_t seed) {
    Tensor t = Tensor::empty(runtime, shape, dtype);
    Rng rng(seed);
    const std::vector<float> values = normal_draws(rng, t.num_elements());
    for (std::int64_t i = 0; i < t.num_elements(); ++i) Session::set(t, i, values[static_cast<std::size_t>(i)]);
    return t;
  }
};
struct GpuSession {
  std::shared_ptr<DeviceRuntime> runtime = make_cuda_runtime(0);
  OpSession session{runtime, 1};
  OpContext& ctx = session.context();

  Tensor copy(const Tensor& host) {
    Tensor t = Tensor::empty(runtime, host.shape(), host.dtype());
    runtime->copy_from_host(t.data(), host.data(), host.num_bytes());
    return t;
  }
  Tensor poisoned(Shape shape, DType dtype) {
    Tensor t = Tensor::empty(runtime, shape, dtype);
    const std::vector<unsigned char> ones(t.num_bytes(), 0xff);  // NaN in every floating type
    runtime->copy_from_host(t.data(), ones.data(), ones.size());
    return t;
  }
  Tensor host(const Tensor& t) {
    static const std::shared_ptr<DeviceRuntime> cpu = make_cpu_runtime();
    Tensor out = Tensor::empty(cpu, t.shape(), t.dtype());
    runtime->copy_to_host(out.data(), t.data(), t.num_bytes());
    return out;
  }
  template <typename T>
  Tensor ints(const std::vector<T>& v) {
    Tensor t = Tensor::empty(runtime, {std::max<std::int64_t>(1, static_cast<std::int64_t>(v.size()))}, DType::kI32);
    runtime->copy_from_host(t.data(), v.data(), v.size() * sizeof(T));
    return t;
  }
};

std::vector<std::int32_t> gpu_cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> out = {0};
  for (const std::int32_t n : lengths) out.push_back(out.back() + n);
  return out;
}

/// q, k, v as slices of one fused projection, on host and device.
struct GpuProblem {
  AttentionCase c;
  std::vector<std::int32_t> cu;
  std::int64_t T, width;
  Tensor host_qkv, qkv, host_sinks, sinks;
  float scale;

  GpuProblem(CpuSession& cpu, GpuSession& gpu, const AttentionCase& kase, DType dtype, std::uint64_t seed = 1)
      : c(kase), cu(gpu_cumulative(kase.lengths)), T(cu.back()), width((c.Hq + 2 * c.Hkv) * c.D) {
    host_qkv = cpu.random({std::max<std::int64_t>(T, 1), width}, dtype, seed);
    qkv = gpu.copy(host_qkv);
    scale = 1.0f / std::sqrt(static_cast<float>(c.D));
    if (!c.has_sinks) return;
    host_sinks = cpu.random({c.Hq}, DType::kF32, seed + 100);
    sinks = gpu.copy(host_sinks);
  }
  const float* device_sinks() const { return c.has_sinks ? sinks.as<float>() : nullptr; }
  ConstTensorView slice(const Tensor& t, std::int64_t first_head, std::int64_t heads) const {
    const auto size = static_cast<std::int64_t>(size_of(t.dtype()));
    return {t.as<char>() + first_head * c.D * size, {T, heads, c.D}, t.dtype(), t.runtime()->device(), c.D};
  }
  VarlenAttention args(const Tensor& t) const {
    return {.q_THD = slice(t, 0, c.Hq),
            .k_TKD = slice(t, c.Hq, c.Hkv),
            .v_TKD = slice(t, c.Hq + c.Hkv, c.Hkv),
            .q_token_stride = width,
            .k_token_stride = width,
            .v_token_stride = width,
            .cu_seqlens = cu,
            .scale = scale,
            .window = c.window,
            .sinks_H = !c.has_sinks                                     ? ConstTensorView{}
                       : t.runtime()->device().kind == DeviceKind::kCpu ? host_sinks
                                                                        : sinks};
  }
};

std::vector<double> doubles(const Tensor& t) {
  const std::vector<float> v = values(t);
  return {v.begin(), v.end()};
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> out = kAttentionCases;
  out.push_back({"group_of_three", 6, 2, 96, {50, 200}});
  out.push_back({"group_of_seven", 14, 2, 64, {131}});
  if (is_watched()) {
    out.push_back({"every_edge", 2, 1, 64, {127, 128, 129, 1}});
    out.push_back({"chunks", 2, 1, 64, {1030}});
    out.push_back({"d256", 1, 1, 256, {200}});
    out.push_back({"window_in_chunks", 2, 1, 64, {1100}, 200});
    return out;
  }
  out.push_back({"every_edge", 4, 2, 64, {127, 128, 129, 1, 255, 256, 257}});
  out.push_back({"chunks", 4, 2, 128, {1100, 1024, 1025}});
  out.push_back({"window_in_chunks", 4, 2, 128, {2200, 1300, 700}, 513});
  out.push_back({"window_of_a_tile", 8, 2, 64, {1300, 129}, 128});
  out.push_back({"window_before_a_tile", 2, 2, 96, {1100}, 127});
  out.push_back({"group_of_one", 2, 2, 128, {900}, 200});
  out.push_back({"chunks_d256", 2, 2, 256, {1100}});
  out.push_back({"d16_long", 2, 1, 16, {2118}});
  return out;
}

class CudaAttentionTest : public ::testing::TestWithParam<FamilyAndType> {
 protected:
  void SetUp() override {
    if (family() == AttentionFamily::kHopper && cuda::chosen_attention_family(gpu.ctx) != AttentionFamily::kHopper)
      GTEST_SKIP() << "not compute capability 9.0";
  }
  AttentionFamily family() const { return GetParam().family; }
  DType dtype() const { return GetParam().dtype; }
  double bound(double f32, double bf16) const { return dtype() == DType::kBF16 ? bf16 : f32; }

  void varlen(Tensor& out, TensorView lse, const VarlenAttention& args) { cuda::attention_varlen(gpu.ctx, family(), out, lse, args); }
  struct Gradients {
    Tensor dq, dk, dv;
  };
  Gradients backward(const GpuProblem& p, const Tensor& dout, const Tensor& out, const Tensor& lse) {
    const AttentionCase& c = p.c;
    Gradients g{gpu.poisoned({p.T, c.Hq, c.D}, dtype()), gpu.poisoned({p.T, c.Hkv, c.D}, dtype()),
                gpu.poisoned({p.T, c.Hkv, c.D}, dtype())};
    cuda::attention_varlen_backward(gpu.ctx, family(), g.dq, g.dk, g.dv, c.Hq * c.D, c.Hkv * c.D, c.Hkv * c.D, dout, out, lse,
                                    p.args(p.qkv));
    return g;
  }

  CpuSession cpu;
  GpuSession gpu;
};

TEST_P(CudaAttentionTest, AgreesWithTheCpu) {
  for (const AttentionCase& c : cases()) {
    SCOPED_TRACE(c.name);
    GpuProblem p(cpu, gpu, c, dtype());
    Tensor want = cpu.poisoned({p.T, c.Hq, c.D}, dtype()), want_lse = cpu.poisoned({p.T, c.Hq}, DType::kF32);
    attention_varlen(cpu.ctx, want, want_lse, p.args(p.host_qkv));
    Tensor out = gpu.poisoned({p.T, c.Hq, c.D}, dtype()), lse = gpu.poisoned({p.T, c.Hq}, DType::kF32);
    varlen(out, lse, p.args(p.qkv));
    EXPECT_LT(worst_error(values(gpu.host(out)), doubles(want), 1.0), bound(3e-6, 1e-2));
    EXPECT_LT(worst_error(values(gpu.host(lse)), doubles(want_lse), 1.0), bound(3e-6, 1e-5));
  }
}

TEST_P(CudaAttentionTest, GradientAgreesWithTheCpu) {
  for (const AttentionCase& c : cases()) {
    SCOPED_TRACE(c.name);
    GpuProblem p(cpu, gpu, c, dtype());
    Tensor out = cpu.poisoned({p.T, c.Hq, c.D}, dtype()), lse = cpu.poisoned({p.T, c.Hq}, DType::kF32);
    attention_varlen(cpu.ctx, out, lse, p.args(p.host_qkv));
    Tensor dout = cpu.random({p.T, c.Hq, c.D}, dtype(), 9);
    Tensor dq = cpu.poisoned({p.T, c.Hq, c.D}, dtype()), dk = cpu.poisoned({p.T, c.Hkv, c.D}, dtype()),
           dv = cpu.poisoned({p.T, c.Hkv, c.D}, dtype());
    attention_varlen_backward(cpu.ctx, dq, dk, dv, 0, 0, 0, dout, out, lse, p.args(p.host_qkv));
    const Gradients got = backward(p, gpu.copy(dout), gpu.copy(out), gpu.copy(lse));
    EXPECT_LT(worst_error(values(gpu.host(got.dq)), doubles(dq), 1.0), bound(2e-5, 2e-2));
    EXPECT_LT(worst_error(values(gpu.host(got.dk)), doubles(dk), 1.0), bound(2e-5, 3e-2));
    EXPECT_LT(worst_error(values(gpu.host(got.dv)), doubles(dv), 1.0), bound(2e-5, 3e-2));
    if (!c.has_sinks) continue;
    Tensor dsinks = cpu.filled({c.Hq}, DType::kF32, 0.5f), got_dsinks = gpu.copy(dsinks);
    attention_sinks_backward(cpu.ctx, dsinks, dout, out, lse, p.host_sinks);
    attention_sinks_backward(gpu.ctx, got_dsinks, gpu.copy(dout), gpu.copy(out), gpu.copy(lse), p.sinks);
    EXPECT_LT(worst_error(values(gpu.host(got_dsinks)), doubles(dsinks), 1.0), 2e-5);
  }
}

TEST_P(CudaAttentionTest, GradientIntoStridedViewsAndTwiceTheSame) {
  const AttentionCase c{"", 6, 2, 64, is_watched() ? std::vector<std::int32_t>{140, 3, 260} : std::vector<std::int32_t>{700, 3, 1290}};
  GpuProblem p(cpu, gpu, c, dtype());
  Tensor out = gpu.poisoned({p.T, c.Hq, c.D}, dtype()), lse = gpu.poisoned({p.T, c.Hq}, DType::kF32);
  varlen(out, lse, p.args(p.qkv));
  const Tensor dout = gpu.copy(cpu.random({p.T, c.Hq, c.D}, dtype(), 9));
  const Gradients g = backward(p, dout, out, lse);
  const Tensor dq = gpu.host(g.dq), dk = gpu.host(g.dk), dv = gpu.host(g.dv);
  for (int round = 0; round < (is_watched() ? 1 : 3); ++round) {
    Tensor fused = gpu.poisoned({p.T, p.width}, dtype());
    const auto part = [&](std::int64_t head, std::int64_t heads) {
      const ConstTensorView v = p.slice(fused, head, heads);
      return TensorView{const_cast<void*>(v.data), v.shape, v.dtype, v.device, v.row_stride};
    };
    cuda::attention_varlen_backward(gpu.ctx, family(), part(0, c.Hq), part(c.Hq, c.Hkv), part(c.Hq + c.Hkv, c.Hkv), p.width, p.width,
                                    p.width, dout, out, lse, p.args(p.qkv));
    const Tensor got = gpu.host(fused);
    for (std::int64_t t = 0; t < p.T; ++t) {
      const char* row = got.slice(t, 1).as<char>();
      const auto same = [&](std::int64_t head, const Tensor& want) {
        const Tensor w = want.slice(t, 1);
        return std::memcmp(row + head * c.D * static_cast<std::int64_t>(size_of(dtype())), w.data(), w.num_bytes()) == 0;
      };
      ASSERT_TRUE(same(0, dq) && same(c.Hq, dk) && same(c.Hq + c.Hkv, dv)) << "token " << t << " round " << round;
    }
  }
}

/// A paged cache with shuffled blocks; unused slots are NaN.
struct GpuCache {
  std::int64_t block_size, blocks_each;
  Tensor k, v;
  std::vector<std::int32_t> table;

  GpuCache(GpuSession& gpu, const GpuProblem& p, std::int64_t size) : block_size(size) {
    const std::int32_t longest = *std::max_element(p.c.lengths.begin(), p.c.lengths.end());
    blocks_each = (longest + block_size - 1) / block_size;
    const auto count = static_cast<std::int64_t>(p.c.lengths.size()) * blocks_each;
    k = gpu.poisoned({count + 1, p.c.Hkv, block_size, p.c.D}, p.qkv.dtype());
    v = gpu.poisoned({count + 1, p.c.Hkv, block_size, p.c.D}, p.qkv.dtype());
    for (std::int64_t i = 0; i < count; ++i) table.push_back(static_cast<std::int32_t>(i + 1));
    Rng rng(5);
    for (std::size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[rng.next_u32() % i]);
    std::vector<std::int32_t> slots;
    for (std::size_t i = 0; i < p.c.lengths.size(); ++i)
      for (std::int32_t t = 0; t < p.c.lengths[i]; ++t)
        slots.push_back(static_cast<std::int32_t>(
            table[i * static_cast<std::size_t>(blocks_each) + static_cast<std::size_t>(t / block_size)] * block_size + t % block_size));
    const VarlenAttention a = p.args(p.qkv);
    cuda::kv_write(gpu.ctx, {k, v}, a.k_TKD, p.width, a.v_TKD, p.width, slots);
  }
};

TEST_P(CudaAttentionTest, PagedEqualsVarlenBitForBit) {
  for (const AttentionCase& c : {AttentionCase{"", 6, 2, 64, {150, 1, 67, 300}}, AttentionCase{"", 2, 2, 80, {129, 30}},
                                 AttentionCase{"", 4, 2, 128, {400, 128, 77}}, AttentionCase{"", 2, 1, 256, {200, 65}},
                                 AttentionCase{"", 4, 2, 128, {400, 128, 77}, 150}, AttentionCase{"", 6, 2, 64, {300, 67}, 33},
                                 AttentionCase{"", 2, 1, 256, {200, 65}, 70}, AttentionCase{"", 8, 2, 64, {300, 67, 129}, 0, true},
                                 AttentionCase{"", 8, 1, 64, {300, 67}, 128, true}, AttentionCase{"", 4, 2, 128, {400, 77}, 0, true}}) {
    if (is_watched() && dtype() == DType::kF32 && c.D > 80) continue;
    GpuProblem p(cpu, gpu, c, dtype());
    Tensor dense = gpu.poisoned({p.T, c.Hq, c.D}, dtype());
    varlen(dense, {}, p.args(p.qkv));
    const Tensor want = gpu.host(dense);
    for (const std::int64_t block_size : {1, 4, 16, 64, 128, 192}) {
      GpuCache cache(gpu, p, block_size);
      for (const std::int32_t step : {1, 7, 64, 1000}) {
        if (step == 1 && block_size != 16) continue;
        if (is_watched() && (step == 1 || step == 64 || block_size == 1 || block_size == 64)) continue;
        if (is_watched() && dtype() == DType::kF32 && (step == 1000 ? block_size < 16 : block_size != 16)) continue;
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
          Tensor q = Tensor::empty(cpu.runtime, {T, c.Hq, c.D}, dtype());
          const std::size_t row_bytes = static_cast<std::size_t>(c.Hq * c.D) * size_of(dtype());
          for (std::int64_t r = 0; r < T; ++r)
            std::memcpy(q.slice(r, 1).data(), p.host_qkv.slice(rows[static_cast<std::size_t>(r)], 1).data(), row_bytes);
          Tensor device_q = gpu.copy(q), device_out = gpu.poisoned({T, c.Hq, c.D}, dtype());
          cuda::attention_paged(gpu.ctx, family(), device_out,
                                {.q_THD = device_q,
                                 .q_token_stride = c.Hq * c.D,
                                 .layer = {cache.k, cache.v},
                                 .query_start = start,
                                 .context_len = context,
                                 .block_table = cache.table,
                                 .max_blocks = static_cast<std::int32_t>(cache.blocks_each),
                                 .scale = p.scale,
                                 .window = c.window,
                                 .sinks_H = p.args(p.qkv).sinks_H});
          const Tensor out = gpu.host(device_out);
          for (std::int64_t r = 0; r < T; ++r)
            ASSERT_TRUE(same_bits(out.slice(r, 1), want.slice(rows[static_cast<std::size_t>(r)], 1)))
                << "D " << c.D << " token " << rows[static_cast<std::size_t>(r)] << " block " << block_size << " step " << step;
        }
      }
    }
  }
}

/// Beyond one chunk of keys: decode split over chunks, planned by host or device, adds in the order of training.
TEST_P(CudaAttentionTest, LongContextsAreSplitWithoutATrace) {
  std::vector<AttentionCase> all = {
      {"", 2, 1, 64, {2 * kAttentionChunk + 70}}, {"", 4, 2, 128, {3 * kAttentionChunk}}, {"", 2, 2, 256, {kAttentionChunk + 1}}};
  for (const std::int64_t window : {1, 60, 71, 1000, 1024, 1100, 2100}) all.push_back({"", 4, 2, 128, {2 * kAttentionChunk + 70}, window});
  all.push_back({"", 2, 2, 256, {kAttentionChunk + 100}, 200});
  all.push_back({"", 8, 1, 64, {2 * kAttentionChunk + 70}, 0, true});
  all.push_back({"", 4, 2, 128, {2 * kAttentionChunk + 70}, 1100, true});
  if (is_watched() && dtype() == DType::kF32) all = {{"", 1, 1, 16, {kAttentionChunk + 70}}, {"", 1, 1, 16, {kAttentionChunk + 70}, 100}};
  for (const AttentionCase& c : all) {
    GpuProblem p(cpu, gpu, c, dtype());
    Tensor dense = gpu.poisoned({p.T, c.Hq, c.D}, dtype()), lse = gpu.poisoned({p.T, c.Hq}, DType::kF32);
    varlen(dense, lse, p.args(p.qkv));
    const Tensor want = gpu.host(dense);
    GpuCache cache(gpu, p, 16);
    PagedAttention paged{.q_THD = {},
                         .q_token_stride = p.width,
                         .layer = {cache.k, cache.v},
                         .query_start = {},
                         .context_len = {},
                         .block_table = cache.table,
                         .max_blocks = static_cast<std::int32_t>(cache.blocks_each),
                         .scale = p.scale,
                         .window = c.window,
                         .sinks_H = p.args(p.qkv).sinks_H};
    for (const std::int32_t count : {1, 5, 40, 300, 1024}) {
      const std::vector<std::int32_t> start = {0, count}, context = {static_cast<std::int32_t>(p.T)};
      Tensor out = gpu.poisoned({count, c.Hq, c.D}, dtype());
      paged.q_THD = {p.qkv.slice(p.T - count, count).data(), {count, c.Hq, c.D}, dtype(), gpu.runtime->device(), c.D};
      paged.query_start = start;
      paged.context_len = context;
      cuda::attention_paged(gpu.ctx, family(), out, paged);
      EXPECT_TRUE(same_bits(gpu.host(out), want.slice(p.T - count, count))) << c.D << " window " << c.window << " " << count;
    }
    // Several rows of one sequence as sequences of their own, some absent, planned on the device.
    const std::vector<std::int32_t> contexts = {static_cast<std::int32_t>(p.T), 0, 1, 63, kAttentionChunk, kAttentionChunk + 1, 0, 129};
    const auto n = static_cast<std::int32_t>(contexts.size());
    std::vector<std::int32_t> tables;
    for (std::int32_t s = 0; s < n; ++s) tables.insert(tables.end(), cache.table.begin(), cache.table.end());
    Tensor q = Tensor::empty(cpu.runtime, {n, c.Hq, c.D}, dtype());
    for (std::int32_t s = 0; s < n; ++s)
      std::memcpy(q.slice(s, 1).data(), p.host_qkv.slice(std::max(contexts[static_cast<std::size_t>(s)], 1) - 1, 1).data(),
                  q.slice(s, 1).num_bytes());
    const Tensor device_q = gpu.copy(q), lens = gpu.ints(contexts), device_tables = gpu.ints(tables);
    Tensor out = gpu.poisoned({n, c.Hq, c.D}, dtype());
    const cuda::DecodeAttention decode{.q_THD = device_q,
                                       .q_token_stride = 0,
                                       .layer = {cache.k, cache.v},
                                       .context_len = lens.as<std::int32_t>(),
                                       .block_table = device_tables.as<std::int32_t>(),
                                       .num_sequences = n,
                                       .max_blocks = static_cast<std::int32_t>(cache.blocks_each),
                                       .scale = p.scale,
                                       .window = c.window,
                                       .sinks = p.device_sinks()};
    Tensor plan = Tensor::empty(gpu.runtime, {static_cast<std::int64_t>(cuda::decode_plan_bytes(n, cache.blocks_each * cache.block_size))},
                                DType::kU8);
    cuda::plan_decode(gpu.ctx, family(), plan.data(), decode);
    cuda::attention_decode(gpu.ctx, family(), out, plan.data(), decode);
    const Tensor got = gpu.host(out);
    for (std::int32_t s = 0; s < n; ++s) {
      const std::int32_t length = contexts[static_cast<std::size_t>(s)];
      if (length > 0)
        EXPECT_TRUE(same_bits(got.slice(s, 1), want.slice(length - 1, 1))) << c.D << " window " << c.window << " sequence " << s;
      else
        EXPECT_TRUE(std::isnan(get(got.slice(s, 1), 0)));
    }
  }
}

TEST_P(CudaAttentionTest, ASequenceDoesNotSeeItsNeighbours) {
  const AttentionCase together{"", 4, 2, 64, {50, 180, 20}}, alone{"", 4, 2, 64, {180}};
  GpuProblem p(cpu, gpu, together, dtype()), q(cpu, gpu, alone, dtype());
  Tensor host = p.host_qkv.clone();
  std::memcpy(q.host_qkv.data(), p.host_qkv.slice(50, 180).data(), q.host_qkv.num_bytes());
  q.qkv = gpu.copy(q.host_qkv);
  for (std::int64_t i = 0; i < 50 * p.width; ++i) Session::set(host, i, std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t i = 230 * p.width; i < 250 * p.width; ++i) Session::set(host, i, std::numeric_limits<float>::infinity());
  p.qkv = gpu.copy(host);
  Tensor all = gpu.poisoned({p.T, 4, 64}, dtype()), lse = gpu.poisoned({p.T, 4}, DType::kF32);
  varlen(all, lse, p.args(p.qkv));
  Tensor one = gpu.poisoned({180, 4, 64}, dtype()), one_lse = gpu.poisoned({180, 4}, DType::kF32);
  varlen(one, one_lse, q.args(q.qkv));
  EXPECT_TRUE(same_bits(gpu.host(one), gpu.host(all).slice(50, 180)));
  EXPECT_TRUE(same_bits(gpu.host(one_lse), gpu.host(lse).slice(50, 180)));
}

TEST_P(CudaAttentionTest, LargeScoresDoNotOverflow) {
  GpuProblem p(cpu, gpu, {"", 1, 1, 16, {100}}, dtype());
  p.scale = 300.0f;
  Tensor want = cpu.poisoned({p.T, 1, 16}, dtype()), want_lse = cpu.poisoned({p.T, 1}, DType::kF32);
  attention_varlen(cpu.ctx, want, want_lse, p.args(p.host_qkv));
  Tensor out = gpu.poisoned({p.T, 1, 16}, dtype()), lse = gpu.poisoned({p.T, 1}, DType::kF32);
  varlen(out, lse, p.args(p.qkv));
  EXPECT_LT(worst_error(values(gpu.host(out)), doubles(want), 1.0), bound(5e-3, 2e-2));  // scores of thousands carry their own rounding
}

INSTANTIATE_TEST_SUITE_P(Gpu, CudaAttentionTest,
                         ::testing::Values(FamilyAndType{AttentionFamily::kHopper, DType::kBF16},
                                           FamilyAndType{AttentionFamily::kPlain, DType::kBF16},
                                           FamilyAndType{AttentionFamily::kPlain, DType::kF32}),
                         ::testing::PrintToStringParamName());

/// Projections, norms, rotation, the cache and attention of a decoding step in one pass, and as ops one after another.
TEST(CudaAttention, FusedDecodeIsTheOpsOneAfterAnother) {
  GpuSession gpu;
  CpuSession cpu;
  if (cuda::chosen_attention_family(gpu.ctx) != AttentionFamily::kHopper) GTEST_SKIP() << "not compute capability 9.0";
  struct FusedCase {
    std::int64_t Hq, Hkv, D, block_size;
    bool has_norm;
    std::int64_t num_pairs = D / 2;  ///< that turn
    std::int64_t window = 0;
    bool has_sinks = false;
  };
  for (const FusedCase& c :
       {FusedCase{4, 2, 128, 16, true}, FusedCase{48, 24, 128, 16, true}, FusedCase{8, 8, 128, 64, false}, FusedCase{14, 2, 64, 16, true},
        FusedCase{24, 24, 64, 8, false}, FusedCase{24, 2, 128, 128, true}, FusedCase{6, 2, 64, 192, true}, FusedCase{32, 1, 128, 32, true},
        FusedCase{96, 8, 128, 16, false, 32}, FusedCase{12, 4, 128, 16, true, 32}, FusedCase{8, 2, 64, 16, true, 8},
        FusedCase{90, 10, 128, 32, true}, FusedCase{90, 10, 64, 32, false}, FusedCase{16, 8, 64, 32, true}, FusedCase{20, 2, 64, 16, false},
        // More units than two for each block, so that blocks take further ones as they get done.
        FusedCase{64, 64, 64, 16, true}, FusedCase{4, 2, 128, 16, true, 64, 100}, FusedCase{64, 8, 64, 32, false, 32, 128},
        FusedCase{8, 8, 128, 64, false, 64, 1100}, FusedCase{24, 2, 128, 16, true, 64, 1}, FusedCase{64, 8, 64, 32, false, 32, 128, true},
        FusedCase{64, 8, 64, 32, false, 32, 0, true}, FusedCase{90, 10, 128, 32, false, 64, 0, true},
        FusedCase{20, 1, 128, 16, true, 64, 0, true}}) {
    SCOPED_TRACE(fmt::format("{} {} {} blocks of {}, {} pairs, window {}", c.Hq, c.Hkv, c.D, c.block_size, c.num_pairs, c.window));
    const std::vector<std::int32_t> lengths = {129, 1, 0, 16, 17, 127, 128, 300, 255, 256, 1024, 1025, 2500};
    const auto n = static_cast<std::int64_t>(lengths.size()), blocks_each = (2500 + c.block_size - 1) / c.block_size;
    const std::int64_t width = (c.Hq + 2 * c.Hkv) * c.D;
    std::vector<std::int32_t> table, slots, positions;
    for (std::int32_t i = 0; i < n * blocks_each; ++i) table.push_back(i);
    Rng rng(5);
    for (std::size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[rng.next_u32() % i]);
    for (std::int64_t s = 0; s < n; ++s) {
      const std::int32_t last = lengths[static_cast<std::size_t>(s)] - 1;
      const auto block = last < 0 ? 0 : table[static_cast<std::size_t>(s * blocks_each + last / c.block_size)];
      slots.push_back(last < 0 || s == 4 ? -1 : static_cast<std::int32_t>(block * c.block_size + last % c.block_size));
      positions.push_back(std::max(last, 0));
    }
    // What lies in a block behind the sequence, and where the new token goes, is NaN.
    Tensor host_k = cpu.poisoned({n * blocks_each, c.Hkv, c.block_size, c.D}, DType::kBF16), host_v = host_k.clone();
    for (std::int64_t s = 0; s < n; ++s)
      for (std::int32_t t = 0; t + 1 < lengths[static_cast<std::size_t>(s)]; ++t)
        for (std::int64_t h = 0; h < c.Hkv; ++h) {
          const std::int64_t block = table[static_cast<std::size_t>(s * blocks_each + t / c.block_size)];
          const std::int64_t row = ((block * c.Hkv + h) * c.block_size + t % c.block_size) * c.D;
          for (std::int64_t d = 0; d < c.D; ++d) {
            const std::uint32_t bits = rng.next_u32();
            Session::set(host_k, row + d, static_cast<float>(bits % 2001) / 500.0f - 2.0f);
            Session::set(host_v, row + d, static_cast<float>(bits / 2001 % 2001) / 500.0f - 2.0f);
          }
        }
    const Tensor qkv = gpu.copy(cpu.random({n, width}, DType::kBF16, 1)), q_norm = gpu.copy(cpu.random({c.D}, DType::kF32, 2)),
                 k_norm = gpu.copy(cpu.random({c.D}, DType::kF32, 3));
    const RopeTable rope{gpu.copy(cpu.random({2560, c.num_pairs}, DType::kF32, 4)),
                         gpu.copy(cpu.random({2560, c.num_pairs}, DType::kF32, 5))};
    const Tensor device_slots = gpu.ints(slots), device_lengths = gpu.ints(lengths), device_positions = gpu.ints(positions);
    const Tensor device_table = gpu.ints(table);
    const DecodeIndex index{device_slots, device_lengths, device_table.view().reshaped({n, blocks_each})};
    HeadInputs in;
    in.qkv_TE = qkv;
    in.num_heads = c.Hq;
    in.num_kv_heads = c.Hkv;
    in.head_dim = c.D;
    in.positions_T = device_positions;
    in.rope = &rope;
    if (c.has_norm) {
      in.q_norm_D = q_norm;
      in.k_norm_D = k_norm;
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.D));
    const Tensor sinks = gpu.copy(cpu.random({c.Hq}, DType::kF32, 6));
    const ConstTensorView sinks_H = c.has_sinks ? ConstTensorView(sinks) : ConstTensorView{};
    Tensor k[2], v[2], out[2];
    for (int fused = 0; fused < 2; ++fused) {
      k[fused] = gpu.copy(host_k);
      v[fused] = gpu.copy(host_v);
      out[fused] = gpu.poisoned({n, c.Hq, c.D}, DType::kBF16);
      const KvLayer layer{k[fused], v[fused]};
      const Tensor q = gpu.poisoned({n, c.Hq * c.D}, DType::kBF16);
      const Tensor plan =
          Tensor::empty(gpu.runtime, {static_cast<std::int64_t>(decode_plan_bytes(gpu.ctx, index, c.block_size))}, DType::kU8);
      plan_decode(gpu.ctx, plan, q.view().reshaped({n, c.Hq, c.D}), layer, index, c.window);
      if (fused == 1) {
        ASSERT_TRUE(attention_decode_fused(gpu.ctx, out[1], in, layer, index, plan, scale, c.window, sinks_H));
      } else {
        norm_rope_to_cache(gpu.ctx, q, layer, device_slots, in);
        attention_decode(gpu.ctx, out[0], q.view().reshaped({n, c.Hq, c.D}), layer, index, plan, scale, c.window, sinks_H);
      }
    }
    EXPECT_TRUE(same_bits(gpu.host(k[0]), gpu.host(k[1]))) << "keys";
    EXPECT_TRUE(same_bits(gpu.host(v[0]), gpu.host(v[1]))) << "values";
    const Tensor want = gpu.host(out[0]), got = gpu.host(out[1]);
    // Without a slot the new token is in no cache, which the ops one after another read; in one pass it is seen all the same.
    for (std::int64_t s = 0; s < n; ++s) {
      if (s == 4) continue;
      EXPECT_TRUE(same_bits(got.slice(s, 1), want.slice(s, 1))) << "sequence " << s << " of " << lengths[static_cast<std::size_t>(s)];
    }
  }
}

TEST(CudaKvWrite, SkippedSlotsAreLeftAlone) {
  GpuSession gpu;
  CpuSession cpu;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor k = gpu.copy(cpu.filled({2, 1, 2, 16}, dtype, 3.0f)), v = gpu.copy(cpu.filled({2, 1, 2, 16}, dtype, 4.0f));
    const Tensor new_k = gpu.copy(cpu.filled({2, 1, 16}, dtype, 1.0f)), new_v = gpu.copy(cpu.filled({2, 1, 16}, dtype, 2.0f));
    kv_write(gpu.ctx, {k, v}, new_k, 0, new_v, 0, std::vector<std::int32_t>{-1, 3});
    const auto count = [&](const Tensor& t, float value) { return std::ranges::count(values(gpu.host(t)), value); };
    EXPECT_EQ(count(k, 1.0f), 16);
    EXPECT_EQ(count(k, 3.0f), 48);
    EXPECT_EQ(count(v, 2.0f), 16);
    EXPECT_EQ(count(v, 4.0f), 48);
    EXPECT_THROW(kv_write(gpu.ctx, {k, v}, new_k, 0, new_v, 0, std::vector<std::int32_t>{0, 4}), Error);
  }
}

TEST(CudaAttention, UnalignedRowsAreRefusedInWords) {
  GpuSession gpu;
  const Tensor t = gpu.poisoned({64, 16}, DType::kBF16), out = gpu.poisoned({4, 1, 16}, DType::kBF16);
  const std::vector<std::int32_t> cu = {0, 4};
  VarlenAttention a{.q_THD = {t.data(), {4, 1, 16}, DType::kBF16, gpu.runtime->device(), 16}, .k_TKD = {}, .v_TKD = {}, .cu_seqlens = cu};
  a.k_TKD = a.v_TKD = a.q_THD;
  a.k_TKD.data = t.as<char>() + 2;
  try {
    attention_varlen(gpu.ctx, out, {}, a);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kShape);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("rows of k"));
  }
}

}  // namespace
}  // namespace prl::ops
