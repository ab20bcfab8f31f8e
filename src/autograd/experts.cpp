#include "autograd/experts.hpp"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "autograd/token_blocks.hpp"
#include "base/error.hpp"
#include "ops/experts.hpp"

// Legend: T tokens, H hidden, E experts, K experts of a token, M = T * K rows of experts, F width of an expert. N: the rows that this rank
// computes, which are M unless ranks divide the experts.

namespace prl::autograd {
namespace {

/// Which experts a token has, on the device.
struct Routing {
  TensorView logits_TE, ids_TK, weights_TK, mass_T;
};

/// Rows of this rank's tokens that go to the ranks of their experts, and rows that come from those of theirs.
struct Travel {
  ExpertRanks* ranks = nullptr;  ///< nullptr: nobody is there, and rows stay
  std::vector<std::int64_t> sent, received;
};

/// Where the tokens' rows lie when each expert has its own together: by expert, then by token. Those that this rank computes lie by the rank
/// that they came from first, if ranks divide the experts.
struct Placement {
  Routing routing;
  std::optional<Travel> travel;
  std::vector<std::int32_t> begin_of;      ///< [groups + 1], rows of N: groups of each expert, or of each rank and each of its experts
  std::vector<std::int32_t> token_of_row;  ///< [M] where a part of an expert's rows may be asked for; else empty
  // On the device:
  TensorView begin_P;           ///< int32: begin_of
  TensorView token_M, slot_TK;  ///< int32: the token of a row; the row of a token's k-th expert
  TensorView weight_N;          ///< fp32
  std::int64_t num_rows() const { return begin_of.back(); }
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

/// As a table of one column, to gather numbers with.
TensorView column(TensorView numbers) { return numbers.reshaped({numbers.shape.num_elements(), 1}); }
TensorView flat(TensorView view) { return view.reshaped({view.shape.num_elements()}); }

template <typename T>
std::vector<T> download(ops::OpContext& ctx, ConstTensorView view) {
  std::vector<T> out(static_cast<std::size_t>(view.shape.num_elements()));
  ctx.runtime->copy_to_host(out.data(), view.data, out.size() * sizeof(T));
  return out;
}

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

/// From every rank or to it, counts[r] of its rows after those of rank r - 1.
template <typename View>
std::vector<View> rows_of_ranks(View rows, std::span<const std::int64_t> counts) {
  std::vector<View> parts;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    parts.push_back(rows.rows(begin, count));
    begin += count;
  }
  return parts;
}

/// Rows of M to where they are computed.
void send_rows(ops::OpContext& ctx, TensorView out_N, ConstTensorView in_M, const Travel& travel) {
  if (travel.ranks != nullptr) return travel.ranks->all_to_all(rows_of_ranks(out_N, travel.received), rows_of_ranks(in_M, travel.sent));
  ctx.runtime->copy_within(out_N.data, in_M.data, static_cast<std::size_t>(in_M.shape.num_elements()) * size_of(in_M.dtype));
}
/// And back.
void return_rows(ops::OpContext& ctx, TensorView out_M, ConstTensorView in_N, const Travel& travel) {
  if (travel.ranks != nullptr) return travel.ranks->all_to_all(rows_of_ranks(out_M, travel.sent), rows_of_ranks(in_N, travel.received));
  ctx.runtime->copy_within(out_M.data, in_N.data, static_cast<std::size_t>(in_N.shape.num_elements()) * size_of(in_N.dtype));
}

/// The rows of x that are computed here, of each of its experts.
void gather_rows(ops::OpContext& ctx, Arena& arena, TensorView out_NH, ConstTensorView x_TH, const Placement& placement) {
  if (!placement.travel) return ops::embedding(ctx, out_NH, x_TH, placement.token_M);
  const Arena::Mark mark = arena.mark();
  const TensorView rows_MH = arena.take({placement.token_M.shape.num_elements(), x_TH.shape.num_cols()}, x_TH.dtype);
  ops::embedding(ctx, rows_MH, x_TH, placement.token_M);
  send_rows(ctx, out_NH, rows_MH, *placement.travel);
  arena.release(mark);
}
/// out_TH = the sums over each token's experts of rows that were computed here.
void sum_to_tokens(ops::OpContext& ctx, Arena& arena, TensorView out_TH, ConstTensorView rows_NH, const Placement& placement,
                   bool accumulate) {
  if (!placement.travel) return ops::sum_rows(ctx, out_TH, rows_NH, placement.slot_TK, accumulate);
  const Arena::Mark mark = arena.mark();
  const TensorView rows_MH = arena.take({placement.token_M.shape.num_elements(), out_TH.shape.num_cols()}, out_TH.dtype);
  return_rows(ctx, rows_MH, rows_NH, *placement.travel);
  ops::sum_rows(ctx, out_TH, rows_MH, placement.slot_TK, accumulate);
  arena.release(mark);
}

/// Where each rank's rows of each expert begin among its own, [R][E + 1], and this rank's.
std::vector<std::vector<std::int32_t>> begins_of_ranks(Frame& frame, const TensorView& begin_P, const ExpertsParameter& p) {
  const std::int64_t R = p.num_ranks, P = begin_P.shape.num_elements();
  std::vector<std::vector<std::int32_t>> begins;
  if (p.ranks == nullptr) {
    begins.push_back(download<std::int32_t>(frame.ctx, begin_P));
    return begins;
  }
  const TensorView all_RP = frame.keep({R, P}, DType::kI32);
  p.ranks->all_gather(all_RP, begin_P);
  const std::vector<std::int32_t> all = download<std::int32_t>(frame.ctx, all_RP);
  for (std::int64_t r = 0; r < R; ++r) begins.emplace_back(all.begin() + r * P, all.begin() + (r + 1) * P);
  return begins;
}

/// Sets where rows go, and the groups of those that come. `own`: where this rank's rows of each expert begin.
void place_travelling(Frame& frame, Placement& placement, TensorView weight_M, std::span<const std::vector<std::int32_t>> begins,
                      std::span<const std::int32_t> own, const ExpertsParameter& p) {
  const auto E = static_cast<std::int64_t>(own.size()) - 1, mine = static_cast<std::int64_t>(p.gate_up.size());
  const auto first_of = [&](int rank) { return static_cast<std::size_t>(E * rank / p.num_ranks); };
  Travel travel{p.ranks, {}, {}};
  placement.begin_of.push_back(0);
  for (int r = 0; r < p.num_ranks; ++r) {
    travel.sent.push_back(own[first_of(r + 1)] - own[first_of(r)]);
    // What comes from rank r for this rank's experts; if nobody is there, what would go to rank r, its last experts as one.
    const std::vector<std::int32_t>& begin_of = begins[p.ranks != nullptr ? static_cast<std::size_t>(r) : 0];
    const std::size_t first = first_of(p.ranks != nullptr ? p.rank : r), end = first_of((p.ranks != nullptr ? p.rank : r) + 1);
    const std::int32_t before = placement.begin_of.back() - begin_of[first];
    for (std::int64_t e = 1; e <= mine; ++e)
      placement.begin_of.push_back(before + begin_of[e == mine ? end : std::min(first + static_cast<std::size_t>(e), end)]);
    travel.received.push_back(begin_of[end] - begin_of[first]);
  }
  placement.begin_P = frame.keep({static_cast<std::int64_t>(placement.begin_of.size())}, DType::kI32);
  frame.ctx.runtime->copy_from_host(placement.begin_P.data, placement.begin_of.data(), placement.begin_of.size() * sizeof(std::int32_t));
  placement.weight_N = frame.keep({placement.num_rows()}, DType::kF32);
  send_rows(frame.ctx, column(placement.weight_N), column(weight_M), travel);
  placement.travel = std::move(travel);
}

std::shared_ptr<const Placement> place(Frame& frame, const Routing& routing, const ExpertsParameter& p) {
  ops::OpContext& ctx = frame.ctx;
  const std::int64_t T = routing.ids_TK.shape.num_rows(), E = p.router.weight->num_outputs(), K = p.num_active;
  auto placement = std::make_shared<Placement>();
  placement->routing = routing;
  placement->token_M = frame.keep({T * K}, DType::kI32);
  placement->weight_N = frame.keep({T * K}, DType::kF32);
  placement->slot_TK = frame.keep({T, K}, DType::kI32);
  placement->begin_P = frame.keep({E + 1}, DType::kI32);
  ops::place_rows(ctx, placement->begin_P, placement->token_M, placement->weight_N, placement->slot_TK, routing.ids_TK, routing.weights_TK);
  const bool is_in_parts = frame.tape != nullptr && frame.tape->num_token_blocks() > 1;
  std::vector<std::int32_t> own;
  if (p.num_ranks > 1 || p.ranks != nullptr) {
    PRL_CHECK(!is_in_parts && !p.clamped && !has_adapters(p.gate_up) && !has_adapters(p.down), "experts that ranks cannot divide");
    const std::vector<std::vector<std::int32_t>> begins = begins_of_ranks(frame, placement->begin_P, p);
    own = begins[p.ranks != nullptr ? static_cast<std::size_t>(p.rank) : 0];
    place_travelling(frame, *placement, placement->weight_N, begins, own, p);
  } else {
    own = placement->begin_of = download<std::int32_t>(ctx, placement->begin_P);
  }
  if (is_in_parts || has_adapters_of_rows(p.gate_up) || has_adapters_of_rows(p.down))
    placement->token_of_row = download<std::int32_t>(ctx, placement->token_M);

  if (p.load != nullptr && !frame.is_recompute) {
    p.load->tokens_of_expert.resize(static_cast<std::size_t>(E));
    for (std::size_t e = 0; e < static_cast<std::size_t>(E); ++e) p.load->tokens_of_expert[e] += own[e + 1] - own[e];
    for (const float of_token : download<float>(ctx, routing.mass_T)) p.load->mass += static_cast<double>(of_token);
  }
  return placement;
}

/// factor * what goes into an expert's `down`.
void activate(ops::OpContext& ctx, TensorView out_MF, ConstTensorView gate_up_M2F, ConstTensorView factors_M, const ExpertsParameter& p) {
  if (p.clamped) return ops::clamped_swiglu(ctx, out_MF, gate_up_M2F, factors_M, *p.clamped);
  ops::swiglu_rows(ctx, out_MF, gate_up_M2F, factors_M);
}
void activate_backward(ops::OpContext& ctx, TensorView dgate_up_M2F, TensorView dfactors_M, ConstTensorView dout_MF,
                       ConstTensorView gate_up_M2F, ConstTensorView factors_M, const ExpertsParameter& p) {
  if (p.clamped) return ops::clamped_swiglu_backward(ctx, dgate_up_M2F, dfactors_M, dout_MF, gate_up_M2F, factors_M, *p.clamped);
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

std::vector<const ops::LinearWeight*> matrices(std::span<const LinearParameter> of_experts) {
  std::vector<const ops::LinearWeight*> out;
  for (const LinearParameter& p : of_experts) out.push_back(p.weight);
  return out;
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

/// y = x W^T and what adapters add.
void run_products(ops::OpContext& ctx, TensorView y_N, ConstTensorView x_N, std::span<const LinearParameter> of_experts,
                  const Placement& placement) {
  const bool is_grouped = ops::grouped_linear(ctx, y_N, x_N, matrices(of_experts), placement.begin_P);
  for (std::size_t g = 0; g + 1 < placement.begin_of.size(); ++g) {
    const LinearParameter& of_expert = of_experts[g % of_experts.size()];
    const std::int64_t count = placement.rows_of(g);
    if (count == 0 || (is_grouped && of_expert.lora == nullptr)) continue;
    const TensorView y = y_N.rows(placement.begin_of[g], count);
    const ConstTensorView x = x_N.rows(placement.begin_of[g], count);
    if (!is_grouped) ops::linear(ctx, y, x, *of_expert.weight);
    if (of_expert.lora != nullptr) add_adapters(ctx, y, x, *of_expert.lora, placement, g);
  }
}
void run_input_gradients(ops::OpContext& ctx, TensorView dx_N, ConstTensorView dy_N, std::span<const LinearParameter> of_experts,
                         const Placement& placement) {
  if (ops::grouped_linear_backward_input(ctx, dx_N, dy_N, matrices(of_experts), placement.begin_P)) return;
  for (std::size_t g = 0; g + 1 < placement.begin_of.size(); ++g)
    if (const std::int64_t count = placement.rows_of(g); count > 0)
      ops::linear_backward_input(ctx, dx_N.rows(placement.begin_of[g], count), dy_N.rows(placement.begin_of[g], count),
                                 *of_experts[g % of_experts.size()].weight, false);
}

/// Rows [begin, begin + count) of M into one expert's gradient, which is 0 without rows.
void form_weight_gradient(ops::OpContext& ctx, TensorView dw, ConstTensorView dy_M, ConstTensorView x_M, std::int64_t begin,
                          std::int64_t count, bool accumulate) {
  if (count > 0)
    ops::linear_backward_weight(ctx, dw, {}, dy_M.rows(begin, count), x_M.rows(begin, count), accumulate);
  else if (!accumulate)
    ctx.runtime->zero(dw.data, static_cast<std::size_t>(dw.shape.num_elements()) * sizeof(float));
}

/// A leaf for the rows of each rank.
void run_leaves_of_ranks(ops::OpContext& ctx, ConstTensorView dy_N, ConstTensorView x_N, std::span<const LinearParameter> of_experts,
                         std::span<const TensorView> dw, const Placement& placement) {
  const ExpertRanks* const ranks = placement.travel->ranks;
  if (ranks == nullptr || of_experts.front().dw.data == nullptr) return;
  const ExpertRanks::Leaves leaves = ranks->leaves();
  const std::size_t num_experts = of_experts.size();
  for (int r = 0; r < leaves.num_active; ++r) {
    const bool accumulate = r > 0 || !leaves.is_first;
    const std::size_t first_group = static_cast<std::size_t>(r) * num_experts;
    const TensorView begin_P = placement.begin_P.reshaped({placement.begin_P.shape.num_elements(), 1})
                                   .rows(static_cast<std::int64_t>(first_group), static_cast<std::int64_t>(num_experts) + 1);
    if (ops::grouped_linear_backward_weight(ctx, dw, dy_N, x_N, flat(begin_P), accumulate)) continue;
    for (std::size_t e = 0; e < num_experts; ++e)
      form_weight_gradient(ctx, dw[e], dy_N, x_N, placement.begin_of[first_group + e], placement.rows_of(first_group + e), accumulate);
  }
}

void run_weight_gradients(ops::OpContext& ctx, Tape& tape, ConstTensorView dy_M, ConstTensorView x_M,
                          std::span<const LinearParameter> of_experts, const Placement& placement, std::int64_t num_tokens) {
  std::vector<TensorView> dw;
  for (const LinearParameter& p : of_experts) dw.push_back(p.dw);
  if (placement.travel) return run_leaves_of_ranks(ctx, dy_M, x_M, of_experts, dw, placement);
  if (tape.num_token_blocks() == 1) {
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

/// Gradients of the experts' adapters, and what reaches their rows of x through them: added to dx_M, unless its data is nullptr.
void run_adapter_gradients(ops::OpContext& ctx, Tape& tape, TensorView dx_M, ConstTensorView dy_M, ConstTensorView x_M,
                           std::span<const LinearParameter> of_experts, const Placement& placement, std::int64_t num_tokens) {
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

/// Gradients of the router, and what reaches x through it.
void router_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, const ExpertsParameter& p, const Placement& placement,
                     ConstTensorView dweights_TK, TensorView dx) {
  const Routing& r = placement.routing;
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

void experts_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, ConstTensorView dy_TH, ConstTensorView gate_up_N2F,
                      const ExpertsParameter& p, const Placement& placement) {
  const std::int64_t N = gate_up_N2F.shape.num_rows(), F = gate_up_N2F.shape.num_cols() / 2, T = x_TH.value.shape.num_rows();
  const std::int64_t H = x_TH.value.shape.num_cols();
  const DType dtype = x_TH.value.dtype;
  const Tape::Target dx = x_TH.id >= 0 ? tape.target(x_TH) : Tape::Target{};
  Arena& arena = tape.arena();
  const Arena::Mark mark = arena.mark();
  const TensorView dhidden_NF = arena.take({N, F}, dtype), rows_NH = arena.take({N, H}, dtype);
  const TensorView dgate_up_N2F = arena.take({N, 2 * F}, dtype);
  gather_rows(ctx, arena, rows_NH, dy_TH, placement);
  {
    const TensorView hidden_NF = dgate_up_N2F.reshaped({2 * N, F}).rows(0, N);  // before its own values come
    activate(ctx, hidden_NF, gate_up_N2F, placement.weight_N, p);
    run_bias_gradients(ctx, tape, p.ddown_biases_V, rows_NH, placement, placement.weight_N, T);
    run_weight_gradients(ctx, tape, rows_NH, hidden_NF, p.down, placement, T);
    run_input_gradients(ctx, dhidden_NF, rows_NH, p.down, placement);
    run_adapter_gradients(ctx, tape, dhidden_NF, rows_NH, hidden_NF, p.down, placement, T);
  }
  const TensorView dweight_N = arena.take({N}, DType::kF32), dweights_TK = arena.take(placement.routing.weights_TK.shape, DType::kF32);
  activate_backward(ctx, dgate_up_N2F, dweight_N, dhidden_NF, gate_up_N2F, placement.weight_N, p);
  if (p.down_biases_V.data != nullptr) ops::add_bias_dots(ctx, dweight_N, rows_NH, p.down_biases_V, placement.begin_P);
  run_bias_gradients(ctx, tape, p.dgate_up_biases_V, dgate_up_N2F, placement, {}, T);
  TensorView dweight_M = dweight_N;
  if (placement.travel) {
    dweight_M = arena.take({placement.token_M.shape.num_elements()}, DType::kF32);
    return_rows(ctx, column(dweight_M), column(dweight_N), *placement.travel);
  }
  ops::embedding(ctx, column(dweights_TK), column(dweight_M), flat(placement.slot_TK));
  gather_rows(ctx, arena, rows_NH, x_TH.value, placement);
  run_weight_gradients(ctx, tape, dgate_up_N2F, rows_NH, p.gate_up, placement, T);
  // Where adapters are trained their rows of x are read beside the gradients.
  const bool is_adapted = has_adapter_gradients(p.gate_up);
  const TensorView drows_NH = dx.view.data == nullptr ? TensorView{} : is_adapted ? arena.take({N, H}, dtype) : rows_NH;
  if (dx.view.data != nullptr) run_input_gradients(ctx, drows_NH, dgate_up_N2F, p.gate_up, placement);
  if (is_adapted) run_adapter_gradients(ctx, tape, drows_NH, dgate_up_N2F, rows_NH, p.gate_up, placement, T);
  if (dx.view.data != nullptr) sum_to_tokens(ctx, arena, dx.view, drows_NH, placement, dx.accumulate);
  router_backward(ctx, tape, x_TH, p, placement, dweights_TK, dx.view);
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
  return ops::can_mix_experts(ctx, num_tokens, p.num_active, {gate_up, down, biased ? &*biased : nullptr});
}

Var experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out, bool is_block_output) {
  const bool is_shared = p.shared.group != nullptr;
  PRL_CHECK(!is_shared || (frame.tape == nullptr && p.load == nullptr), "devices that share layers compute no gradients");
  const std::int64_t T = x_TH.value.shape.num_rows(), H = x_TH.value.shape.num_cols();
  // Of this device: those that share layers have some outputs of every matrix each, and all of them the same rows.
  const std::int64_t F = p.gate_up.front().weight->num_outputs() / 2, num_outputs = p.down.front().weight->num_outputs();
  const DType dtype = x_TH.value.dtype;
  ops::OpContext& ctx = frame.ctx;
  const auto whole = [&](TensorView part) { return is_shared ? p.shared.group->gather(ctx, p.shared.rank, part) : part; };
  const Var y = frame.variable(out.data != nullptr && !is_shared ? out : frame.keep({T, num_outputs}, dtype));
  const Routing routing = route(frame, x_TH, p);
  // Without an answer to wait for. Nobody asks for the load where there is no tape.
  if (frame.tape == nullptr && p.load == nullptr && p.num_ranks == 1 && !has_adapters(p.gate_up) && !has_adapters(p.down)) {
    const std::vector<const ops::LinearWeight*> gate_up = matrices(p.gate_up), down = matrices(p.down);
    const std::optional<ops::BiasedExperts> biased = biased_of(p);
    const ops::ExpertMatrices of_experts{gate_up, down, biased ? &*biased : nullptr};
    if (ops::mix_experts(ctx, y.value, x_TH.value, routing.ids_TK, routing.weights_TK, of_experts, p.shared))
      return is_shared ? Var{whole(y.value)} : y;
  }
  const std::shared_ptr<const Placement> placement = place(frame, routing, p);
  const std::int64_t N = placement->num_rows();
  const TensorView gate_up_N2F = frame.take({N, 2 * F}, dtype);
  // Scratch memory lies where that of the backward pass does: not among what a layer saves.
  Arena& scratch = frame.tape != nullptr ? frame.tape->arena() : frame.arena;
  const Arena::Mark mark = scratch.mark();
  const TensorView rows_NH = scratch.take({N, H}, dtype);
  const auto run_gate_up = [ctx = &ctx, &scratch, x = x_TH.value, gate_up_N2F, p, placement](TensorView rows) {
    gather_rows(*ctx, scratch, rows, x, *placement);
    run_products(*ctx, gate_up_N2F, rows, p.gate_up, *placement);
    add_biases(*ctx, gate_up_N2F, p.gate_up_biases_V, *placement, {});
  };
  run_gate_up(rows_NH);
  if (frame.remake != nullptr) {
    frame.remake->add([run_gate_up, &scratch, shape = rows_NH.shape, dtype] {
      const Arena::Mark before = scratch.mark();
      run_gate_up(scratch.take(shape, dtype));
      scratch.release(before);
    });
  }
  if (!(is_block_output && frame.is_recompute)) {
    const TensorView hidden_NF = scratch.take({N, F}, dtype);
    activate(ctx, hidden_NF, gate_up_N2F, placement->weight_N, p);
    const TensorView down_N = is_shared ? scratch.take({N, num_outputs}, dtype) : rows_NH;
    run_products(ctx, down_N, whole(hidden_NF), p.down, *placement);
    add_biases(ctx, down_N, p.down_biases_V, *placement, placement->weight_N);
    sum_to_tokens(ctx, scratch, y.value, down_N, *placement, false);
  }
  scratch.release(mark);
  if (is_shared) return {whole(y.value)};
  if (frame.tape != nullptr) {
    frame.tape->record([tape = frame.tape, ctx = &ctx, x_TH, y, gate_up_N2F, p, placement] {
      if (const TensorView dy = tape->grad(y); dy.data != nullptr) experts_backward(*ctx, *tape, x_TH, dy, gate_up_N2F, p, *placement);
    });
  }
  return y;
}

}  // namespace prl::autograd
