#include "ops/cuda/attention/call.hpp"

#include <numeric>

#include "ops/cuda/launch.hpp"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

std::uint64_t extent(std::int64_t n) { return static_cast<std::uint64_t>(n); }
std::uint32_t box(std::int64_t n) { return static_cast<std::uint32_t>(n); }

void check_scale(float scale) {
  if (!(scale > 0.0f)) fail(ErrorCode::kInvalidArgument, "[ops] attention on CUDA: scale must be positive, got {}", scale);
}

}  // namespace

namespace {
/// Where keys hold their values: what the kernels have room for.
void check_latent(std::int64_t head_dim, std::int64_t value_dim) {
  if (value_dim > kMaxLatent || head_dim - value_dim > kMaxLatentRotary)
    fail(ErrorCode::kNotImplemented,
         "[ops] attention on CUDA: keys of {} elements that hold values of {}; this build has at most {} and {}", head_dim, value_dim,
         kMaxLatent + kMaxLatentRotary, kMaxLatent);
}
}  // namespace

void check_rows(const char* what, const void* data, std::int64_t token_stride, DType dtype) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  if (!is_aligned(data, 16) || token_stride * size % 16 != 0)
    fail(ErrorCode::kShape,
         "[ops] attention on CUDA: rows of {} must start at multiples of 16 bytes; found {} with {} bytes from token to token", what, data,
         token_stride * size);
}

std::int32_t window_of(std::int64_t window) {
  return window == 0 ? kNoWindow : static_cast<std::int32_t>(std::min<std::int64_t>(window, kNoWindow));
}

ForwardCall call_of(TensorView out_THD, TensorView lse_TH, const VarlenAttention& a) {
  const DType dtype = a.q_THD.dtype;
  check_scale(a.scale);
  check_rows("q", a.q_THD.data, a.q_token_stride, dtype);
  check_rows("k", a.k_TKD.data, a.k_token_stride, dtype);
  if (a.v_TKD.data != nullptr)
    check_rows("v", a.v_TKD.data, a.v_token_stride, dtype);
  else
    check_latent(a.q_THD.shape[2], out_THD.shape[2]);
  check_rows("out", out_THD.data, 0, dtype);
  return {.num_tokens = a.q_THD.shape[0],
          .num_q_heads = a.q_THD.shape[1],
          .num_kv_heads = a.k_TKD.shape[1],
          .head_dim = a.q_THD.shape[2],
          .value_dim = out_THD.shape[2],
          .q = a.q_THD.data,
          .k = a.k_TKD.data,
          .v = a.v_TKD.data,
          .q_stride = a.q_token_stride,
          .k_stride = a.k_token_stride,
          .v_stride = a.v_token_stride,
          .out = out_THD.data,
          .lse = lse_TH.as<float>(),
          .scale = a.scale,
          .window = window_of(a.window),
          .paged = false,
          .num_blocks = 0,
          .block_size = 1,
          .block_table = nullptr,
          .sinks = a.sinks_H.as<float>()};
}

ForwardCall call_of(TensorView out_THD, ConstTensorView q_THD, std::int64_t q_token_stride, const KvLayer& layer, float scale,
                    std::int64_t window) {
  check_scale(scale);
  check_rows("q", q_THD.data, q_token_stride, q_THD.dtype);
  check_rows("cache k", layer.k.data, 0, q_THD.dtype);
  if (layer.v.data != nullptr)
    check_rows("cache v", layer.v.data, 0, q_THD.dtype);
  else
    check_latent(q_THD.shape[2], out_THD.shape[2]);
  check_rows("out", out_THD.data, 0, q_THD.dtype);
  return {.num_tokens = q_THD.shape[0],
          .num_q_heads = q_THD.shape[1],
          .num_kv_heads = layer.k.shape[1],
          .head_dim = q_THD.shape[2],
          .value_dim = out_THD.shape[2],
          .q = q_THD.data,
          .k = layer.k.data,
          .v = layer.v.data,
          .q_stride = q_token_stride,
          .k_stride = 0,
          .v_stride = 0,
          .out = out_THD.data,
          .lse = nullptr,
          .scale = scale,
          .window = window_of(window),
          .paged = true,
          .num_blocks = layer.k.shape[0],
          .block_size = layer.k.shape[2],
          .block_table = nullptr,
          .sinks = nullptr};
}

hopper::ForwardParams hopper_params(const ForwardCall& c, const RowPacking& packing) {
  const int tile = hopper::forward_tile(static_cast<int>(c.head_dim));
  const std::int64_t D = c.head_dim, box_rows = std::gcd<std::int64_t>(c.block_size, tile);
  hopper::ForwardParams p{};
  p.q = tensor_map(
      c.q, {{extent(D), extent(c.num_q_heads), extent(c.num_tokens)}, {D, c.q_stride}, {64, box(packing.heads), box(packing.tokens)}});
  if (c.paged) {
    const MapShape shape{
        {extent(D), extent(c.block_size), extent(c.num_blocks * c.num_kv_heads)}, {D, c.block_size * D}, {64, box(box_rows), 1}};
    p.k = tensor_map(c.k, shape);
    if (!c.values_are_in_keys()) p.v = tensor_map(c.v, shape);
  } else {
    const auto map = [&](const void* data, std::int64_t stride) {
      return tensor_map(data, {{extent(D), extent(c.num_tokens), extent(c.num_kv_heads)}, {stride, D}, {64, box(tile), 1}});
    };
    p.k = map(c.k, c.k_stride);
    if (!c.values_are_in_keys()) p.v = map(c.v, c.v_stride);
  }
  p.packing = packing;
  p.num_kv_heads = static_cast<std::int32_t>(c.num_kv_heads);
  p.num_q_heads = static_cast<std::int32_t>(c.num_q_heads);
  p.head_dim = static_cast<std::int32_t>(D);
  p.scale_log2 = c.scale * kLog2Of_e;
  p.window = c.window;
  p.out = static_cast<__nv_bfloat16*>(c.out);
  p.lse = c.lse;
  p.block_table = c.block_table;
  p.sinks = c.sinks;
  p.block_size = static_cast<std::int32_t>(c.block_size);
  p.box_rows = static_cast<std::int32_t>(box_rows);
  return p;
}

void launch_hopper(const hopper::ForwardParams& p, const ForwardCall& c, bool split, std::int64_t num_items, int num_multiprocessors,
                   cudaStream_t stream) {
  const int items = static_cast<int>(num_items);
  if (c.values_are_in_keys()) return hopper::launch_latent(p, c.paged, items, num_multiprocessors, stream);
  switch (hopper::padded_head_dim(static_cast<int>(c.head_dim))) {
    case 64: return hopper::launch_forward<64>(p, c.paged, split, items, num_multiprocessors, stream);
    case 128: return hopper::launch_forward<128>(p, c.paged, split, items, num_multiprocessors, stream);
    default: return hopper::launch_forward<256>(p, c.paged, split, items, num_multiprocessors, stream);
  }
}

void launch_decode(const hopper::ForwardParams& params, const ForwardCall& c, std::int64_t num_items, int num_multiprocessors,
                   cudaStream_t stream) {
  hopper::ForwardParams p = params;
  const std::int64_t D = c.head_dim;
  p.box_rows = std::gcd(p.box_rows, hopper::kDecodeSlotRows);
  const auto map = [&](const void* data, std::int64_t rows) {
    return tensor_map_5(data, MapShapeOf<5>{{64, 8, extent(D / 64), extent(c.block_size / 8), extent(c.num_blocks * c.num_kv_heads)},
                                            {D, 64, 8 * D, c.block_size * D},
                                            {64, 8, box(D / 64), box(rows / 8), 1}});
  };
  p.k = map(c.k, p.box_rows);
  p.v = map(c.v, p.box_rows);
  p.k_rest = map(c.k, 8);
  p.v_rest = map(c.v, 8);
  const int items = static_cast<int>(num_items);
  if (D == 64)
    hopper::launch_decode<64>(p, items, num_multiprocessors, stream);
  else
    hopper::launch_decode<128>(p, items, num_multiprocessors, stream);
}

template <typename T>
PlainForward<T> plain_params(const ForwardCall& c, const RowPacking& packing) {
  PlainForward<T> p{};
  p.q = static_cast<const T*>(c.q);
  p.k = static_cast<const T*>(c.k);
  p.v = static_cast<const T*>(c.v);
  p.q_stride = c.q_stride;
  p.k_stride = c.k_stride;
  p.v_stride = c.v_stride;
  p.packing = packing;
  p.num_kv_heads = static_cast<std::int32_t>(c.num_kv_heads);
  p.num_q_heads = static_cast<std::int32_t>(c.num_q_heads);
  p.head_dim = static_cast<std::int32_t>(c.head_dim);
  p.value_dim = static_cast<std::int32_t>(c.value_dim);
  p.scale_log2 = c.scale * kLog2Of_e;
  p.window = c.window;
  p.out = static_cast<T*>(c.out);
  p.lse = c.lse;
  p.block_table = c.block_table;
  p.sinks = c.sinks;
  p.block_size = static_cast<std::int32_t>(c.block_size);
  return p;
}
template PlainForward<float> plain_params(const ForwardCall&, const RowPacking&);
template PlainForward<__nv_bfloat16> plain_params(const ForwardCall&, const RowPacking&);

MergeParams merge_params(const ForwardCall& c, const RowPacking& packing) {
  MergeParams p{};
  p.packing = packing;
  p.num_q_heads = static_cast<std::int32_t>(c.num_q_heads);
  p.head_dim = static_cast<std::int32_t>(c.value_dim);
  p.out = c.out;
  p.sinks = c.sinks;
  return p;
}

}  // namespace prl::ops::cuda
