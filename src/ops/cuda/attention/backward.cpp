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
std::int64_t stats_rows(const StatsLayout& layout) { return static_cast<std::int64_t>(layout.blocks.size()) * kStatsRows; }
template <typename T>
void compute_stats(const OpContext& ctx, const BackwardCall& call, const StatsLayout& layout, float2* stats) {
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
}

/// Units of `step` positions of each sequence, those with most work first: `work(unit)` says how much.
template <typename Unit, typename Make, typename Work>
std::vector<Unit> cut(std::span<const AttentionSequence> sequences, int step, const Make& make, const Work& work) {
  std::vector<Unit> units;
  for (std::size_t i = 0; i < sequences.size(); ++i)
    for (std::int32_t first = 0; first < sequences[i].num_tokens; first += step) units.push_back(make(i, first));
  std::ranges::stable_sort(units, std::greater<>(), work);
  return units;
}

template <typename T>
void backward_plain(const OpContext& ctx, const BackwardCall& call, std::span<const AttentionSequence> sequences) {
  const ForwardCall& f = call.forward;
  const StatsLayout layout = stats_layout(sequences);
  PlainBackward<T> p{};
  Carver carver(ctx.workspace->require(static_cast<std::size_t>(stats_rows(layout) * f.num_q_heads) * sizeof(float2)));
  float2* stats = carver.take<float2>(stats_rows(layout) * f.num_q_heads);
  compute_stats<T>(ctx, call, layout, stats);
  p.stats = stats;
  p.stats_rows = stats_rows(layout);
  p.q = static_cast<const T*>(f.q);
  p.k = static_cast<const T*>(f.k);
  p.v = static_cast<const T*>(f.v);
  p.dout = static_cast<const T*>(call.dout);
  p.q_stride = f.q_stride;
  p.k_stride = f.k_stride;
  p.v_stride = f.v_stride;
  p.dout_stride = f.num_q_heads * f.head_dim;
  const auto units = cut<PlainBackwardUnit>(
      sequences, kPlainOwned<T>,
      [&](std::size_t i, std::int32_t first) {
        return PlainBackwardUnit{sequences[i].token, layout.first[i], first, sequences[i].num_tokens};
      },
      [&](const PlainBackwardUnit& u) { return std::min(u.length - u.first, kPlainOwned<T> + f.window); });
  p.units = staged(ctx, std::span<const PlainBackwardUnit>(units));
  p.num_units = static_cast<std::int32_t>(units.size());
  p.num_q_heads = static_cast<std::int32_t>(f.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(f.num_kv_heads);
  p.head_dim = static_cast<std::int32_t>(f.head_dim);
  p.window = f.window;
  p.scale = f.scale;
  p.dq = static_cast<T*>(call.dq);
  p.dk = static_cast<T*>(call.dk);
  p.dv = static_cast<T*>(call.dv);
  p.dq_stride = call.dq_stride;
  p.dk_stride = call.dk_stride;
  p.dv_stride = call.dv_stride;
  launch_plain_backward(p, stream_of(ctx));
}

/// Whether score gradients are kept between the passes: for `heads` kv heads at a time, none if there is no room for enough of them
/// to occupy the device. The room is a sixtieth of the device's memory, at most what four kv heads of two query heads take at 16,384
/// tokens.
struct Kept {
  std::vector<std::int32_t> first;  ///< tile of each sequence
  std::int64_t tiles = 0;           ///< of one query head
  std::int32_t heads = 0;
};
Kept room_to_keep(const OpContext& ctx, const ForwardCall& f, std::span<const AttentionSequence> sequences) {
  const std::int64_t room = std::min(std::int64_t{9} << 28, static_cast<std::int64_t>(properties_of(ctx).totalGlobalMem / 60));
  const int num_multiprocessors = cuda::num_multiprocessors(ctx);
  Kept k;
  std::int64_t key_units = 0;
  for (const AttentionSequence& s : sequences) {
    k.first.push_back(static_cast<std::int32_t>(k.tiles));
    k.tiles += hopper::score_tiles_before(ceil_div(s.num_tokens, 64));
    key_units += ceil_div(s.num_tokens, hopper::kKeyRows);
  }
  const std::int64_t fit = std::min(f.num_kv_heads, room / (k.tiles * hopper::kScoreTileBytes * (f.num_q_heads / f.num_kv_heads)));
  if (fit == 0) return k;
  const std::int64_t rounds = ceil_div(f.num_kv_heads, fit), heads = ceil_div(f.num_kv_heads, rounds);
  if (rounds == 1 || heads * key_units >= 2 * num_multiprocessors) k.heads = static_cast<std::int32_t>(heads);
  return k;
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
  const Kept kept = room_to_keep(ctx, f, sequences);
  const auto key_units = cut<hopper::KeyUnit>(
      sequences, hopper::kKeyRows,
      [&](std::size_t i, std::int32_t first) {
        return hopper::KeyUnit{sequences[i].token, layout.first[i], first, sequences[i].num_tokens, kept.first[i]};
      },
      [&](const hopper::KeyUnit& u) { return std::min(u.length - u.first, hopper::kKeyRows + f.window); });
  const int step = kept.heads > 0 ? hopper::kKeyRows : 2 * packing.tokens;
  const auto query_units = cut<hopper::QueryUnit>(
      sequences, step,
      [&](std::size_t i, std::int32_t first) {
        return hopper::QueryUnit{sequences[i].token, layout.first[i], first, std::min(step, sequences[i].num_tokens - first),
                                 kept.first[i]};
      },
      [&](const hopper::QueryUnit& u) { return std::min(u.first, f.window); });
  p.key_units = staged(ctx, std::span<const hopper::KeyUnit>(key_units));
  p.query_units = staged(ctx, std::span<const hopper::QueryUnit>(query_units));
  p.num_key_units = static_cast<std::int32_t>(key_units.size());
  p.num_query_units = static_cast<std::int32_t>(query_units.size());
  p.packing = packing;
  p.num_kv_heads = static_cast<std::int32_t>(f.num_kv_heads);
  p.head_dim = static_cast<std::int32_t>(D);
  p.window = f.window;
  p.scale = f.scale;
  p.scale_log2 = f.scale * kLog2Of_e;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    float2* stats = carver.take<float2>(stats_rows(layout) * heads);
    p.dscores = carver.take<uint4>(kept.heads * packing.group * kept.tiles * (hopper::kScoreTileBytes / 16));
    p.stats = stats;
    if (memory != nullptr) compute_stats<__nv_bfloat16>(ctx, call, layout, stats);
    return carver.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  p.stats_rows = stats_rows(layout);
  p.stats_rows_map = unswizzled_rows_map(p.stats, p.stats_rows * heads / hopper::kStatsPerRow, kStatsRows / hopper::kStatsPerRow);
  if (kept.heads > 0)
    p.dscore_rows_map =
        unswizzled_rows_map(p.dscores, kept.heads * packing.group * kept.tiles * hopper::kScoreTileRows, hopper::kScoreTileRows);
  p.dq = static_cast<__nv_bfloat16*>(call.dq);
  p.dk = static_cast<__nv_bfloat16*>(call.dk);
  p.dv = static_cast<__nv_bfloat16*>(call.dv);
  p.dq_stride = call.dq_stride;
  p.dk_stride = call.dk_stride;
  p.dv_stride = call.dv_stride;
  const bool is_small = hopper::padded_head_dim(static_cast<int>(D)) == 64;
  if (kept.heads == 0) {
    p.num_round_kv_heads = p.num_kv_heads;
    (is_small ? hopper::launch_backward<64> : hopper::launch_backward<128>)(p, num_multiprocessors(ctx), stream_of(ctx));
    return;
  }
  p.dscore_tiles = kept.tiles;
  for (p.first_kv_head = 0; p.first_kv_head < p.num_kv_heads; p.first_kv_head += kept.heads) {
    p.num_round_kv_heads = std::min(kept.heads, p.num_kv_heads - p.first_kv_head);
    (is_small ? hopper::launch_backward_kept<64> : hopper::launch_backward_kept<128>)(p, num_multiprocessors(ctx), stream_of(ctx));
  }
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

void attention_sinks_backward(OpContext& ctx, TensorView dsinks_H, ConstTensorView dout_THD, ConstTensorView out_THD,
                              ConstTensorView lse_TH, ConstTensorView sinks_H) {
  const std::int64_t T = out_THD.shape[0], H = out_THD.shape[1];
  check_rows("out", out_THD.data, 0, out_THD.dtype);
  check_rows("dout", dout_THD.data, 0, dout_THD.dtype);
  const std::int64_t num_partial = ceil_div(T, std::int64_t{kSinkTokens}) * H;
  const SinkParams p{.out = out_THD.data,
                     .dout = dout_THD.data,
                     .lse = lse_TH.as<float>(),
                     .sinks = sinks_H.as<float>(),
                     .partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(num_partial) * sizeof(float))),
                     .dsinks = dsinks_H.as<float>(),
                     .num_tokens = T,
                     .num_heads = static_cast<std::int32_t>(H),
                     .head_dim = static_cast<std::int32_t>(out_THD.shape[2])};
  if (out_THD.dtype == DType::kF32)
    launch_sink_gradients<float>(p, stream_of(ctx));
  else
    launch_sink_gradients<__nv_bfloat16>(p, stream_of(ctx));
}

}  // namespace prl::ops::cuda
