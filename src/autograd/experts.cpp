#include "autograd/experts.hpp"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "autograd/divided_experts.hpp"
#include "autograd/expert_routing.hpp"
#include "autograd/token_blocks.hpp"
#include "base/error.hpp"
#include "ops/experts.hpp"

// Legend: T tokens, H hidden, E experts, K experts of a token, M = T * K rows of experts, F width of an expert.

namespace prl::autograd {
namespace {

/// Where the tokens' rows lie when each expert has its own together: by expert, then by token.
struct Placement {
  Routing routing;
  std::vector<std::int32_t> begin_of;      ///< [E + 1], rows of M
  std::vector<std::int32_t> token_of_row;  ///< [M] where a part of an expert's rows may be asked for; else empty
  // On the device:
  TensorView begin_P;           ///< int32: begin_of
  TensorView token_M, slot_TK;  ///< int32: the token of a row; the row of a token's k-th expert
  TensorView weight_M;          ///< fp32
  std::int64_t rows_of(std::size_t expert) const { return begin_of[expert + 1] - begin_of[expert]; }
  /// The tokens of an expert's rows, which rise.
  std::span<const std::int32_t> tokens_of(std::size_t expert) const {
    return std::span(token_of_row).subspan(static_cast<std::size_t>(begin_of[expert]), static_cast<std::size_t>(rows_of(expert)));
  }
  /// The rows that an expert has of tokens [first, first + count): where they begin, and how many.
  std::pair<std::int64_t, std::int64_t> rows_within(std::size_t expert, std::int64_t first, std::int64_t count) const {
    if (count == slot_TK.shape.num_rows()) return {begin_of[expert], rows_of(expert)};
    const auto tokens = tokens_of(expert);
    const auto begin = std::ranges::lower_bound(tokens, first), end = std::ranges::lower_bound(tokens, first + count);
    return {begin_of[expert] + (begin - tokens.begin()), end - begin};
  }
};

bool has_adapters(std::span<const LinearParameter> of_experts) {
  return std::ranges::any_of(of_experts, [](const LinearParameter& p) { return p.lora != nullptr; });
}
/// Whether adapters are of some rows only.
bool has_adapters_of_rows(std::span<const LinearParameter> of_experts) {
  return std::ranges::any_of(of_experts, [](const LinearParameter& p) {
    return p.lora != nullptr &&
           std::ranges::any_of(p.lora->groups, [](const ops::LoraRows& group) { return group.rows.data() != nullptr; });
  });
}

std::shared_ptr<const Placement> place(Frame& frame, const Routing& routing, const ExpertsParameter& p) {
  ops::OpContext& ctx = frame.ctx;
  const std::int64_t T = routing.ids_TK.shape.num_rows(), E = p.router.weight->num_outputs(), K = p.num_active;
  auto placement = std::make_shared<Placement>();
  placement->routing = routing;
  placement->token_M = frame.keep({T * K}, DType::kI32);
  placement->weight_M = frame.keep({T * K}, DType::kF32);
  placement->slot_TK = frame.keep({T, K}, DType::kI32);
  placement->begin_P = frame.keep({E + 1}, DType::kI32);
  ops::place_rows(ctx, placement->begin_P, placement->token_M, placement->weight_M, placement->slot_TK, routing.ids_TK, routing.weights_TK);
  placement->begin_of = download<std::int32_t>(ctx, placement->begin_P);
  const bool is_in_parts = frame.tape != nullptr && frame.tape->num_token_blocks() > 1;
  if (is_in_parts || has_adapters_of_rows(p.gate_up) || has_adapters_of_rows(p.down))
    placement->token_of_row = download<std::int32_t>(ctx, placement->token_M);

  count_load(frame, p, routing, placement->begin_of);
  return placement;
}

/// factor * what goes into an expert's `down`.
void activate(ops::OpContext& ctx, TensorView out_MF, ConstTensorView gate_up_M2F, ConstTensorView factors_M, const ExpertsParameter& p) {
  if (p.clamped) return ops::clamped_swiglu(ctx, out_MF, gate_up_M2F, factors_M, *p.clamped);
  if (p.is_squared) return ops::squared_relu(ctx, out_MF, gate_up_M2F, factors_M);
  ops::swiglu_rows(ctx, out_MF, gate_up_M2F, factors_M);
}
void activate_backward(ops::OpContext& ctx, TensorView dgate_up_M2F, TensorView dfactors_M, ConstTensorView dout_MF,
                       ConstTensorView gate_up_M2F, ConstTensorView factors_M, const ExpertsParameter& p) {
  if (p.clamped) return ops::clamped_swiglu_backward(ctx, dgate_up_M2F, dfactors_M, dout_MF, gate_up_M2F, factors_M, *p.clamped);
  if (p.is_squared) return ops::squared_relu_backward(ctx, dgate_up_M2F, dfactors_M, dout_MF, gate_up_M2F, factors_M);
  ops::swiglu_rows_backward(ctx, dgate_up_M2F, dfactors_M, dout_MF, gate_up_M2F, factors_M);
}

/// What experts' biases add to rows that are multiplied with `factors_M` (no data: with 1).
void add_biases(ops::OpContext& ctx, TensorView y_MN, ConstTensorView biases_V, const Placement& placement, ConstTensorView factors_M) {
  if (biases_V.data != nullptr) ops::add_expert_biases(ctx, y_MN, biases_V, placement.begin_P, factors_M);
}
void run_bias_gradients(ops::OpContext& ctx, Tape& tape, TensorView dbiases_V, ConstTensorView dy_MN, const Placement& placement,
                        ConstTensorView factors_M, std::int64_t num_tokens) {
  if (dbiases_V.data == nullptr) return;
  sum_over_blocks(ctx, tape.arena(), {.outs = std::span(&dbiases_V, 1)}, num_tokens, tape.num_token_blocks(),
                  [&](std::int64_t first_token, std::int64_t num, std::span<const TensorView> to, bool) {
                    ops::expert_biases_backward(ctx, to[0], dy_MN, placement.begin_P, placement.token_M, factors_M, {first_token, num});
                  });
}

/// Rows of an expert, counted from its first, whose tokens are among `tokens` (rising).
std::vector<std::int32_t> rows_of_tokens(const Placement& placement, std::size_t expert, std::span<const std::int32_t> tokens) {
  std::vector<std::int32_t> rows;
  const std::span<const std::int32_t> of_expert = placement.tokens_of(expert);
  for (std::size_t row = 0; row < of_expert.size(); ++row)
    if (std::ranges::binary_search(tokens, of_expert[row])) rows.push_back(static_cast<std::int32_t>(row));
  return rows;
}

/// What adapters add to the product of one expert, for its rows.
void add_adapters(ops::OpContext& ctx, TensorView y, ConstTensorView x, const LoraParameter& lora, const Placement& placement,
                  std::size_t expert) {
  PRL_CHECK(!lora.index && lora.dropout.probability == 0, "adapters of experts come in groups, without dropout");
  std::vector<ops::LoraRows> groups;
  std::vector<std::vector<std::int32_t>> rows;
  rows.reserve(lora.groups.size());
  for (const ops::LoraRows& group : lora.groups) {
    if (group.rows.data() == nullptr) {
      groups.push_back(group);
      continue;
    }
    rows.push_back(rows_of_tokens(placement, expert, group.rows));
    if (!rows.back().empty()) groups.push_back({group.weight, rows.back()});
  }
  if (!groups.empty()) ops::add_lora(ctx, y, x, groups);
}

/// The adapters of all experts, where each of these has one for all its rows; else none.
std::vector<const ops::LoraWeight*> whole_adapters(std::span<const LinearParameter> of_experts) {
  std::vector<const ops::LoraWeight*> adapters;
  for (const LinearParameter& p : of_experts) {
    if (p.lora == nullptr || p.lora->index || p.lora->groups.size() != 1 || p.lora->groups.front().rows.data() != nullptr ||
        p.lora->dropout.probability != 0)
      return {};
    adapters.push_back(p.lora->groups.front().weight);
  }
  return adapters;
}

/// y = x W^T and what adapters add.
void run_products(ops::OpContext& ctx, TensorView y_M, ConstTensorView x_M, std::span<const LinearParameter> of_experts,
                  const Placement& placement) {
  const bool is_grouped = ops::grouped_linear(ctx, y_M, x_M, matrices(of_experts), placement.begin_P);
  const std::vector<const ops::LoraWeight*> adapters = is_grouped ? whole_adapters(of_experts) : std::vector<const ops::LoraWeight*>();
  if (!adapters.empty() && ops::add_grouped_lora(ctx, y_M, x_M, adapters, placement.begin_of)) return;
  for (std::size_t e = 0; e < of_experts.size(); ++e) {
    const std::int64_t count = placement.rows_of(e);
    if (count == 0 || (is_grouped && of_experts[e].lora == nullptr)) continue;
    const TensorView y = y_M.rows(placement.begin_of[e], count);
    const ConstTensorView x = x_M.rows(placement.begin_of[e], count);
    if (!is_grouped) ops::linear(ctx, y, x, *of_experts[e].weight);
    if (of_experts[e].lora != nullptr) add_adapters(ctx, y, x, *of_experts[e].lora, placement, e);
  }
}
void run_input_gradients(ops::OpContext& ctx, TensorView dx_M, ConstTensorView dy_M, std::span<const LinearParameter> of_experts,
                         const Placement& placement) {
  if (ops::grouped_linear_backward_input(ctx, dx_M, dy_M, matrices(of_experts), placement.begin_P)) return;
  for (std::size_t e = 0; e < of_experts.size(); ++e)
    if (const std::int64_t count = placement.rows_of(e); count > 0)
      ops::linear_backward_input(ctx, dx_M.rows(placement.begin_of[e], count), dy_M.rows(placement.begin_of[e], count),
                                 *of_experts[e].weight, false);
}

void run_weight_gradients(ops::OpContext& ctx, Tape& tape, ConstTensorView dy_M, ConstTensorView x_M,
                          std::span<const LinearParameter> of_experts, const Placement& placement, std::int64_t num_tokens) {
  if (tape.num_token_blocks() == 1) {
    std::vector<TensorView> dw;
    for (const LinearParameter& p : of_experts) dw.push_back(p.dw);
    if (ops::grouped_linear_backward_weight(ctx, dw, dy_M, x_M, placement.begin_P, of_experts.front().accumulate)) return;
  }
  for (std::size_t e = 0; e < of_experts.size(); ++e) {
    const LinearParameter& p = of_experts[e];
    if (p.dw.data == nullptr) continue;
    sum_over_blocks(ctx, tape.arena(), {.outs = std::span(&p.dw, 1), .accumulate = p.accumulate, .can_overwrite = true}, num_tokens,
                    tape.num_token_blocks(),
                    [&](std::int64_t first_token, std::int64_t num, std::span<const TensorView> to, bool accumulate) {
                      const auto [begin, count] = placement.rows_within(e, first_token, num);
                      form_weight_gradient(ctx, to[0], dy_M, x_M, begin, count, accumulate);
                    });
  }
}

std::optional<ops::BiasedExperts> biased_of(const ExpertsParameter& p) {
  if (!p.clamped) return std::nullopt;
  return ops::BiasedExperts{.gate = *p.clamped, .gate_up_V = p.gate_up_biases_V, .down_V = p.down_biases_V};
}

bool has_adapter_gradients(std::span<const LinearParameter> of_experts) {
  return std::ranges::any_of(of_experts, [](const LinearParameter& p) { return p.lora != nullptr && p.lora->da.data != nullptr; });
}

/// run_adapter_gradients() of all experts at once; false, and nothing is done, where they are not alike.
bool run_whole_adapter_gradients(ops::OpContext& ctx, const Tape& tape, TensorView dx_M, ConstTensorView dy_M, ConstTensorView x_M,
                                 std::span<const LinearParameter> of_experts, const Placement& placement) {
  const std::vector<const ops::LoraWeight*> adapters = whole_adapters(of_experts);
  if (adapters.empty() || tape.num_token_blocks() != 1) return false;
  std::vector<TensorView> da, db;
  for (const LinearParameter& p : of_experts) {
    if (p.lora->da.data == nullptr || p.lora->accumulate != of_experts.front().lora->accumulate) return false;
    da.push_back(p.lora->da);
    db.insert(db.end(), p.lora->db.begin(), p.lora->db.end());
  }
  return ops::grouped_lora_backward(ctx, dx_M, da, db, dy_M, x_M, adapters, placement.begin_of, true, of_experts.front().lora->accumulate);
}

/// Gradients of the experts' adapters, and what reaches their rows of x through them: added to dx_M, unless its data is nullptr.
void run_adapter_gradients(ops::OpContext& ctx, Tape& tape, TensorView dx_M, ConstTensorView dy_M, ConstTensorView x_M,
                           std::span<const LinearParameter> of_experts, const Placement& placement, std::int64_t num_tokens) {
  if (run_whole_adapter_gradients(ctx, tape, dx_M, dy_M, x_M, of_experts, placement)) return;
  for (std::size_t e = 0; e < of_experts.size(); ++e) {
    if (of_experts[e].lora == nullptr || of_experts[e].lora->da.data == nullptr) continue;
    const LoraParameter& p = *of_experts[e].lora;
    std::vector<TensorView> outs{p.da};
    outs.insert(outs.end(), p.db.begin(), p.db.end());
    sum_over_blocks(ctx, tape.arena(), {.outs = outs, .accumulate = p.accumulate, .can_overwrite = true}, num_tokens,
                    tape.num_token_blocks(),
                    [&](std::int64_t first_token, std::int64_t num, std::span<const TensorView> to, bool accumulate) {
                      const auto [begin, count] = placement.rows_within(e, first_token, num);
                      if (count == 0) {
                        for (const TensorView& out : to)
                          if (!accumulate) ctx.runtime->zero(out.data, static_cast<std::size_t>(out.shape.num_elements()) * sizeof(float));
                        return;
                      }
                      ops::lora_backward(ctx, dx_M.data != nullptr ? dx_M.rows(begin, count) : TensorView{}, to[0], to.subspan(1),
                                         dy_M.rows(begin, count), x_M.rows(begin, count), *p.groups.front().weight, true, accumulate);
                    });
  }
}

/// Outputs of the matrix before the activation for each number that goes into `down`.
std::int64_t outputs_of_number(const ExpertsParameter& p) { return p.is_squared ? 1 : 2; }

/// Of a router whose rows no expert has.
void router_alone_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, const ExpertsParameter& p, const Routing& routing,
                           ConstTensorView dweights_TK) {
  const Tape::Target dx = x_TH.id >= 0 ? tape.target(x_TH) : Tape::Target{};
  if (dx.view.data != nullptr && !dx.accumulate)
    ctx.runtime->zero(dx.view.data, static_cast<std::size_t>(dx.view.shape.num_elements()) * size_of(dx.view.dtype));
  router_backward(ctx, tape, x_TH, p, routing, dweights_TK, dx.view);
}

/// `x_TH`: of the router; `in_TH`: of the experts, perhaps the same.
void experts_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, const Var& in_TH, ConstTensorView dy_TH,
                      ConstTensorView gate_up_M2F, const ExpertsParameter& p, const Placement& placement) {
  const std::int64_t M = gate_up_M2F.shape.num_rows(), G = gate_up_M2F.shape.num_cols(), F = G / outputs_of_number(p);
  const std::int64_t T = in_TH.value.shape.num_rows(), H = in_TH.value.shape.num_cols();
  const DType dtype = in_TH.value.dtype;
  const Tape::Target dx = in_TH.id >= 0 ? tape.target(in_TH) : Tape::Target{};
  Arena& arena = tape.arena();
  const Arena::Mark mark = arena.mark();
  const TensorView dhidden_MF = arena.take({M, F}, dtype), rows_MH = arena.take({M, H}, dtype);
  const TensorView dgate_up_M2F = arena.take({M, G}, dtype);
  ops::embedding(ctx, rows_MH, dy_TH, placement.token_M);
  {
    const TensorView hidden_MF = dgate_up_M2F.reshaped({M * G / F, F}).rows(0, M);  // before its own values come
    activate(ctx, hidden_MF, gate_up_M2F, placement.weight_M, p);
    run_bias_gradients(ctx, tape, p.ddown_biases_V, rows_MH, placement, placement.weight_M, T);
    run_weight_gradients(ctx, tape, rows_MH, hidden_MF, p.down, placement, T);
    run_input_gradients(ctx, dhidden_MF, rows_MH, p.down, placement);
    run_adapter_gradients(ctx, tape, dhidden_MF, rows_MH, hidden_MF, p.down, placement, T);
  }
  const TensorView dweight_M = arena.take({M}, DType::kF32), dweights_TK = arena.take(placement.routing.weights_TK.shape, DType::kF32);
  activate_backward(ctx, dgate_up_M2F, dweight_M, dhidden_MF, gate_up_M2F, placement.weight_M, p);
  if (p.down_biases_V.data != nullptr) ops::add_bias_dots(ctx, dweight_M, rows_MH, p.down_biases_V, placement.begin_P);
  run_bias_gradients(ctx, tape, p.dgate_up_biases_V, dgate_up_M2F, placement, {}, T);
  ops::embedding(ctx, column(dweights_TK), column(dweight_M), flat(placement.slot_TK));
  ops::embedding(ctx, rows_MH, in_TH.value, placement.token_M);
  run_weight_gradients(ctx, tape, dgate_up_M2F, rows_MH, p.gate_up, placement, T);
  // Where adapters are trained their rows of x are read beside the gradients.
  const bool is_adapted = has_adapter_gradients(p.gate_up);
  const TensorView drows_MH = dx.view.data == nullptr ? TensorView{} : is_adapted ? arena.take({M, H}, dtype) : rows_MH;
  if (dx.view.data != nullptr) run_input_gradients(ctx, drows_MH, dgate_up_M2F, p.gate_up, placement);
  if (is_adapted) run_adapter_gradients(ctx, tape, drows_MH, dgate_up_M2F, rows_MH, p.gate_up, placement, T);
  if (dx.view.data != nullptr) ops::sum_rows(ctx, dx.view, drows_MH, placement.slot_TK, dx.accumulate);
  if (in_TH.value.data != x_TH.value.data)
    router_alone_backward(ctx, tape, x_TH, p, placement.routing, dweights_TK);
  else
    router_backward(ctx, tape, x_TH, p, placement.routing, dweights_TK, dx.view);
  arena.release(mark);
}

}  // namespace

Var gated_swiglu(Frame& frame, const Var& gate_up_T2F, const Var& x_TH, const VectorParameter& gate) {
  const std::int64_t T = gate_up_T2F.value.shape.num_rows(), F = gate_up_T2F.value.shape.num_cols() / 2;
  const TensorView gates_T = frame.keep({T}, DType::kF32);
  ops::row_gates(frame.ctx, gates_T, x_TH.value, gate.value);
  const Var y = frame.variable(frame.take({T, F}, gate_up_T2F.value.dtype));
  frame.run([ctx = &frame.ctx, y = y.value, x = gate_up_T2F.value, gates_T] { ops::swiglu_rows(*ctx, y, x, gates_T); });
  if (frame.tape == nullptr) return y;
  frame.tape->record([tape = frame.tape, ctx = &frame.ctx, gate_up_T2F, x_TH, gate, gates_T, y, T] {
    const TensorView dy = tape->grad(y);
    if (dy.data == nullptr) return;
    const Tape::Target dgate_up = tape->target(gate_up_T2F), dx = x_TH.id >= 0 ? tape->target(x_TH) : Tape::Target{};
    PRL_CHECK(!dgate_up.accumulate, "gate and up of an expert have one reader");
    Arena& arena = tape->arena();
    const Arena::Mark mark = arena.mark();
    const TensorView dgates_T = arena.take({T}, DType::kF32);
    ops::swiglu_rows_backward(*ctx, dgate_up.view, dgates_T, dy, gate_up_T2F.value, gates_T);
    sum_over_blocks(*ctx, arena, {.outs = std::span(&gate.grad, 1)}, T, tape->num_token_blocks(),
                    [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool) {
                      ops::row_gates_backward(*ctx, dx.view.data != nullptr ? dx.view.rows(begin, count) : TensorView{}, to[0],
                                              part_of_vector(dgates_T, begin, count), part_of_vector(gates_T, begin, count),
                                              x_TH.value.rows(begin, count), gate.value, dx.accumulate);
                    });
    arena.release(mark);
  });
  return y;
}

bool can_record_experts(ops::OpContext& ctx, std::int64_t num_tokens, const ExpertsParameter& p) {
  if (has_adapters(p.gate_up) || has_adapters(p.down)) return false;
  const std::vector<const ops::LinearWeight*> gate_up = matrices(p.gate_up), down = matrices(p.down);
  const std::optional<ops::BiasedExperts> biased = biased_of(p);
  return ops::can_mix_experts(ctx, num_tokens, p.num_active, {gate_up, down, biased ? &*biased : nullptr, p.is_squared});
}

Var experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out, bool is_block_output, const Var& of_experts) {
  const Var& in_TH = of_experts.value.data != nullptr ? of_experts : x_TH;
  if (p.ranks != nullptr || p.share.size > 1) {
    PRL_CHECK(!p.is_squared && of_experts.value.data == nullptr, "ranks divide experts with gates, of the rows that their router has");
    return divided_experts(frame, x_TH, p, out, is_block_output);
  }
  const bool is_shared = p.shared.group != nullptr;
  PRL_CHECK(!is_shared || (frame.tape == nullptr && p.load == nullptr), "devices that share layers compute no gradients");
  const std::int64_t T = in_TH.value.shape.num_rows(), H = in_TH.value.shape.num_cols(), M = T * p.num_active;
  // Of this device: those that share layers have some outputs of every matrix each, and all of them the same rows.
  const std::int64_t G = p.gate_up.front().weight->num_outputs(), F = G / outputs_of_number(p),
                     num_outputs = p.down.front().weight->num_outputs();
  const DType dtype = x_TH.value.dtype;
  ops::OpContext& ctx = frame.ctx;
  const auto whole = [&](TensorView part) { return is_shared ? p.shared.group->gather(ctx, p.shared.rank, part) : part; };
  const Var y = frame.variable(out.data != nullptr && !is_shared ? out : frame.keep({T, num_outputs}, dtype));
  const Routing routing = route(frame, x_TH, p);
  // Without an answer to wait for. Nobody asks for the load where there is no tape.
  if (frame.tape == nullptr && p.load == nullptr && !has_adapters(p.gate_up) && !has_adapters(p.down)) {
    const std::vector<const ops::LinearWeight*> gate_up = matrices(p.gate_up), down = matrices(p.down);
    const std::optional<ops::BiasedExperts> biased = biased_of(p);
    const ops::ExpertMatrices of_all{gate_up, down, biased ? &*biased : nullptr, p.is_squared};
    if (ops::mix_experts(ctx, y.value, in_TH.value, routing.ids_TK, routing.weights_TK, of_all, p.shared))
      return is_shared ? Var{whole(y.value)} : y;
  }
  const std::shared_ptr<const Placement> placement = place(frame, routing, p);
  const TensorView gate_up_M2F = frame.take({M, G}, dtype);
  // Scratch memory lies where that of the backward pass does: not among what a layer saves.
  Arena& scratch = frame.tape != nullptr ? frame.tape->arena() : frame.arena;
  const Arena::Mark mark = scratch.mark();
  const TensorView rows_MH = scratch.take({M, H}, dtype);
  const auto run_gate_up = [ctx = &ctx, x = in_TH.value, gate_up_M2F, p, placement](TensorView rows) {
    ops::embedding(*ctx, rows, x, placement->token_M);
    run_products(*ctx, gate_up_M2F, rows, p.gate_up, *placement);
    add_biases(*ctx, gate_up_M2F, p.gate_up_biases_V, *placement, {});
  };
  run_gate_up(rows_MH);
  if (frame.remake != nullptr) {
    frame.remake->add([run_gate_up, &scratch, shape = rows_MH.shape, dtype] {
      const Arena::Mark before = scratch.mark();
      run_gate_up(scratch.take(shape, dtype));
      scratch.release(before);
    });
  }
  if (!(is_block_output && frame.is_recompute)) {
    const TensorView hidden_MF = scratch.take({M, F}, dtype);
    activate(ctx, hidden_MF, gate_up_M2F, placement->weight_M, p);
    const TensorView down_M = is_shared ? scratch.take({M, num_outputs}, dtype) : rows_MH;
    run_products(ctx, down_M, whole(hidden_MF), p.down, *placement);
    add_biases(ctx, down_M, p.down_biases_V, *placement, placement->weight_M);
    ops::sum_rows(ctx, y.value, down_M, placement->slot_TK, false);
  }
  scratch.release(mark);
  if (is_shared) return {whole(y.value)};
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &ctx, x_TH, in_TH, y, gate_up_M2F, p, placement] {
      if (const TensorView dy = tape->grad(y); dy.data != nullptr)
        experts_backward(*ctx, *tape, x_TH, in_TH, dy, gate_up_M2F, p, *placement);
    });
  }
  return y;
}

}  // namespace prl::autograd
