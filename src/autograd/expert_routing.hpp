#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "autograd/experts.hpp"
#include "autograd/tape.hpp"

// What experts of one rank and of several have in common. Legend: T tokens, H hidden, E experts, K experts of a token, M = T * K rows.

namespace prl::autograd {

/// Which experts a token has, on the device.
struct Routing {
  TensorView logits_TE, ids_TK, weights_TK, mass_T;
};
/// Of x's rows, saved; what the router says is written down where `p` has a log.
Routing route(Frame& frame, const Var& x_TH, const ExpertsParameter& p);
/// Gradients of the router, and what reaches x through it: added to dx, unless its data is nullptr.
void router_backward(ops::OpContext& ctx, Tape& tape, const Var& x_TH, const ExpertsParameter& p, const Routing& r,
                     ConstTensorView dweights_TK, TensorView dx);
/// Adds to p.load, if somebody wants it; `begin_of` [E + 1]: where this rank's tokens' rows of each expert begin.
void count_load(Frame& frame, const ExpertsParameter& p, const Routing& routing, std::span<const std::int32_t> begin_of);

/// Rows [begin, begin + count) into one expert's gradient, which is 0 without rows.
void form_weight_gradient(ops::OpContext& ctx, TensorView dw, ConstTensorView dy, ConstTensorView x, std::int64_t begin, std::int64_t count,
                          bool accumulate);

std::vector<const ops::LinearWeight*> matrices(std::span<const LinearParameter> of_experts);

/// As a table of one column, to gather numbers with.
inline TensorView column(TensorView numbers) { return numbers.reshaped({numbers.shape.num_elements(), 1}); }
inline TensorView flat(TensorView view) { return view.reshaped({view.shape.num_elements()}); }

/// Waits for the device.
template <typename T>
std::vector<T> download(ops::OpContext& ctx, ConstTensorView view) {
  std::vector<T> out(static_cast<std::size_t>(view.shape.num_elements()));
  ctx.runtime->copy_to_host(out.data(), view.data, out.size() * sizeof(T));
  return out;
}

}  // namespace prl::autograd
