#include <atomic>
#include <cstdlib>
#include <new>

#include "ops/attention.hpp"
#include "ops/lm_head.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"
#include "ops/test_support.hpp"

namespace {
std::atomic<long> num_allocations{0};
}  // namespace

// Every allocation of the test binary is counted. (GCC 12 does not see that both sides are replaced.)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t size) {
  ++num_allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace prl::ops {
namespace {

using namespace testing;

class AllocationTest : public OpTest {};

/// Once warm, ops allocate neither on the host nor on the device, and the workspace stays as it is.
TEST_P(AllocationTest, WarmOpsAllocateNothing) {
  Session s(kind(), 2);
  const DType t = dtype();
  constexpr std::int64_t T = 130, H = 64, V = 1200, F = 96;
  Tensor x = s.random({T, H}, t, 1), y = s.random({T, H}, t, 2), w = s.random({H}, DType::kF32, 3), gu = s.random({T, 2 * F}, t, 4),
         act = s.random({T, F}, t, 5), dgu = s.random({T, 2 * F}, t, 6);
  Tensor weight = s.random({H, H}, DType::kF32, 7), dw = s.random({H, H}, DType::kF32, 8), m = dw.clone(),
         v = s.filled({H, H}, DType::kF32, 1.0f), dnorm = w.clone();
  const auto packed = pack_linear(s.ctx, weight, w, t, true), head = pack_linear(s.ctx, s.random({V, H}, DType::kF32, 9), {}, t, true);
  Tensor dhead = s.random({V, H}, DType::kF32, 10), logits = s.random({4, V}, DType::kF32, 11), table = s.random({V, H}, t, 12);
  Tensor q = s.random({T, 4, 16}, t, 13), k = s.random({T, 2, 16}, t, 14), out = q.clone(), dq = q.clone(), dk = k.clone(), dv = k.clone(),
         lse = s.random({T, 4}, DType::kF32, 15);
  Tensor cache_k = s.random({9, 2, 16, 16}, t, 16), cache_v = cache_k.clone(), logp = s.random({T}, DType::kF32, 17),
         entropy = logp.clone(), head_lse = logp.clone();
  std::vector<std::int32_t> id_values(T), slots(T), targets(T), blocks = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  for (std::int32_t i = 0; i < T; ++i)
    id_values[static_cast<std::size_t>(i)] = slots[static_cast<std::size_t>(i)] = targets[static_cast<std::size_t>(i)] = i;
  Tensor ids = s.ints(id_values);
  const RopeTable rotary{s.random({T, 8}, DType::kF32, 18), s.random({T, 8}, DType::kF32, 19)};
  const std::vector<std::int32_t> cu = {0, 60, T}, start = {0, 1}, context = {T};
  const std::vector<float> temperatures(T, 0.9f);
  std::vector<SampleRow> rows(4);
  rows[1] = {.top_p = 0.5f, .num_top_logprobs = 5};
  rows[2] = {.temperature = 0.0f};
  std::vector<SampleResult> results(4);
  PendingSamples pending;
  const Tensor drawn = s.ints({0, 0, 0, 0});

  const auto everything = [&] {
    linear(s.ctx, y, x, *packed);
    linear_backward_input(s.ctx, y, x, *packed, true);
    linear_backward_weight(s.ctx, dw, w, y, x);
    matmul_f32(s.ctx, m, dw, weight, true);
    attention_varlen(s.ctx, out, lse, {.q_THD = q, .k_TKD = k, .v_TKD = k, .cu_seqlens = cu, .scale = 0.25f});
    attention_varlen_backward(s.ctx, dq, dk, dv, 0, 0, 0, out, out, lse,
                              {.q_THD = q, .k_TKD = k, .v_TKD = k, .cu_seqlens = cu, .scale = 0.25f});
    kv_write(s.ctx, {cache_k, cache_v}, k, 0, k, 0, slots);
    attention_paged(s.ctx, out.slice(0, 1),
                    {.q_THD = q.slice(0, 1),
                     .layer = {cache_k, cache_v},
                     .query_start = start,
                     .context_len = context,
                     .block_table = blocks,
                     .max_blocks = 9});
    lm_head_logprob(s.ctx, logp, entropy, head_lse, x, *head, targets, temperatures);
    lm_head_logprob_backward(s.ctx, y, dhead, logp, head_lse, x, *head, targets, temperatures);
    begin_sample(s.ctx, pending, drawn, logits, rows);
    finish_sample(s.ctx, results, pending);
    embedding(s.ctx, y, table, ids);
    embedding_backward(s.ctx, dhead, y, ids);
    rms_norm(s.ctx, y, x, w, 1e-6f);
    rms_norm_backward(s.ctx, y, dnorm, x, x, w, 1e-6f, false);
    swiglu(s.ctx, act, gu);
    swiglu_backward(s.ctx, dgu, act, gu);
    rope(s.ctx, q, 0, ids, rotary, false);
    cast(s.ctx, weight, dw);
    (void)sum_squares(s.ctx, dw);
    scale(s.ctx, dw, 0.5f);
    adamw(s.ctx, weight, m, v, dw, {});
    muon(s.ctx, weight, m, dw, {});
  };
  everything();
  const std::size_t workspace = s.ctx.workspace->capacity(), in_use = s.runtime->bytes_in_use();
  const long before = num_allocations.load();
  everything();
  EXPECT_EQ(num_allocations.load(), before);
  EXPECT_EQ(s.ctx.workspace->capacity(), workspace);
  EXPECT_EQ(s.runtime->bytes_in_use(), in_use);
}

PRL_OP_TEST_KINDS(AllocationTest);

}  // namespace
}  // namespace prl::ops
