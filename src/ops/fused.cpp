#include "ops/fused.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

bool linear_fused(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearFusion& fusion) {
  if (ctx.table->linear_fused == nullptr) return false;
  ShapeCheck c("linear_fused", ctx);
  c.extent("N", fusion.swiglu ? w.num_outputs() / 2 : w.num_outputs(), "w").extent("K", w.num_inputs(), "w");
  c.check("y", y_TN, "T N", w.dtype()).check("x", x_TK, "T K", w.dtype());
  if (fusion.norm_K.data != nullptr) c.check("norm", fusion.norm_K, "K", DType::kF32);
  if (fusion.residual_TN.data != nullptr) c.check("residual", fusion.residual_TN, "T N", w.dtype());
  c.require(!fusion.swiglu || (fusion.residual_TN.data == nullptr && w.num_outputs() % 2 == 0),
            "swiglu takes gate and up, and no residual");
  if (fusion.lora != nullptr) {
    check_lora_index(c, *fusion.lora);
    c.require(fusion.lora->single != nullptr, "adapters of several names are not fused");
  }
  return x_TK.shape.num_rows() == 0 || ctx.table->linear_fused(ctx, y_TN, x_TK, w, fusion);
}

bool attention_decode_fused(OpContext& ctx, TensorView out_BHD, const HeadInputs& in, const KvLayer& layer, const DecodeIndex& index,
                            ConstTensorView plan, float scale, std::int64_t window, ConstTensorView sinks_H) {
  if (ctx.table->attention_decode_fused == nullptr) return false;
  ShapeCheck c("attention_decode_fused", ctx);
  c.check("cache k", layer.k, "NB Hkv S D").check("cache v", layer.v, "NB Hkv S D", layer.k.dtype);
  c.contiguous("cache k", layer.k).contiguous("cache v", layer.v);
  c.check("context_len", index.context_len_B, "N", DType::kI32).check("block_table", index.block_table_BM, "N M", DType::kI32);
  c.contiguous("block_table", index.block_table_BM);
  const std::int64_t D = in.head_dim, Q = in.num_heads * D, K = in.num_kv_heads * D;
  c.check("qkv", in.qkv_TE, "N W", layer.k.dtype).check("out", out_BHD, "N Hq D", layer.k.dtype).contiguous("out", out_BHD);
  c.extent("W", Q + 2 * K, "num_heads, num_kv_heads")
      .extent("Hkv", in.num_kv_heads, "num_kv_heads")
      .extent("Hq", in.num_heads, "num_heads");
  c.extent("D", D, "head_dim").check("positions", in.positions_T, "N", DType::kI32).check("slot", index.slot_B, "N", DType::kI32);
  c.require(in.rope != nullptr && 2 * in.rope->num_pairs() <= D, "a rotary table of heads is wanted")
      .require(Q % K == 0, "Hq must be a multiple of Hkv");
  if (sinks_H.data != nullptr) c.check("sinks", sinks_H, "Hq", DType::kF32).contiguous("sinks", sinks_H);
  return ctx.table->attention_decode_fused(ctx, out_BHD, in, layer, index, plan, scale, window, sinks_H);
}

}  // namespace prl::ops
