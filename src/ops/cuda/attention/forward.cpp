#include "ops/attention.hpp"

#include <cstdlib>
#include <string_view>

#include "ops/cuda/attention/call.hpp"
#include "ops/cuda/attention/kv_write.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {
namespace {

static_assert(kChunkKeys == kAttentionChunk && kChunkKeys % hopper::forward_tile(128) == 0 && kPlainTile == kAttentionTile);

template <typename T>
std::span<const T> span_of(const std::vector<T>& v) {
  return v;
}

/// Memory for the states of split units.
struct States {
  float* out;
  float2* sums;
  static States of(const OpContext& ctx, std::int64_t rows, std::int64_t head_dim) {
    const auto carve = [&](void* memory, States& s) {
      Carver carver(memory);
      s.out = carver.take<float>(rows * head_dim);
      s.sums = carver.take<float2>(rows);
      return carver.used();
    };
    States s{};
    if (rows > 0) carve(ctx.workspace->require(carve(nullptr, s)), s);
    return s;
  }
};

/// Which sequences are computed chunk by chunk: those whose new tokens fit one block of rows, and all when whole units would leave
/// most of the device idle. It changes no bit.
struct Division {
  std::vector<AttentionSequence> whole, split;
};
Division divide(const std::vector<AttentionSequence>& all, const RowPacking& packing, int unit_tokens, int num_multiprocessors) {
  Division d;
  std::int64_t items = 0;
  for (const AttentionSequence& s : all) {
    const bool is_small = s.num_tokens <= packing.tokens;
    (is_small ? d.split : d.whole).push_back(s);
    if (!is_small) items += ceil_div(s.num_tokens, unit_tokens) * packing.num_groups;
  }
  if (items > 0 && items < num_multiprocessors / 2) {
    d.split.insert(d.split.end(), d.whole.begin(), d.whole.end());
    d.whole.clear();
  }
  return d;
}

/// Runs `launch(units, num_units, states, state_rows)` on split units and merges what they leave.
template <typename T, typename Launch>
void run_split(const OpContext& ctx, const ForwardCall& call, const RowPacking& packing, const SplitUnits& split, const Launch& launch) {
  std::int32_t tokens = 1;
  for (const AttentionUnit& u : split.units) tokens = std::max(tokens, u.num_tokens);
  const std::int32_t state_rows = tokens * packing.heads;
  const States states = States::of(ctx, static_cast<std::int64_t>(split.num_states) * packing.num_groups * state_rows, call.value_dim);
  launch(staged(ctx, span_of(split.units)), static_cast<std::int32_t>(split.units.size()), states, state_rows);
  if (split.merges.empty()) return;
  MergeParams merge = merge_params(call, packing);
  merge.units = staged(ctx, span_of(split.merges));
  merge.num_units = static_cast<std::int32_t>(split.merges.size());
  merge.state_out = states.out;
  merge.state_sums = states.sums;
  merge.state_rows = state_rows;
  launch_merge<T>(merge, merge.num_units * packing.num_groups, stream_of(ctx));
}

template <typename T>
void launch_plain(const OpContext& ctx, const ForwardCall& call, const RowPacking& packing, const AttentionUnit* units,
                  std::int32_t num_units, const States& states, std::int32_t state_rows) {
  PlainForward<T> p = plain_params<T>(call, packing);
  p.units = units;
  p.num_units = num_units;
  p.state_out = states.out;
  p.state_sums = states.sums;
  p.state_rows = state_rows;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (call.values_are_in_keys()) return launch_latent_forward(p, packing.tokens * packing.heads, stream_of(ctx));
  launch_plain_forward(p, stream_of(ctx));
}
template <typename T>
void forward_plain(const OpContext& ctx, const ForwardCall& call, const std::vector<AttentionSequence>& sequences) {
  const RowPacking packing = RowPacking::of(call.num_q_heads, call.num_kv_heads);
  const Division d = divide(sequences, packing, packing.tokens, num_multiprocessors(ctx));
  if (!d.whole.empty()) {
    const std::vector<AttentionUnit> units = whole_units(d.whole, packing.tokens, kPlainTile, call.window);
    launch_plain<T>(ctx, call, packing, staged(ctx, span_of(units)), static_cast<std::int32_t>(units.size()), {}, 0);
  }
  if (!d.split.empty() && call.lse == nullptr)
    run_split<T>(ctx, call, packing, split_units(d.split, packing.tokens, kPlainTile, call.window),
                 [&](auto... a) { launch_plain<T>(ctx, call, packing, a...); });
  else if (!d.split.empty()) {
    const std::vector<AttentionUnit> units = whole_units(d.split, packing.tokens, kPlainTile, call.window);
    launch_plain<T>(ctx, call, packing, staged(ctx, span_of(units)), static_cast<std::int32_t>(units.size()), {}, 0);
  }
}

void forward_hopper(const OpContext& ctx, const ForwardCall& call, const std::vector<AttentionSequence>& sequences) {
  const RowPacking packing = RowPacking::of(call.num_q_heads, call.num_kv_heads);
  const int D = static_cast<int>(call.head_dim), tile = hopper::forward_tile(D), tokens = hopper::forward_row_blocks(D) * packing.tokens;
  hopper::ForwardParams p = hopper_params(call, packing);
  const auto launch = [&](const AttentionUnit* units, std::int32_t num_units, bool split) {
    p.units = units;
    p.num_units = num_units;
    launch_hopper(p, call, split, static_cast<std::int64_t>(num_units) * packing.num_groups, num_multiprocessors(ctx), stream_of(ctx));
  };
  const Division d = call.paged ? divide(sequences, packing, tokens, num_multiprocessors(ctx)) : Division{sequences, {}};
  if (!d.whole.empty()) {
    const std::vector<AttentionUnit> units = whole_units(d.whole, tokens, tile, call.window);
    launch(staged(ctx, span_of(units)), static_cast<std::int32_t>(units.size()), false);
  }
  if (!d.split.empty())
    run_split<__nv_bfloat16>(ctx, call, packing, split_units(d.split, packing.tokens, tile, call.window),
                             [&](const AttentionUnit* units, std::int32_t num_units, const States& states, std::int32_t state_rows) {
                               p.state_out = states.out;
                               p.state_sums = states.sums;
                               p.state_rows = state_rows;
                               launch(units, num_units, true);
                             });
}

void forward(const OpContext& ctx, AttentionFamily family, DType dtype, const ForwardCall& call,
             const std::vector<AttentionSequence>& sequences) {
  if (sequences.empty()) return;
  if (dtype == DType::kF32)
    forward_plain<float>(ctx, call, sequences);
  else if (call.family_of(family) == AttentionFamily::kPlain)
    forward_plain<__nv_bfloat16>(ctx, call, sequences);
  else
    forward_hopper(ctx, call, sequences);
}

KvWriteParams write_params(const KvLayer& layer, ConstTensorView k, std::int64_t k_stride, ConstTensorView v, std::int64_t v_stride) {
  check_rows("k", k.data, k_stride, k.dtype);
  check_rows("cache k", layer.k.data, 0, k.dtype);
  const bool has_values = layer.v.data != nullptr;
  if (has_values) {
    check_rows("v", v.data, v_stride, v.dtype);
    check_rows("cache v", layer.v.data, 0, v.dtype);
  }
  const auto size = static_cast<std::int64_t>(size_of(k.dtype));
  return {.k = k.data,
          .v = has_values ? v.data : nullptr,
          .k_stride = k_stride * size,
          .v_stride = has_values ? v_stride * size : 0,
          .k_cache = layer.k.data,
          .v_cache = layer.v.data,
          .slots = nullptr,
          .num_tokens = static_cast<std::int32_t>(k.shape[0]),
          .num_heads = static_cast<std::int32_t>(k.shape[1]),
          .head_bytes = static_cast<std::int32_t>(k.shape[2] * size),
          .block_size = static_cast<std::int32_t>(layer.k.shape[2])};
}

}  // namespace

AttentionFamily chosen_attention_family(const OpContext& ctx) {
  static const bool is_plain = [] {
    const char* wanted = std::getenv("PRL_CUDA_ATTENTION");
    return wanted != nullptr && std::string_view(wanted) == "plain";
  }();
  const bool has_code = std::string_view(PRL_CUDA_ARCH_TEXT).find("sm_90a") != std::string_view::npos;
  const cudaDeviceProp& device = properties_of(ctx);
  return has_code && device.major == 9 && device.minor == 0 && !is_plain ? AttentionFamily::kHopper : AttentionFamily::kPlain;
}

void attention_varlen(OpContext& ctx, AttentionFamily family, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args) {
  forward(ctx, family, args.q_THD.dtype, call_of(out_THD, lse_TH, args), sequences_of(args));
}
void attention_varlen(OpContext& ctx, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args) {
  attention_varlen(ctx, chosen_attention_family(ctx), out_THD, lse_TH, args);
}

void attention_paged(OpContext& ctx, AttentionFamily family, TensorView out_THD, const PagedAttention& args) {
  ForwardCall call = call_of(out_THD, args.q_THD, args.q_token_stride, args.layer, args.scale, args.window);
  call.block_table = staged(ctx, args.block_table);
  call.sinks = args.sinks_H.as<float>();
  forward(ctx, family, args.q_THD.dtype, call, sequences_of(args));
}
void attention_paged(OpContext& ctx, TensorView out_THD, const PagedAttention& args) {
  attention_paged(ctx, chosen_attention_family(ctx), out_THD, args);
}

void kv_write(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
              std::int64_t v_token_stride, std::span<const std::int32_t> slot_T) {
  KvWriteParams p = write_params(layer, k_TKD, k_token_stride, v_TKD, v_token_stride);
  p.slots = staged(ctx, slot_T);
  launch_kv_write(p, stream_of(ctx));
}
void kv_write_at(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
                 std::int64_t v_token_stride, const std::int32_t* slot_T) {
  if (k_token_stride == 0) k_token_stride = k_TKD.shape[1] * k_TKD.shape[2];
  if (v_token_stride == 0) v_token_stride = v_TKD.shape[1] * v_TKD.shape[2];
  KvWriteParams p = write_params(layer, k_TKD, k_token_stride, v_TKD, v_token_stride);
  p.slots = slot_T;
  launch_kv_write(p, stream_of(ctx));
}

}  // namespace prl::ops::cuda
