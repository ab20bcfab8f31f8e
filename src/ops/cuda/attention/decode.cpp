#include "ops/cuda/attention/bodies.hpp"
#include "ops/cuda/attention/call.hpp"
#include "ops/cuda/attention/decode_plan.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {
namespace {

std::int64_t max_chunks(const DecodeAttention& a) {
  return ceil_div(static_cast<std::int64_t>(a.max_blocks) * a.layer.k.shape[2], kChunkKeys);
}
std::size_t carve(DecodePlan& plan, void* memory, std::int64_t num_sequences, std::int64_t chunks) {
  Carver carver(memory);
  plan.counts = carver.take<std::int32_t>(DecodePlan::kNumCounts);
  plan.units = carver.take<AttentionUnit>(num_sequences * chunks);
  plan.merges = carver.take<MergeUnit>(num_sequences);
  return carver.used();
}
/// Keys per tile of the kernels that compute `a`: of latents as many in each family, whatever their size.
int tile_of(AttentionFamily family, const DecodeAttention& a) {
  const bool is_plain = a.q_THD.dtype == DType::kF32 || family == AttentionFamily::kPlain || a.layer.v.data == nullptr;
  return is_plain ? kPlainTile : hopper::forward_tile(static_cast<int>(a.q_THD.shape[2]));
}

template <typename T>
void launch_plain(const ForwardCall& call, const RowPacking& packing, const DecodePlan& plan, std::int32_t max_units, float* state_out,
                  float2* state_sums, cudaStream_t stream) {
  PlainForward<T> p = plain_params<T>(call, packing);
  p.units = plan.units;
  p.num_units_at = plan.counts;
  p.num_units = max_units;
  p.state_out = state_out;
  p.state_sums = state_sums;
  p.state_rows = packing.heads;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    if (call.values_are_in_keys()) return launch_latent_forward(p, packing.heads, stream);
  launch_plain_forward(p, stream);
}

}  // namespace

std::size_t decode_plan_bytes(std::int32_t num_sequences, std::int64_t max_context) {
  DecodePlan plan{};
  return carve(plan, nullptr, num_sequences, ceil_div(max_context, kChunkKeys));
}

void plan_decode(OpContext& ctx, AttentionFamily family, void* memory, const DecodeAttention& a) {
  DecodePlan plan{};
  carve(plan, memory, a.num_sequences, max_chunks(a));
  launch_decode_plan(plan, a.context_len, a.num_sequences, a.max_blocks, tile_of(family, a), window_of(a.window), stream_of(ctx));
}

namespace {

/// Attention of a step. `fresh`: from projections, whose heads of q `a` has.
void decode(OpContext& ctx, AttentionFamily family, TensorView out_THD, const void* memory, const DecodeAttention& a,
            const hopper::FreshHeads* fresh) {
  const std::int64_t q_stride = a.q_token_stride == 0 ? a.q_THD.shape[1] * a.q_THD.shape[2] : a.q_token_stride;
  ForwardCall call = call_of(out_THD, a.q_THD, q_stride, a.layer, a.scale, a.window);
  call.block_table = a.block_table;
  call.sinks = a.sinks;
  const RowPacking packing = RowPacking::of(call.num_q_heads, call.num_kv_heads);
  const std::int64_t chunks = max_chunks(a), max_units = a.num_sequences * chunks;
  DecodePlan plan{};
  carve(plan, const_cast<void*>(memory), a.num_sequences, chunks);

  float* state_out = nullptr;
  float2* state_sums = nullptr;
  if (chunks > 1) {
    const std::int64_t rows = max_units * packing.num_groups * packing.heads;
    const auto states = [&](void* at) {
      Carver carver(at);
      state_out = carver.take<float>(rows * call.value_dim);
      state_sums = carver.take<float2>(rows);
      return carver.used();
    };
    states(ctx.workspace->require(states(nullptr)));
  }
  const cudaStream_t stream = stream_of(ctx);
  if (a.q_THD.dtype == DType::kF32) {
    launch_plain<float>(call, packing, plan, static_cast<std::int32_t>(max_units), state_out, state_sums, stream);
  } else if (call.family_of(family) == AttentionFamily::kPlain) {
    launch_plain<__nv_bfloat16>(call, packing, plan, static_cast<std::int32_t>(max_units), state_out, state_sums, stream);
  } else {
    hopper::ForwardParams p = hopper_params(call, packing);
    p.units = plan.units;
    p.num_units_at = plan.counts;
    p.state_out = state_out;
    p.state_sums = state_sums;
    p.state_rows = packing.heads;
    const std::int64_t num_items = max_units * packing.num_groups;
    if (fresh != nullptr) {
      p.fresh = *fresh;
      p.next_item = plan.counts + 2;
      launch_decode(p, call, num_items, num_multiprocessors(ctx), stream);
    } else {
      launch_hopper(p, call, true, num_items, num_multiprocessors(ctx), stream);
    }
  }
  if (chunks == 1) return;
  MergeParams merge = merge_params(call, packing);
  merge.units = plan.merges;
  merge.num_units_at = plan.counts + 1;
  merge.state_out = state_out;
  merge.state_sums = state_sums;
  merge.state_rows = packing.heads;
  const int blocks = static_cast<int>(std::min<std::int64_t>(a.num_sequences * packing.num_groups, 8 * num_multiprocessors(ctx)));
  if (a.q_THD.dtype == DType::kF32)
    launch_merge<float>(merge, blocks, stream);
  else
    launch_merge<__nv_bfloat16>(merge, blocks, stream);
}

}  // namespace

void attention_decode(OpContext& ctx, AttentionFamily family, TensorView out_THD, const void* memory, const DecodeAttention& a) {
  decode(ctx, family, out_THD, memory, a, nullptr);
}

namespace {

DecodeAttention decode_of(const ConstTensorView& q, const KvLayer& layer, const DecodeIndex& index, float scale, std::int64_t window) {
  DecodeAttention a;
  a.q_THD = q;
  a.layer = layer;
  a.context_len = index.context_len_B.as<std::int32_t>();
  a.block_table = index.block_table_BM.as<std::int32_t>();
  a.num_sequences = static_cast<std::int32_t>(index.block_table_BM.shape[0]);
  a.max_blocks = static_cast<std::int32_t>(index.block_table_BM.shape[1]);
  a.scale = scale;
  a.window = window;
  return a;
}

}  // namespace

std::size_t decode_plan_bytes(OpContext& /*ctx*/, std::int64_t num_sequences, std::int64_t max_context) {
  return decode_plan_bytes(static_cast<std::int32_t>(num_sequences), max_context);
}

void plan_decode(OpContext& ctx, TensorView plan, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                 std::int64_t window) {
  plan_decode(ctx, chosen_attention_family(ctx), plan.data, decode_of(q_BHD, layer, index, 1.0f, window));
}

void attention_decode(OpContext& ctx, TensorView out_BHD, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                      ConstTensorView plan, float scale, std::int64_t window, ConstTensorView sinks_H) {
  DecodeAttention a = decode_of(q_BHD, layer, index, scale, window);
  a.sinks = sinks_H.as<float>();
  attention_decode(ctx, chosen_attention_family(ctx), out_BHD, plan.data, a);
}

bool attention_decode_fused(OpContext& ctx, TensorView out_BHD, const HeadInputs& in, const KvLayer& layer, const DecodeIndex& index,
                            ConstTensorView plan, float scale, std::int64_t window, ConstTensorView sinks_H) {
  const std::int64_t D = in.head_dim, block_size = layer.k.shape[2];
  if (layer.v.data == nullptr) return false;
  const bool is_wanted_type = chosen_attention_family(ctx) == AttentionFamily::kHopper && in.qkv_TE.dtype == DType::kBF16;
  if (ceil_div(in.num_heads, in.num_kv_heads) > hopper::kMaxFreshHeads) return false;
  if (!is_wanted_type || (D != 64 && D != 128) || block_size % 8 != 0 || in.rope->num_pairs() % 8 != 0 || !(scale > 0.0f)) return false;
  const std::initializer_list<const void*> pointers = {in.qkv_TE.data,          in.q_norm_D.data, in.k_norm_D.data, in.rope->cos_PR2.data(),
                                                       in.rope->sin_PR2.data(), layer.k.data,     layer.v.data};
  if (!std::ranges::all_of(pointers, [](const void* p) { return is_aligned(p, 16); }) || in.qkv_TE.row_stride % 8 != 0) return false;
  ConstTensorView q = in.qkv_TE;
  q.shape = Shape{in.qkv_TE.shape.num_rows(), in.num_heads, D};
  q.row_stride = D;
  DecodeAttention a = decode_of(q, layer, index, scale, window);
  a.q_token_stride = in.qkv_TE.row_stride;
  a.sinks = sinks_H.as<float>();
  const hopper::FreshHeads fresh{.qkv = in.qkv_TE.as<__nv_bfloat16>(),
                                 .qkv_stride = in.qkv_TE.row_stride,
                                 .q_norm = in.q_norm_D.as<float>(),
                                 .k_norm = in.k_norm_D.as<float>(),
                                 .eps = in.eps,
                                 .positions = in.positions_T.as<std::int32_t>(),
                                 .cosines = in.rope->cos_PR2.as<float>(),
                                 .sines = in.rope->sin_PR2.as<float>(),
                                 .num_pairs = static_cast<int>(in.rope->num_pairs()),
                                 .num_positions = in.rope->cos_PR2.shape()[0],
                                 .slots = index.slot_B.as<std::int32_t>(),
                                 .k_cache = layer.k.as<__nv_bfloat16>(),
                                 .v_cache = layer.v.as<__nv_bfloat16>(),
                                 .fault = fault_word_of(ctx)};
  decode(ctx, AttentionFamily::kHopper, out_BHD, plan.data, a, &fresh);
  return true;
}

}  // namespace prl::ops::cuda
