#pragma once

#include <span>
#include <utility>
#include <vector>

#include "device/host_link.hpp"
#include "ops/context.hpp"
#include "ops/linear.hpp"

namespace prl::ops {

/// Vocabulary entries per chunk of every log-sum-exp: the maximum and sum of a chunk are formed first, then chunks are merged. The order is
/// a device's own (on the CPU that of the index, on the GPU ops/cuda/log_softmax.cuh) and shared by training and sampling, so their
/// log-probabilities agree bit for bit.
inline constexpr int kVocabChunk = 1024;
/// The vocabulary in columns of whole chunks.
constexpr std::int64_t whole_chunks(std::int64_t vocab_size) { return (vocab_size + kVocabChunk - 1) / kVocabChunk * kVocabChunk; }
/// Of which a chunk is made, where a device's order has such a step.
inline constexpr int kVocabPiece = 64;

/// log p(target | h) and entropy under softmax(h W^T / temperature), without storing [T, V] except for the rows of `kept_RB`.
///
/// Shapes    h_TH [T, H] in w.dtype(); targets_T int32 host, in [0, V), or -1 to skip (logp and entropy 0);
///           temperatures_T fp32 host, > 0; logp_T, entropy_T, lse_T fp32 (lse of the scaled logits, kept for backward).
/// Numerics  logits in fp32; scaled = logit / temperature (exactly logit when 1); logp = scaled[target] - lse.
///           Batch-invariant.
/// Memory    kept_RB: bytes, contiguous, 16-byte aligned, kept_row_bytes() per row, any R (none by default): softmax statistics or logits
///           saved for backward, of the first R rows that have a target. The layout is private to the op. Only if keeps_logits(ctx).
void lm_head_logprob(OpContext& ctx, TensorView logp_T, TensorView entropy_T, TensorView lse_T, ConstTensorView h_TH, const LinearWeight& w,
                     std::span<const std::int32_t> targets_T, std::span<const float> temperatures_T, TensorView kept_RB = {});
/// Gradient of sum_t dlogp_T[t] * logp[t]: dh_TH overwritten (w.dtype()), dw_VH fp32 +=, or = unless `accumulate`; dw_VH.data == nullptr
/// leaves the weight's out. No gradient through entropy. Recomputes the logits in chunks except for rows saved in `kept_RB`, which changes
/// no bit. Numerics: in bf16 the GPU makes it of softmax weights in bf16 and rows of h scaled in bf16 (cuda/kept_softmax.cuh); no gradient
/// of a logit is ever rounded, nor is what a row's target adds.
void lm_head_logprob_backward(OpContext& ctx, TensorView dh_TH, TensorView dw_VH, ConstTensorView dlogp_T, ConstTensorView lse_T,
                              ConstTensorView h_TH, const LinearWeight& w, std::span<const std::int32_t> targets_T,
                              std::span<const float> temperatures_T, bool accumulate = true, ConstTensorView kept_RB = {});
/// Whether the device can save logits for backward.
bool keeps_logits(const OpContext& ctx) noexcept;
/// Bytes per saved row for a head in `dtype`: 2 per vocabulary entry in bf16, 4 in fp32, rounded up to whole chunks.
std::int64_t kept_row_bytes(DType dtype, std::int64_t vocab_size) noexcept;

/// One row of sampling settings, already resolved by the engine.
struct SampleRow {
  float temperature = 1.0f;  ///< 0 means greedy
  float top_p = 1.0f;
  float min_p = 0.0f;
  std::int32_t top_k = -1;            ///< <= 0: all
  std::uint64_t seed = 0;             ///< Philox key of the request
  std::uint64_t position = 0;         ///< Philox counter: index of the token in the request, so batching changes nothing
  std::int32_t num_top_logprobs = 0;  ///< <= SampleOutput::top capacity
  std::span<const std::int32_t> named_ids =
      {};  ///< tokens whose log-probabilities are wanted too, in [0, V); read before begin_sample returns
};
struct SampleResult {
  std::int32_t token = 0;
  float logprob = 0;                                         ///< of `token` under the distribution sampled from
  std::vector<std::pair<std::int32_t, float>> top_logprobs;  ///< best first, under the same distribution
  std::vector<float> named_logprobs;                         ///< of SampleRow::named_ids; -infinity: it could not be drawn
};
/// Tokens that are being drawn. The fields are private to the bodies; reused from draw to draw, so that nothing is allocated after warm-up.
struct PendingSamples {
  std::vector<SampleResult> results_B;  ///< synchronous devices
  Tensor memory;                        ///< asynchronous ones: results on the device,
  std::shared_ptr<HostLink> link;       ///< the copy to the host, which overlaps with other work,
  std::shared_ptr<void> host;           ///< its destination,
  HostLink::Ticket copied = 0;          ///< and its number
  std::int64_t num_rows = 0, max_top = 0, max_named = 0;
};
/// Draws one token per row of logits_BV (fp32, device memory; adjusted by penalties and bias before if needed).
/// With top_p = 1, top_k <= 0, min_p = 0 the logprob equals lm_head_logprob's for the same h, w, temperature bit for bit;
/// greedy rows report the temperature-1 distribution. Truncated rows renormalise over what is kept. A row without a finite log-sum-exp
/// (all tokens are banned, or the model gave NaN or infinity) gets token 0 with a logprob of NaN, and does not disturb the others.
void sample(OpContext& ctx, std::span<SampleResult> out_B, ConstTensorView logits_BV, std::span<const SampleRow> rows_B);
/// The same in two halves. The first returns when the draw and the copy of its results are enqueued; tokens are also written to drawn_B
/// [at least B] int32, if given, for work that is enqueued later. Nothing may be pending already.
void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B);
/// linear(logits_BV, h_BH, lm_head) and begin_sample, without logits in memory: the same tokens and log-probabilities, bit for bit. False,
/// and nothing is done, where the device has no such pass, or a row is truncated or asks for other tokens' log-probabilities.
bool begin_sample_head(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView h_BH, const LinearWeight& lm_head,
                       std::span<const SampleRow> rows_B);
/// Waits for the results.
void finish_sample(OpContext& ctx, std::span<SampleResult> out_B, PendingSamples& pending);

}  // namespace prl::ops
