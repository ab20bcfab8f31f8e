#include "autograd/divided_experts.hpp"

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "autograd/expert_routing.hpp"
#include "base/error.hpp"

// Legend: T tokens, H hidden, E experts, K experts of a token, M = T * K rows of this rank's tokens, N rows that this rank computes, F
// width of an expert.

namespace prl::autograd {
namespace {

/// Some of each rank's experts, whose rows travel together.
struct Part {
  std::size_t first_expert = 0, num_experts = 0;   ///< of this rank's own
  std::size_t first_group = 0;                     ///< the rows that come from each rank have a group for each of these
  std::int64_t first_row = 0, num_rows = 0;        ///< of N
  std::vector<std::int64_t> sent_begin{}, sent{};  ///< of M: what goes to each rank
  std::vector<std::int64_t> received{};            ///< rows that come from each rank, one after the other
};

/// Rows of M lie by expert, then by token; those of N by part, then by the rank that they came from, by expert and by token.
struct DividedPlacement {
  Routing routing;
  ExpertRanks* ranks = nullptr;
  std::vector<Part> parts;
  std::vector<std::int32_t> begin_of;  ///< [groups + 1], rows of N
  // On the device:
  TensorView begin_P;           ///< int32: begin_of
  TensorView token_M, slot_TK;  ///< int32: the token of a row; the row of a token's k-th expert
  TensorView weight_N;          ///< fp32
  std::int64_t num_sent() const { return token_M.shape.num_elements(); }
  std::int64_t num_rows() const { return begin_of.back(); }
  std::int64_t rows_of(std::size_t group) const { return begin_of[group + 1] - begin_of[group]; }
  /// begin_P of groups [first, first + count).
  ConstTensorView begins(std::size_t first, std::size_t count) const {
    return flat(column(begin_P).rows(static_cast<std::int64_t>(first), static_cast<std::int64_t>(count) + 1));
  }
  ConstTensorView begins(const Part& part) const { return begins(part.first_group, part.num_experts * part.received.size()); }
};

/// Rows on their way; null once they are there.
using Trip = std::unique_ptr<ExpertRanks::Trip>;
using Trips = std::vector<Trip>;

void join(Trip& trip) {
  if (trip != nullptr) std::exchange(trip, nullptr)->join();
}
void join(Trips& trips) {
  for (Trip& trip : trips) join(trip);
}

/// From all ranks, or to all, rows of both sides. Those of this rank itself are copied, and so are all if nobody is there.
Trip start(ops::OpContext& ctx, ExpertRanks* ranks, std::vector<TensorView> outs, std::vector<ConstTensorView> ins) {
  for (std::size_t r = 0; r < outs.size(); ++r) {
    if (ranks != nullptr && static_cast<int>(r) != ranks->rank()) continue;
    ctx.runtime->copy_within(outs[r].data, ins[r].data, static_cast<std::size_t>(ins[r].shape.num_elements()) * size_of(ins[r].dtype));
    outs[r] = outs[r].rows(0, 0);
    ins[r] = ins[r].rows(0, 0);
  }
  return ranks != nullptr ? ranks->start_all_to_all(outs, ins) : nullptr;
}

/// Rows of a part that lie here, of each rank.
template <typename View>
std::vector<View> sent_rows(const Part& part, View rows_M) {
  std::vector<View> views;
  for (std::size_t r = 0; r < part.sent.size(); ++r) views.push_back(rows_M.rows(part.sent_begin[r], part.sent[r]));
  return views;
}
template <typename View>
std::vector<View> received_rows(const Part& part, View rows_N) {
  std::vector<View> views;
  std::int64_t begin = part.first_row;
  for (const std::int64_t count : part.received) {
    views.push_back(rows_N.rows(begin, count));
    begin += count;
  }
  return views;
}

/// Rows of M go to where they are computed, part by part.
Trips send(ops::OpContext& ctx, const DividedPlacement& placement, TensorView out_N, ConstTensorView in_M) {
  Trips trips;
  for (const Part& part : placement.parts) trips.push_back(start(ctx, placement.ranks, received_rows(part, out_N), sent_rows(part, in_M)));
  return trips;
}
/// And back.
Trip bring_back(ops::OpContext& ctx, const DividedPlacement& placement, const Part& part, TensorView out_M, ConstTensorView in_N) {
  return start(ctx, placement.ranks, sent_rows(part, out_M), received_rows(part, in_N));
}

/// Where each rank's rows of each expert begin among its own, [E + 1]; this rank's alone if nobody is there. Waits for the device.
std::vector<std::vector<std::int32_t>> begins_of_ranks(Frame& frame, const TensorView& begin_P, const ExpertsParameter& p) {
  if (p.ranks == nullptr) return {download<std::int32_t>(frame.ctx, begin_P)};
  const std::int64_t R = p.share.size, P = begin_P.shape.num_elements();
  const TensorView all_RP = frame.keep({R, P}, DType::kI32);
  p.ranks->all_gather(all_RP, begin_P);
  const std::vector<std::int32_t> all = download<std::int32_t>(frame.ctx, all_RP);
  std::vector<std::vector<std::int32_t>> begins;
  for (std::int64_t r = 0; r < R; ++r) begins.emplace_back(all.begin() + r * P, all.begin() + (r + 1) * P);
  return begins;
}

/// Part `k` of `num_parts`, whose groups are added to the placement's.
Part make_part(std::vector<std::int32_t>& begin_of, std::span<const std::vector<std::int32_t>> begins, std::span<const std::int32_t> own,
               const ExpertShare& share, bool has_ranks, int k, int num_parts) {
  const auto E = static_cast<std::int64_t>(own.size()) - 1;
  const auto first_of = [&](int rank, int of_part) {
    const ExpertShare of{rank, share.size};
    return static_cast<std::size_t>(of.first(E) + of.count(E) * of_part / num_parts);
  };
  const std::size_t first = first_of(share.rank, k), end = first_of(share.rank, k + 1);
  Part part{.first_expert = first - first_of(share.rank, 0),
            .num_experts = end - first,
            .first_group = begin_of.size() - 1,
            .first_row = begin_of.back()};
  for (int r = 0; r < share.size; ++r) {
    const std::int32_t begin = own[first_of(r, k)], count = own[first_of(r, k + 1)] - begin;
    part.sent_begin.push_back(begin);
    part.sent.push_back(count);
    const std::int32_t before = begin_of.back();
    for (std::size_t e = first; e < end; ++e) {
      // If nobody is there, this rank's experts have the rows that would go to rank r, each as many.
      const std::int64_t even = before + count * static_cast<std::int64_t>(e + 1 - first) / static_cast<std::int64_t>(end - first);
      const std::vector<std::int32_t>& theirs = begins[has_ranks ? static_cast<std::size_t>(r) : 0];
      begin_of.push_back(has_ranks ? begin_of.back() + theirs[e + 1] - theirs[e] : static_cast<std::int32_t>(even));
    }
    part.received.push_back(begin_of.back() - before);
  }
  part.num_rows = begin_of.back() - part.first_row;
  return part;
}

/// `trips` bring the rows' weights.
std::shared_ptr<const DividedPlacement> place(Frame& frame, const Routing& routing, const ExpertsParameter& p, Trips& trips) {
  ops::OpContext& ctx = frame.ctx;
  const std::int64_t T = routing.ids_TK.shape.num_rows(), E = p.router.weight->num_outputs(), K = p.num_active;
  auto placement = std::make_shared<DividedPlacement>();
  placement->routing = routing;
  placement->ranks = p.ranks;
  placement->token_M = frame.keep({T * K}, DType::kI32);
  placement->slot_TK = frame.keep({T, K}, DType::kI32);
  const TensorView weight_M = frame.keep({T * K}, DType::kF32), begin_P = frame.keep({E + 1}, DType::kI32);
  ops::place_rows(ctx, begin_P, placement->token_M, weight_M, placement->slot_TK, routing.ids_TK, routing.weights_TK);
  const std::vector<std::vector<std::int32_t>> begins = begins_of_ranks(frame, begin_P, p);
  const std::vector<std::int32_t>& own = begins[p.ranks != nullptr ? static_cast<std::size_t>(p.share.rank) : 0];
  count_load(frame, p, routing, own);
  placement->begin_of.push_back(0);
  const int num_parts = E / p.share.size >= 2 ? 2 : 1;  // the same at each rank
  for (int k = 0; k < num_parts; ++k)
    placement->parts.push_back(make_part(placement->begin_of, begins, own, p.share, p.ranks != nullptr, k, num_parts));
  placement->begin_P = frame.keep({static_cast<std::int64_t>(placement->begin_of.size())}, DType::kI32);
  ctx.runtime->copy_from_host(placement->begin_P.data, placement->begin_of.data(), placement->begin_of.size() * sizeof(std::int32_t));
  placement->weight_N = frame.keep({placement->num_rows()}, DType::kF32);
  trips = send(ctx, *placement, column(placement->weight_N), column(weight_M));
  return placement;
}

std::span<const LinearParameter> of_part(const std::vector<LinearParameter>& of_experts, const Part& part) {
  return std::span(of_experts).subspan(part.first_expert, part.num_experts);
}

/// f(first row, rows, expert of the part) for the rows of a part that one expert gets from one rank, where there are some.
template <typename F>
void for_each_group(const DividedPlacement& placement, const Part& part, const F& f) {
  for (std::size_t i = 0; i < part.num_experts * part.received.size(); ++i) {
    const std::size_t group = part.first_group + i;
    if (const std::int64_t count = placement.rows_of(group); count > 0) f(placement.begin_of[group], count, i % part.num_experts);
  }
}
/// y = x W^T of a part's rows.
void run_products(ops::OpContext& ctx, TensorView y_N, ConstTensorView x_N, std::span<const LinearParameter> of_experts,
                  const DividedPlacement& placement, const Part& part) {
  if (part.num_rows == 0 || ops::grouped_linear(ctx, y_N, x_N, matrices(of_experts), placement.begins(part))) return;
  for_each_group(placement, part, [&](std::int64_t begin, std::int64_t count, std::size_t expert) {
    ops::linear(ctx, y_N.rows(begin, count), x_N.rows(begin, count), *of_experts[expert].weight);
  });
}
/// dx = dy W.
void run_input_gradients(ops::OpContext& ctx, TensorView dx_N, ConstTensorView dy_N, std::span<const LinearParameter> of_experts,
                         const DividedPlacement& placement, const Part& part) {
  if (part.num_rows == 0 || ops::grouped_linear_backward_input(ctx, dx_N, dy_N, matrices(of_experts), placement.begins(part))) return;
  for_each_group(placement, part, [&](std::int64_t begin, std::int64_t count, std::size_t expert) {
    ops::linear_backward_input(ctx, dx_N.rows(begin, count), dy_N.rows(begin, count), *of_experts[expert].weight, false);
  });
}
/// dW += dy^T x: of each rank's rows a leaf, one after the other.
void run_weight_gradients(ops::OpContext& ctx, ConstTensorView dy_N, ConstTensorView x_N, std::span<const LinearParameter> of_experts,
                          const DividedPlacement& placement, const Part& part) {
  if (placement.ranks == nullptr || of_experts.empty() || of_experts.front().dw.data == nullptr) return;
  std::vector<TensorView> dw;
  for (const LinearParameter& p : of_experts) dw.push_back(p.dw);
  const ExpertRanks::Leaves leaves = placement.ranks->leaves();
  for (int r = 0; r < leaves.num_active; ++r) {
    const bool accumulate = r > 0 || !leaves.is_first;
    const std::size_t first_group = part.first_group + static_cast<std::size_t>(r) * part.num_experts;
    if (ops::grouped_linear_backward_weight(ctx, dw, dy_N, x_N, placement.begins(first_group, part.num_experts), accumulate)) continue;
    for (std::size_t e = 0; e < part.num_experts; ++e)
      form_weight_gradient(ctx, dw[e], dy_N, x_N, placement.begin_of[first_group + e], placement.rows_of(first_group + e), accumulate);
  }
}

/// A part's rows of N.
template <typename View>
View rows_of(const Part& part, View rows_N) {
  return rows_N.rows(part.first_row, part.num_rows);
}
TensorView numbers_of(const Part& part, TensorView numbers_N) { return flat(rows_of(part, column(numbers_N))); }

/// What a backward pass has in its arena. Rows of M: as they travel.
struct BackwardRows {
  BackwardRows(Arena& arena, std::int64_t M, std::int64_t N, std::int64_t H, std::int64_t F, DType dtype)
      : dy_MH(arena.take({M, H}, dtype)),
        x_MH(arena.take({M, H}, dtype)),
        dy_NH(arena.take({N, H}, dtype)),
        x_NH(arena.take({N, H}, dtype)),
        dhidden_NF(arena.take({N, F}, dtype)),
        dgate_up_N2F(arena.take({N, 2 * F}, dtype)),
        dweight_N(arena.take({N}, DType::kF32)),
        dweight_M(arena.take({M}, DType::kF32)) {}
  TensorView dy_MH, x_MH, dy_NH, x_NH, dhidden_NF, dgate_up_N2F, dweight_N, dweight_M;
};

/// Through `down`, while the rows of x travel.
void down_backward(ops::OpContext& ctx, const BackwardRows& rows, Trips& dy_trips, ConstTensorView gate_up_N2F, const ExpertsParameter& p,
                   const DividedPlacement& placement) {
  const std::int64_t N = rows.dhidden_NF.shape.num_rows(), F = rows.dhidden_NF.shape.num_cols();
  const TensorView hidden_NF = rows.dgate_up_N2F.reshaped({2 * N, F}).rows(0, N);  // before its own values come
  ops::swiglu_rows(ctx, hidden_NF, gate_up_N2F, placement.weight_N);
  for (std::size_t k = 0; k < placement.parts.size(); ++k) {
    const Part& part = placement.parts[k];
    join(dy_trips[k]);
    run_input_gradients(ctx, rows.dhidden_NF, rows.dy_NH, of_part(p.down, part), placement, part);
    run_weight_gradients(ctx, rows.dy_NH, hidden_NF, of_part(p.down, part), placement, part);
  }
  ops::swiglu_rows_backward(ctx, rows.dgate_up_N2F, rows.dweight_N, rows.dhidden_NF, gate_up_N2F, placement.weight_N);
}

void divided_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, ConstTensorView dy_TH, ConstTensorView gate_up_N2F,
                      const ExpertsParameter& p, const DividedPlacement& placement) {
  const Tape::Target dx = x_TH.id >= 0 ? tape.target(x_TH) : Tape::Target{};
  Arena& arena = tape.arena();
  const Arena::Mark mark = arena.mark();
  const BackwardRows rows(arena, placement.num_sent(), placement.num_rows(), x_TH.value.shape.num_cols(), gate_up_N2F.shape.num_cols() / 2,
                          x_TH.value.dtype);
  ops::embedding(ctx, rows.dy_MH, dy_TH, placement.token_M);
  Trips dy_trips = send(ctx, placement, rows.dy_NH, rows.dy_MH);
  ops::embedding(ctx, rows.x_MH, x_TH.value, placement.token_M);
  Trips x_trips = send(ctx, placement, rows.x_NH, rows.x_MH);
  down_backward(ctx, rows, dy_trips, gate_up_N2F, p, placement);
  Trips back;
  for (const Part& part : placement.parts) back.push_back(bring_back(ctx, placement, part, column(rows.dweight_M), column(rows.dweight_N)));
  for (std::size_t k = 0; k < placement.parts.size(); ++k) {
    const Part& part = placement.parts[k];
    join(x_trips[k]);
    if (dx.view.data != nullptr) {  // in place of rows of dy, here and as they travel, which are not read any more
      run_input_gradients(ctx, rows.dy_NH, rows.dgate_up_N2F, of_part(p.gate_up, part), placement, part);
      back.push_back(bring_back(ctx, placement, part, rows.dy_MH, rows.dy_NH));
    }
    run_weight_gradients(ctx, rows.dgate_up_N2F, rows.x_NH, of_part(p.gate_up, part), placement, part);
  }
  join(back);
  const TensorView dweights_TK = arena.take(placement.routing.weights_TK.shape, DType::kF32);
  ops::embedding(ctx, column(dweights_TK), column(rows.dweight_M), flat(placement.slot_TK));
  if (dx.view.data != nullptr) ops::sum_rows(ctx, dx.view, rows.dy_MH, placement.slot_TK, dx.accumulate);
  router_backward(ctx, tape, x_TH, p, placement.routing, dweights_TK, dx.view);
  arena.release(mark);
}

/// Up to what silu reads and, unless `y` has no data, to the sum over each token's experts. `weights` bring the rows'.
void run_forward(ops::OpContext& ctx, Arena& scratch, TensorView y_TH, TensorView gate_up_N2F, ConstTensorView x_TH, Trips weights,
                 const ExpertsParameter& p, const DividedPlacement& placement) {
  const std::int64_t N = placement.num_rows(), H = x_TH.shape.num_cols(), F = gate_up_N2F.shape.num_cols() / 2;
  const Arena::Mark mark = scratch.mark();
  const TensorView rows_MH = scratch.take({placement.num_sent(), H}, x_TH.dtype), rows_NH = scratch.take({N, H}, x_TH.dtype);
  ops::embedding(ctx, rows_MH, x_TH, placement.token_M);
  Trips trips = send(ctx, placement, rows_NH, rows_MH), back;
  join(weights);
  const TensorView hidden_NF = y_TH.data != nullptr ? scratch.take({N, F}, x_TH.dtype) : TensorView{};
  for (std::size_t k = 0; k < placement.parts.size(); ++k) {
    const Part& part = placement.parts[k];
    join(trips[k]);
    run_products(ctx, gate_up_N2F, rows_NH, of_part(p.gate_up, part), placement, part);
    if (y_TH.data == nullptr) continue;
    ops::swiglu_rows(ctx, rows_of(part, hidden_NF), rows_of(part, gate_up_N2F), numbers_of(part, placement.weight_N));
    run_products(ctx, rows_NH, hidden_NF, of_part(p.down, part), placement, part);
    back.push_back(bring_back(ctx, placement, part, rows_MH, rows_NH));
  }
  join(back);
  if (y_TH.data != nullptr) ops::sum_rows(ctx, y_TH, rows_MH, placement.slot_TK, false);
  scratch.release(mark);
}

}  // namespace

Var divided_experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out, bool is_block_output) {
  const auto is_adapted = [](const LinearParameter& of_expert) { return of_expert.lora != nullptr; };
  PRL_CHECK(p.shared.group == nullptr && !p.clamped && !is_adapted(p.gate_up.front()) && !is_adapted(p.down.front()) &&
                (frame.tape == nullptr || frame.tape->num_token_blocks() == 1),
            "experts that ranks cannot divide");
  const std::int64_t F = p.gate_up.front().weight->num_outputs() / 2;
  const DType dtype = x_TH.value.dtype;
  const Var y = frame.variable(out.data != nullptr ? out : frame.keep(x_TH.value.shape, dtype));
  const Routing routing = route(frame, x_TH, p);
  Trips weights;
  const std::shared_ptr<const DividedPlacement> placement = place(frame, routing, p, weights);
  const TensorView gate_up_N2F = frame.take({placement->num_rows(), 2 * F}, dtype);
  // Scratch memory lies where that of the backward pass does: not among what a layer saves.
  Arena& scratch = frame.tape != nullptr ? frame.tape->arena() : frame.arena;
  const bool is_wanted = !(is_block_output && frame.is_recompute);
  run_forward(frame.ctx, scratch, is_wanted ? y.value : TensorView{}, gate_up_N2F, x_TH.value, std::move(weights), p, *placement);
  if (frame.remake != nullptr)
    frame.remake->add([ctx = &frame.ctx, &scratch, x = x_TH.value, gate_up_N2F, p, placement] {
      run_forward(*ctx, scratch, {}, gate_up_N2F, x, {}, p, *placement);
    });
  if (frame.tape != nullptr)
    frame.tape->record([tape = frame.tape, ctx = &frame.ctx, x_TH, y, gate_up_N2F, p, placement] {
      if (const TensorView dy = tape->grad(y); dy.data != nullptr) divided_backward(*ctx, *tape, x_TH, dy, gate_up_N2F, p, *placement);
    });
  return y;
}

}  // namespace prl::autograd
