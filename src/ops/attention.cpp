#include "ops/attention.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

bool is_head_dim(std::int64_t head_dim) noexcept { return std::find(kHeadDims.begin(), kHeadDims.end(), head_dim) != kHeadDims.end(); }

namespace {

void check_head_dim(ShapeCheck& c, std::int64_t head_dim) {
  if (!is_head_dim(head_dim)) c.require(false, fmt::format("D is {}, must be one of {}", head_dim, fmt::join(kHeadDims, ", ")));
}

/// Views of [tokens, heads, D] whose heads lie next to each other; tokens may be further apart.
void check_heads(ShapeCheck& c, std::string_view name, const ConstTensorView& v, std::string_view pattern, std::int64_t token_stride) {
  ConstTensorView dense = v;
  dense.row_stride = v.shape.num_cols();  // the token stride is given apart
  c.check(name, dense, pattern).floating(name, v);
  c.require(token_stride == 0 || token_stride >= v.shape[1] * v.shape[2] || v.shape[0] <= 1, "a token stride is smaller than heads * D");
}

void check_sinks(ShapeCheck& c, const ConstTensorView& sinks_H) {
  if (sinks_H.data != nullptr) c.check("sinks", sinks_H, "Hq", DType::kF32).contiguous("sinks", sinks_H);
}

/// Where `has_values` is false, those are the last elements of the one key head.
void check_sizes_of_heads(ShapeCheck& c, const ConstTensorView& q, std::int64_t num_kv_heads, const TensorView& out, bool has_values) {
  if (has_values) return check_head_dim(c, q.shape[2]);
  const std::int64_t D = q.shape[2], V = out.shape[2];
  c.require(num_kv_heads == 1, "Hkv must be 1 where keys hold values");
  if (D % 16 != 0 || V % 16 != 0 || V <= 0 || V > D)
    c.require(false, fmt::format("keys of D = {} elements that hold values of V = {}; multiples of 16 are wanted, V at most D", D, V));
}
/// "V" where keys hold values.
const char* pattern_of_out(bool has_values) { return has_values ? "T Hq D" : "T Hq V"; }

void check_varlen(ShapeCheck& c, const VarlenAttention& a) {
  check_heads(c, "q", a.q_THD, "T Hq D", a.q_token_stride);
  check_heads(c, "k", a.k_TKD, "T Hkv D", a.k_token_stride);
  c.same_dtype("q", a.q_THD.dtype, "k", a.k_TKD.dtype);
  if (a.v_TKD.data != nullptr) {
    check_heads(c, "v", a.v_TKD, "T Hkv D", a.v_token_stride);
    c.same_dtype("q", a.q_THD.dtype, "v", a.v_TKD.dtype);
  }
  c.require(a.k_TKD.shape[1] > 0 && a.q_THD.shape[1] % a.k_TKD.shape[1] == 0, "Hq must be a multiple of Hkv");
  c.require(a.window >= 0, "the window is negative");
  c.require(!a.cu_seqlens.empty() && a.cu_seqlens.front() == 0 && a.cu_seqlens.back() == a.q_THD.shape[0],
            "cu_seqlens must start at 0 and end at T");
  for (std::size_t i = 1; i < a.cu_seqlens.size(); ++i) c.require(a.cu_seqlens[i] >= a.cu_seqlens[i - 1], "cu_seqlens must not fall");
  check_sinks(c, a.sinks_H);
}

VarlenAttention with_strides(VarlenAttention a) {
  if (a.q_token_stride == 0) a.q_token_stride = a.q_THD.shape[1] * a.q_THD.shape[2];
  if (a.k_token_stride == 0) a.k_token_stride = a.k_TKD.shape[1] * a.k_TKD.shape[2];
  if (a.v_token_stride == 0 && a.v_TKD.data != nullptr) a.v_token_stride = a.v_TKD.shape[1] * a.v_TKD.shape[2];
  return a;
}

void check_layer(ShapeCheck& c, const KvLayer& layer) {
  c.check("cache k", layer.k, "B Hkv S D").contiguous("cache k", layer.k);
  if (layer.v.data != nullptr)
    c.check("cache v", layer.v, "B Hkv S D").contiguous("cache v", layer.v).same_dtype("cache k", layer.k.dtype, "cache v", layer.v.dtype);
  const std::int64_t size = layer.k.shape[2];
  c.require(size > 0 && (kAttentionTile % size == 0 || size % kAttentionTile == 0), "block_size must divide 64 or be a multiple of it");
}

}  // namespace

void attention_varlen(OpContext& ctx, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args) {
  ShapeCheck c("attention_varlen", ctx);
  const bool has_values = args.v_TKD.data != nullptr;
  check_varlen(c, args);
  c.check("out", out_THD, pattern_of_out(has_values), args.q_THD.dtype).contiguous("out", out_THD);
  check_sizes_of_heads(c, args.q_THD, args.k_TKD.shape[1], out_THD, has_values);
  if (lse_TH.data != nullptr) c.check("lse", lse_TH, "T Hq", DType::kF32).contiguous("lse", lse_TH);
  if (args.q_THD.shape[0] == 0) return;
  table_entry(ctx, ctx.table->attention_varlen, "attention_varlen")(ctx, out_THD, lse_TH, with_strides(args));
}

void attention_varlen_backward(OpContext& ctx, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD, std::int64_t dq_token_stride,
                               std::int64_t dk_token_stride, std::int64_t dv_token_stride, ConstTensorView dout_THD,
                               ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args) {
  ShapeCheck c("attention_varlen_backward", ctx);
  check_varlen(c, args);
  c.require(args.v_TKD.data != nullptr, "keys that hold values have no backward pass");
  check_head_dim(c, args.q_THD.shape[2]);
  const DType dtype = args.q_THD.dtype;
  check_heads(c, "dq", dq_THD, "T Hq D", dq_token_stride);
  check_heads(c, "dk", dk_TKD, "T Hkv D", dk_token_stride);
  check_heads(c, "dv", dv_TKD, "T Hkv D", dv_token_stride);
  c.same_dtype("dq", dq_THD.dtype, "q", dtype).same_dtype("dk", dk_TKD.dtype, "q", dtype).same_dtype("dv", dv_TKD.dtype, "q", dtype);
  c.check("dout", dout_THD, "T Hq D", dtype).check("out", out_THD, "T Hq D", dtype).check("lse", lse_TH, "T Hq", DType::kF32);
  c.contiguous("dout", dout_THD).contiguous("out", out_THD).contiguous("lse", lse_TH);
  if (args.q_THD.shape[0] == 0) return;
  if (dq_token_stride == 0) dq_token_stride = dq_THD.shape[1] * dq_THD.shape[2];
  if (dk_token_stride == 0) dk_token_stride = dk_TKD.shape[1] * dk_TKD.shape[2];
  if (dv_token_stride == 0) dv_token_stride = dv_TKD.shape[1] * dv_TKD.shape[2];
  table_entry(ctx, ctx.table->attention_varlen_backward, "attention_varlen_backward")(
      ctx, dq_THD, dk_TKD, dv_TKD, dq_token_stride, dk_token_stride, dv_token_stride, dout_THD, out_THD, lse_TH, with_strides(args));
}

void attention_sinks_backward(OpContext& ctx, TensorView dsinks_H, ConstTensorView dout_THD, ConstTensorView out_THD,
                              ConstTensorView lse_TH, ConstTensorView sinks_H) {
  ShapeCheck c("attention_sinks_backward", ctx);
  c.check("out", out_THD, "T Hq D").floating("out", out_THD).check("dout", dout_THD, "T Hq D", out_THD.dtype);
  c.check("lse", lse_TH, "T Hq", DType::kF32).check("sinks", sinks_H, "Hq", DType::kF32).check("dsinks", dsinks_H, "Hq", DType::kF32);
  c.contiguous("out", out_THD).contiguous("dout", dout_THD).contiguous("lse", lse_TH);
  check_head_dim(c, out_THD.shape[2]);
  if (out_THD.shape[0] == 0) return;
  table_entry(ctx, ctx.table->attention_sinks_backward, "attention_sinks_backward")(ctx, dsinks_H, dout_THD, out_THD, lse_TH, sinks_H);
}

void kv_write(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
              std::int64_t v_token_stride, std::span<const std::int32_t> slot_T) {
  ShapeCheck c("kv_write", ctx);
  check_layer(c, layer);
  check_heads(c, "k", k_TKD, "T Hkv D", k_token_stride);
  c.same_dtype("k", k_TKD.dtype, "cache k", layer.k.dtype);
  if (layer.v.data != nullptr) {
    check_heads(c, "v", v_TKD, "T Hkv D", v_token_stride);
    c.same_dtype("v", v_TKD.dtype, "cache v", layer.v.dtype);
  }
  c.extent("T", static_cast<std::int64_t>(slot_T.size()), "slot");
  const std::int64_t num_slots = layer.k.shape[0] * layer.k.shape[2];
  for (const std::int32_t slot : slot_T) c.require(slot >= -1 && slot < num_slots, "a slot lies outside the cache");
  if (slot_T.empty()) return;
  if (k_token_stride == 0) k_token_stride = k_TKD.shape[1] * k_TKD.shape[2];
  if (v_token_stride == 0 && layer.v.data != nullptr) v_token_stride = v_TKD.shape[1] * v_TKD.shape[2];
  table_entry(ctx, ctx.table->kv_write, "kv_write")(ctx, layer, k_TKD, k_token_stride, v_TKD, v_token_stride, slot_T);
}

void attention_paged(OpContext& ctx, TensorView out_THD, const PagedAttention& args) {
  ShapeCheck c("attention_paged", ctx);
  check_layer(c, args.layer);
  check_heads(c, "q", args.q_THD, "T Hq D", args.q_token_stride);
  c.same_dtype("q", args.q_THD.dtype, "cache k", args.layer.k.dtype);
  const bool has_values = args.layer.v.data != nullptr;
  c.check("out", out_THD, pattern_of_out(has_values), args.q_THD.dtype).contiguous("out", out_THD);
  check_sizes_of_heads(c, args.q_THD, args.layer.k.shape[1], out_THD, has_values);
  c.require(args.layer.k.shape[1] > 0 && args.q_THD.shape[1] % args.layer.k.shape[1] == 0, "Hq must be a multiple of Hkv");
  c.require(args.window >= 0, "the window is negative");
  check_sinks(c, args.sinks_H);
  const auto sequences = static_cast<std::int64_t>(args.context_len.size());
  c.extent("num_sequences + 1", sequences + 1, "context_len")
      .extent("num_sequences + 1", static_cast<std::int64_t>(args.query_start.size()), "query_start");
  c.require(static_cast<std::int64_t>(args.block_table.size()) == sequences * args.max_blocks,
            "block_table must hold num_sequences * max_blocks entries");
  c.require(args.query_start[0] == 0 && args.query_start.back() == args.q_THD.shape[0], "query_start must start at 0 and end at T");
  const std::int64_t block_size = args.layer.k.shape[2];
  for (std::int64_t s = 0; s < sequences; ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t count = args.query_start[i + 1] - args.query_start[i], length = args.context_len[i];
    c.require(count >= 0 && count <= length, "a sequence has more queries than tokens in the cache");
    const std::int64_t blocks = (length + block_size - 1) / block_size;
    c.require(blocks <= args.max_blocks, "a sequence needs more blocks than max_blocks");
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int32_t block = args.block_table[static_cast<std::size_t>(s * args.max_blocks + b)];
      c.require(block >= 0 && block < args.layer.k.shape[0], "block_table names a block outside the cache");
    }
  }
  if (args.q_THD.shape[0] == 0) return;
  PagedAttention a = args;
  if (a.q_token_stride == 0) a.q_token_stride = a.q_THD.shape[1] * a.q_THD.shape[2];
  table_entry(ctx, ctx.table->attention_paged, "attention_paged")(ctx, out_THD, a);
}

namespace {

void check_index(ShapeCheck& c, const DecodeIndex& index) {
  c.check("context_len", index.context_len_B, "N", DType::kI32).check("block_table", index.block_table_BM, "N M", DType::kI32);
  c.contiguous("block_table", index.block_table_BM);
}

}  // namespace

void norm_rope_to_cache(OpContext& ctx, TensorView q_TE, const KvLayer& layer, ConstTensorView slot_T, const HeadInputs& in) {
  ShapeCheck c("norm_rope_to_cache", ctx);
  const std::int64_t D = in.head_dim, Q = in.num_heads * D, K = in.num_kv_heads * D;
  check_layer(c, layer);
  c.require(layer.v.data != nullptr, "a cache with values of their own");
  c.check("q", q_TE, "T Q").check("qkv", in.qkv_TE, "T W").same_dtype("q", q_TE.dtype, "qkv", in.qkv_TE.dtype).floating("q", q_TE);
  c.extent("Q", Q, "num_heads").extent("W", Q + 2 * K, "num_heads, num_kv_heads").extent("Hkv", in.num_kv_heads, "num_kv_heads");
  c.extent("D", D, "head_dim").check("positions", in.positions_T, "T", DType::kI32).check("slot", slot_T, "T", DType::kI32);
  c.same_dtype("q", q_TE.dtype, "cache k", layer.k.dtype)
      .require(in.rope != nullptr && 2 * in.rope->num_pairs() <= in.head_dim, "a rotary table of heads is wanted");
  table_entry(ctx, ctx.table->norm_rope_to_cache, "norm_rope_to_cache")(ctx, q_TE, layer, slot_T, in);
}

bool can_decode_by_index(const OpContext& ctx) { return ctx.table->attention_decode != nullptr; }

std::size_t decode_plan_bytes(OpContext& ctx, const DecodeIndex& index, std::int64_t block_size) {
  const auto body = table_entry(ctx, ctx.table->decode_plan_bytes, "decode_plan_bytes");
  return body(ctx, index.block_table_BM.shape[0], index.block_table_BM.shape[1] * block_size);
}

void plan_decode(OpContext& ctx, TensorView plan, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                 std::int64_t window) {
  ShapeCheck c("plan_decode", ctx);
  check_layer(c, layer);
  check_index(c, index);
  c.extent("N", q_BHD.shape[0], "q").extent("D", q_BHD.shape[2], "q");
  c.require(plan.shape.num_elements() >= static_cast<std::int64_t>(decode_plan_bytes(ctx, index, layer.k.shape[2])),
            "the plan is too small");
  c.require(window >= 0, "the window is negative");
  table_entry(ctx, ctx.table->plan_decode, "plan_decode")(ctx, plan, q_BHD, layer, index, window);
}

void attention_decode(OpContext& ctx, TensorView out_BHD, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                      ConstTensorView plan, float scale, std::int64_t window, ConstTensorView sinks_H) {
  ShapeCheck c("attention_decode", ctx);
  check_layer(c, layer);
  check_index(c, index);
  c.check("q", q_BHD, "N Hq D", layer.k.dtype)
      .contiguous("q", q_BHD)
      .check("out", out_BHD, layer.v.data != nullptr ? "N Hq D" : "N Hq V", layer.k.dtype)
      .contiguous("out", out_BHD);
  check_sizes_of_heads(c, q_BHD, layer.k.shape[1], out_BHD, layer.v.data != nullptr);
  c.require(layer.k.shape[1] > 0 && q_BHD.shape[1] % layer.k.shape[1] == 0, "Hq must be a multiple of Hkv");
  check_sinks(c, sinks_H);
  table_entry(ctx, ctx.table->attention_decode, "attention_decode")(ctx, out_BHD, q_BHD, layer, index, plan, scale, window, sinks_H);
}

}  // namespace prl::ops
