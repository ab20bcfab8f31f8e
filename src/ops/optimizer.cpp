#include "ops/optimizer.hpp"

#include "ops/op_table.hpp"
#include "ops/pointwise.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

void check_state(ShapeCheck& c, std::string_view name, const ConstTensorView& v) {
  c.check(name, v, "R C", DType::kF32).contiguous(name, v);
}

}  // namespace

void adamw(OpContext& ctx, TensorView param, TensorView m, TensorView v, ConstTensorView grad, const AdamWArgs& args, TensorView rounded) {
  ShapeCheck c("adamw", ctx);
  check_state(c, "param", param);
  c.check("m", m, "R C").contiguous("m", m).check("v", v, "R C", m.dtype).contiguous("v", v);
  c.require(m.dtype == DType::kF32 || m.dtype == DType::kBF16, "moments are fp32 or bf16");
  check_state(c, "grad", grad);
  c.require(args.step >= 1, "step counts from 1");
  if (rounded.data != nullptr) c.check("rounded", rounded, "R C").contiguous("rounded", rounded);
  if (param.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->adamw, "adamw")(ctx, param, m, v, grad, args, rounded);
}

void sgd(OpContext& ctx, TensorView param, TensorView buffer, ConstTensorView grad, const SgdArgs& args) {
  ShapeCheck c("sgd", ctx);
  check_state(c, "param", param);
  check_state(c, "grad", grad);
  if (args.momentum != 0.0f) check_state(c, "buffer", buffer);
  if (param.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->sgd, "sgd")(ctx, param, buffer, grad, args);
}

void sign_sgd(OpContext& ctx, TensorView param, ConstTensorView grad, float lr, float weight_decay) {
  ShapeCheck c("sign_sgd", ctx);
  check_state(c, "param", param);
  check_state(c, "grad", grad);
  if (param.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->sign_sgd, "sign_sgd")(ctx, param, grad, lr, weight_decay);
}

void muon(OpContext& ctx, TensorView param_NK, TensorView momentum_NK, ConstTensorView grad_NK, const MuonArgs& args) {
  ShapeCheck c("muon", ctx);
  check_state(c, "param", param_NK);
  check_state(c, "momentum", momentum_NK);
  check_state(c, "grad", grad_NK);
  c.require(param_NK.shape.num_dims() == 2, "Muon takes matrices");
  if (param_NK.shape.num_elements() == 0) return;
  table_entry(ctx, ctx.table->muon, "muon")(ctx, param_NK, momentum_NK, grad_NK, args);
}

}  // namespace prl::ops
