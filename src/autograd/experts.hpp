#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "autograd/functions.hpp"
#include "ops/experts.hpp"
#include "ops/shard_group.hpp"

namespace prl::autograd {

/// How a router has spread tokens over the experts of a layer.
struct ExpertLoad {
  std::vector<std::int64_t> tokens_of_expert;
  double mass = 0;  ///< sum over tokens of the probability that their experts have
};

/// Where the experts of tokens are written down: ops::log_route.
struct RouteLog {
  TensorView log_SB;  ///< no data: nowhere
  ConstTensorView slot_T;
  std::int64_t first_entry = 0;
};

/// A mixture of experts with its gradients.
struct ExpertsParameter {
  LinearParameter router;                       ///< [E, H]
  std::vector<LinearParameter> gate_up, down;   ///< of each expert [2F, H], [H, F]; without biases, adapters in groups and without dropout
  std::int64_t num_active = 0;                  ///< K: experts of a token
  bool renormalize = false;                     ///< their weights have the sum 1
  std::optional<ops::ScoreRule> by_score = {};  ///< in place of a softmax over all, and of `renormalize`
  ConstTensorView score_bias_PE = {};           ///< of such a rule: see ops::route_by_score
  bool is_router_frozen = false;                ///< its gradient is 0
  /// In place of SwiGLU. Then the rows of gate_up take turns, and biases, of the router's too, are there: see ops::add_expert_biases.
  std::optional<ops::ClampedGate> clamped = {};
  ConstTensorView gate_up_biases_V = {}, down_biases_V = {};
  TensorView dgate_up_biases_V = {}, ddown_biases_V = {};  ///< added to; no data: nobody wants them
  ConstTensorView given_TK = {};                           ///< experts that tokens have whatever the router says: see ops::route
  RouteLog log = {};
  ExpertLoad* load = nullptr;  ///< what a forward pass adds to; nullptr: nobody wants it
  /// With other devices, which have other outputs of each matrix. Without a tape; the result lies in memory of the group.
  ops::SharedLayers shared = {};
};

/// Per token the sum over its K experts of weight * down(silu(gate x) * up x), or of what `clamped` has in its place. A token's row depends
/// on that row and the weights alone, on which experts other tokens have neither: experts have their rows together, and each product is
/// batch-invariant. The weight multiplies what goes into `down`, so that its gradient needs no output of an expert.
///
/// Without a tape, a load and adapters it is one op of the device, where that has it. Else it waits for the device once, for how many rows
/// each expert has.
///
/// Saves the routing and what silu reads, [T * K, 2F]; a recomputing frame saves the routing alone. `out`, `is_block_output`: as linear().
Var experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out = {}, bool is_block_output = false);

/// An expert that all tokens pass, up to what its last product reads: silu(gate) * up of [T, 2F], times sigmoid(x w) of the row. Saves the
/// sigmoids, and what silu reads unless the frame recomputes. `gate_up` has no other reader.
Var gated_swiglu(Frame& frame, const Var& gate_up_T2F, const Var& x_TH, const VectorParameter& gate);

/// Whether experts() of so many tokens without a tape waits for nothing, so that it can be recorded.
bool can_record_experts(ops::OpContext& ctx, std::int64_t num_tokens, const ExpertsParameter& p);

}  // namespace prl::autograd
