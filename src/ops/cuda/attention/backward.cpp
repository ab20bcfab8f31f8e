#include "ops/cuda/attention/call.hpp"
#include "ops/cuda/attention/stats.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

/// A backward call: the forward one and what comes in and goes out besides.
struct BackwardCall {
  ForwardCall forward;
  const void* dout;
  const float* lse;
  void *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
};

/// The table of row statistics: where each sequence starts in it.
struct StatsLayout {
  std::vector<StatsBlock> blocks;
  std::vector<std::int32_t> first;  ///< per sequence, in the order of sequences_of()
};
StatsLayout stats_layout(std::span<const AttentionSequence> sequences) {
  StatsLayout out;
  for (const AttentionSequence& s : sequences) {
    out.first.push_back(static_cast<std::int32_t>(out.blocks.size()) * kStatsRows);
    for (std::int32_t at = 0; at < s.num_tokens; at += kStatsRows)
      out.blocks.push_back({s.token + at, std::min<std::int32_t>(kStatsRows, s.num_tokens - at)});
  }
  return out;
}
template <typename T>
float2* compute_stats(const OpContext& ctx, const BackwardCall& call, const StatsLayout& layout) {
  const auto rows = static_cast<std::int64_t>(layout.blocks.size()) * kStatsRows;
  auto* stats = static_cast<float2*>(ctx.workspace->require(static_cast<std::size_t>(rows * call.forward.num_q_heads) * sizeof(float2)));
  StatsParams p{};
  p.blocks = staged(ctx, std::span<const StatsBlock>(layout.blocks));
  p.num_blocks = static_cast<std::int32_t>(layout.blocks.size());
  p.num_heads = static_cast<std::int32_t>(call.forward.num_q_heads);
  p.head_dim = static_cast<std::int32_t>(call.forward.head_dim);
  p.out = call.forward.out;
  p.dout = call.dout;
  p.lse = call.lse;
  p.stats = stats;
  launch_stats<T>(p, stream_of(ctx));
  return stats;
}

/// Units of `step` positions of each sequence, those with most work first: `work(unit)` says how much.
template <typename Unit, typename Make, typename Work>
std::vector<Unit> cut(std::span<const AttentionSequence> sequences, const StatsLayout& layout, int step, const Make& make,
                      const Work& work) {
  std::vector<Unit> units;
  for (std::size_t i = 0; i < sequences.size(); ++i)
    for (std::int32_t first = 0; first < sequences[i].num_tokens; first += step)
      units.push_back(make(sequences[i], layout.first[i], first));
  std::ranges::stable_sort(units, std::greater<>(), work);
  return units;
}

template <typename T>
void backward_plain(const OpContext& ctx, const BackwardCall& call, std::span<const AttentionSequence> sequences) {
  const ForwardCall& f = call.forward;
  const StatsLayout layout = stats_layout(sequences);
  PlainBackward<T> p{};
  p.stats = compute_stats<T>(ctx, call, layout);
  p.stats_rows = static_cast<std::int64_t>(layout.blocks.size()) * kStatsRows;
  p.q = static_cast<const T*>(f.q);
  p.k = static_cast<const T*>(f.k);
  p.v = static_cast<const T*>(f.v);
  p.dout = static_cast<const T*>(call.dout);
  p.q_stride = f.q_stride;
  p.k_stride = f.k_stride;
  p.v_stride = f.v_stride;
  p.dout_stride = f.num_q_heads * f.head_dim;
  const auto units = cut<PlainBackwardUnit>(
      sequences, layout, kPlainOwned<T>,
      [](const AttentionSequence& s, std::int32_t stats, std::int32_t first) {
        return PlainBackwardUnit{s.token, stats, first, s.num_tokens};
      },
      [](const PlainBackwardUnit& u) { return u.length - u.first; });
  p.units = staged(ctx, std::span<const PlainBackwardUnit>(units));
  p.num_units = static_cast<std::int32_t>(units.size());
  p.num_q_heads = static_cast<std::int32_t>(f.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(f.num_kv_heads);
  p.head_dim = static_cast<std::int32_t>(f.head_dim);
  p.scale = f.scale;
  p.dq = static_cast<T*>(call.dq);
  p.dk = static_cast<T*>(call.dk);
  p.dv = static_cast<T*>(call.dv);
  p.dq_stride = call.dq_stride;
  p.dk_stride = call.dk_stride;
  p.dv_stride = call.dv_stride;
  launch_plain_backward(p, stream_of(ctx));
}

void backward_hopper(const OpContext& ctx, const BackwardCall& call, std::span<const AttentionSequence> sequences) {
  const ForwardCall& f = call.forward;
  const RowPacking packing = RowPacking::of(f.num_q_heads, f.num_kv_heads);
  const StatsLayout layout = stats_layout(sequences);
  const std::int64_t D = f.head_dim, heads = f.num_q_heads;
  const auto query_map = [&](const void* data, std::int64_t stride, int box_heads, int box_tokens) {
    return tensor_map(data, {{static_cast<std::uint64_t>(D), static_cast<std::uint64_t>(heads), static_cast<std::uint64_t>(f.num_tokens)},
                             {D, stride},
                             {64, static_cast<std::uint32_t>(box_heads), static_cast<std::uint32_t>(box_tokens)}});
  };
  const auto key_map = [&](const void* data, std::int64_t stride) {
    return tensor_map(
        data, {{static_cast<std::uint64_t>(D), static_cast<std::uint64_t>(f.num_tokens), static_cast<std::uint64_t>(f.num_kv_heads)},
               {stride, D},
               {64, hopper::kKeyRows, 1}});
  };
  hopper::BackwardParams p{};
  p.q = query_map(f.q, f.q_stride, 1, 64);
  p.dout = query_map(call.dout, heads * D, 1, 64);
  p.q_packed = query_map(f.q, f.q_stride, packing.heads, packing.tokens);
  p.dout_packed = query_map(call.dout, heads * D, packing.heads, packing.tokens);
  p.k = key_map(f.k, f.k_stride);
  p.v = key_map(f.v, f.v_stride);
  const auto key_units = cut<hopper::KeyUnit>(
      sequences, layout, hopper::kKeyRows,
      [](const AttentionSequence& s, std::int32_t stats, std::int32_t first) {
        return hopper::KeyUnit{s.token, stats, first, s.num_tokens};
      },
      [](const hopper::KeyUnit& u) { return u.length - u.first; });
  const int step = 2 * packing.tokens;
  const auto query_units = cut<hopper::QueryUnit>(
      sequences, layout, step,
      [&](const AttentionSequence& s, std::int32_t stats, std::int32_t first) {
        return hopper::QueryUnit{s.token, stats, first, std::min(step, s.num_tokens - first)};
      },
      [](const hopper::QueryUnit& u) { return u.first; });
  p.key_units = staged(ctx, std::span<const hopper::KeyUnit>(key_units));
  p.query_units = staged(ctx, std::span<const hopper::QueryUnit>(query_units));
  p.num_key_units = static_cast<std::int32_t>(key_units.size());
  p.num_query_units = static_cast<std::int32_t>(query_units.size());
  p.packing = packing;
  p.num_kv_heads = static_cast<std::int32_t>(f.num_kv_heads);
  p.head_dim = static_cast<std::int32_t>(D);
  p.scale = f.scale;
  p.scale_log2 = f.scale * kLog2Of_e;
  p.stats = compute_stats<__nv_bfloat16>(ctx, call, layout);
  p.stats_rows = static_cast<std::int64_t>(layout.blocks.size()) * kStatsRows;
  p.dq = static_cast<__nv_bfloat16*>(call.dq);
  p.dk = static_cast<__nv_bfloat16*>(call.dk);
  p.dv = static_cast<__nv_bfloat16*>(call.dv);
  p.dq_stride = call.dq_stride;
  p.dk_stride = call.dk_stride;
  p.dv_stride = call.dv_stride;
  if (hopper::padded_head_dim(static_cast<int>(D)) == 64)
    hopper::launch_backward<64>(p, num_multiprocessors(ctx), stream_of(ctx));
  else
    hopper::launch_backward<128>(p, num_multiprocessors(ctx), stream_of(ctx));
}

}  // namespace

void attention_varlen_backward(OpContext& ctx, AttentionFamily family, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD,
                               std::int64_t dq_token_stride, std::int64_t dk_token_stride, std::int64_t dv_token_stride,
                               ConstTensorView dout_THD, ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args) {
  const DType dtype = args.q_THD.dtype;
  check_rows("dout", dout_THD.data, 0, dtype);
  check_rows("dq", dq_THD.data, dq_token_stride, dtype);
  check_rows("dk", dk_TKD.data, dk_token_stride, dtype);
  check_rows("dv", dv_TKD.data, dv_token_stride, dtype);
  const TensorView out{const_cast<void*>(out_THD.data), out_THD.shape, out_THD.dtype, out_THD.device, out_THD.row_stride};
  const BackwardCall call{call_of(out, {}, args), dout_THD.data,   lse_TH.as<float>(), dq_THD.data, dk_TKD.data, dv_TKD.data,
                          dq_token_stride,        dk_token_stride, dv_token_stride};
  const std::vector<AttentionSequence> sequences = sequences_of(args);
  if (sequences.empty()) return;
  if (dtype == DType::kF32)
    backward_plain<float>(ctx, call, sequences);
  else if (family == AttentionFamily::kPlain || args.q_THD.shape[2] > 128)
    backward_plain<__nv_bfloat16>(ctx, call, sequences);
  else
    backward_hopper(ctx, call, sequences);
}
void attention_varlen_backward(OpContext& ctx, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD, std::int64_t dq_token_stride,
                               std::int64_t dk_token_stride, std::int64_t dv_token_stride, ConstTensorView dout_THD,
                               ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args) {
  attention_varlen_backward(ctx, chosen_attention_family(ctx), dq_THD, dk_TKD, dv_TKD, dq_token_stride, dk_token_stride, dv_token_stride,
                            dout_THD, out_THD, lse_TH, args);
}

}  // namespace prl::ops::cuda
