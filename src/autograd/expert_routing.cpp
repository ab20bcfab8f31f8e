#include "autograd/expert_routing.hpp"

#include <cstddef>

#include "autograd/token_blocks.hpp"
#include "ops/experts.hpp"

namespace prl::autograd {

Routing route(Frame& frame, const Var& x_TH, const ExpertsParameter& p) {
  const std::int64_t T = x_TH.value.shape.num_rows(), E = p.router.weight->num_outputs(), K = p.num_active;
  const Routing r{.logits_TE = frame.keep({T, E}, DType::kF32),
                  .ids_TK = frame.keep({T, K}, DType::kI32),
                  .weights_TK = frame.keep({T, K}, DType::kF32),
                  .mass_T = frame.keep({T}, DType::kF32)};
  ops::linear(frame.ctx, r.logits_TE, x_TH.value, *p.router.weight);
  if (p.by_score)
    ops::route_by_score(frame.ctx, r.ids_TK, r.weights_TK, r.mass_T, r.logits_TE, p.score_bias_PE, *p.by_score, p.given_TK);
  else
    ops::route(frame.ctx, r.ids_TK, r.weights_TK, r.mass_T, r.logits_TE, p.renormalize, p.given_TK);
  if (p.log.log_SB.data != nullptr) ops::log_route(frame.ctx, p.log.log_SB, r.ids_TK, p.log.slot_T, p.log.first_entry);
  return r;
}

void count_load(Frame& frame, const ExpertsParameter& p, const Routing& routing, std::span<const std::int32_t> begin_of) {
  if (p.load == nullptr || frame.is_recompute) return;
  p.load->tokens_of_expert.resize(begin_of.size() - 1);
  for (std::size_t e = 0; e + 1 < begin_of.size(); ++e) p.load->tokens_of_expert[e] += begin_of[e + 1] - begin_of[e];
  for (const float of_token : download<float>(frame.ctx, routing.mass_T)) p.load->mass += static_cast<double>(of_token);
}

std::vector<const ops::LinearWeight*> matrices(std::span<const LinearParameter> of_experts) {
  std::vector<const ops::LinearWeight*> out;
  for (const LinearParameter& p : of_experts) out.push_back(p.weight);
  return out;
}

void form_weight_gradient(ops::OpContext& ctx, TensorView dw, ConstTensorView dy_M, ConstTensorView x_M, std::int64_t begin,
                          std::int64_t count, bool accumulate) {
  if (count > 0)
    ops::linear_backward_weight(ctx, dw, {}, dy_M.rows(begin, count), x_M.rows(begin, count), accumulate);
  else if (!accumulate)
    ctx.runtime->zero(dw.data, static_cast<std::size_t>(dw.shape.num_elements()) * sizeof(float));
}

void router_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, const ExpertsParameter& p, const Routing& r,
                     ConstTensorView dweights_TK, TensorView dx) {
  const TensorView dlogits_TE = tape.arena().take(r.logits_TE.shape, x_TH.value.dtype);
  if (p.by_score)
    ops::route_by_score_backward(ctx, dlogits_TE, dweights_TK, r.logits_TE, r.ids_TK, *p.by_score);
  else
    ops::route_backward(ctx, dlogits_TE, dweights_TK, r.logits_TE, r.ids_TK, r.weights_TK, p.renormalize);
  if (p.router.dw.data != nullptr && p.is_router_frozen) {
    form_weight_gradient(ctx, p.router.dw, dlogits_TE, x_TH.value, 0, 0, p.router.accumulate);
  } else if (p.router.dw.data != nullptr) {
    weight_backward(ctx, tape, p.router, dlogits_TE, x_TH.value);
  }
  if (dx.data != nullptr) ops::linear_backward_input(ctx, dx, dlogits_TE, *p.router.weight, true);
}

}  // namespace prl::autograd
