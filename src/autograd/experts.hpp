#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/expert_share.hpp"
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

/// Ranks of which each holds some experts of every layer, and rows of tokens of its own. All of them make the same calls in the same
/// order, so that each runs the same layers, forward and backward, at the same time as the others.
class ExpertRanks {
 public:
  virtual ~ExpertRanks() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// out [R, N] gets everyone's `mine` [N].
  virtual void all_gather(TensorView out_RN, ConstTensorView mine_N) = 0;
  /// Rows that travel beside what is queued meanwhile.
  class Trip {
   public:
    virtual ~Trip() = default;  ///< waits, if they were not joined
    /// Work that is queued from now on finds them there.
    virtual void join() = 0;
  };
  /// ins[r] goes to rank r and outs[r] comes from it, once what is queued so far is done; all are contiguous, and may be empty, as those
  /// of this rank itself are. Trips end in the order in which they were started.
  virtual std::unique_ptr<Trip> start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) = 0;
  /// Everyone's bytes, in the order of ranks. Host memory.
  virtual std::vector<std::string> gather_bytes(std::string_view mine) = 0;
  /// Of the rows that come from each rank, those of ranks [0, num_active) have gradients that count, each rank's a leaf, which are added in
  /// the order of ranks; `is_first`: to nothing, what was in the gradients' memory is overwritten.
  struct Leaves {
    int num_active = 0;
    bool is_first = true;
  };
  virtual Leaves leaves() const = 0;
};

/// A mixture of experts with its gradients.
struct ExpertsParameter {
  LinearParameter router;  ///< [E, H]
  /// Of each expert [2F, H], [H, F]; without biases, adapters in groups and without dropout. Of those that this rank has, if ranks divide
  /// them.
  std::vector<LinearParameter> gate_up, down;
  std::int64_t num_active = 0;                  ///< K: experts of a token
  bool renormalize = false;                     ///< their weights have the sum 1
  std::optional<ops::ScoreRule> by_score = {};  ///< in place of a softmax over all, and of `renormalize`
  ConstTensorView score_bias_PE = {};           ///< of such a rule: see ops::route_by_score
  bool is_router_frozen = false;                ///< its gradient is 0
  /// In place of SwiGLU and its gate: experts are [F, H] and [H, F], and between them is ops::squared_relu.
  bool is_squared = false;
  /// In place of SwiGLU. Then the rows of gate_up take turns, and biases, of the router's too, are there: see ops::add_expert_biases.
  std::optional<ops::ClampedGate> clamped = {};
  ConstTensorView gate_up_biases_V = {}, down_biases_V = {};
  TensorView dgate_up_biases_V = {}, ddown_biases_V = {};  ///< added to; no data: nobody wants them
  ConstTensorView given_TK = {};                           ///< experts that tokens have whatever the router says: see ops::route
  RouteLog log = {};
  ExpertLoad* load = nullptr;  ///< what a forward pass adds to; nullptr: nobody wants it
  /// With other devices, which have other outputs of each matrix. Without a tape; the result lies in memory of the group.
  ops::SharedLayers shared = {};
  /// Of ranks that divide the experts, and how this one meets the others; experts are neither `clamped` nor adapted then. Without `ranks`
  /// nobody is there, and this rank's experts stand for the others': to see what memory a pass takes. See divided_experts().
  ExpertShare share = {};
  ExpertRanks* ranks = nullptr;
};

/// Per token the sum over its K experts of weight * down(silu(gate x) * up x), or of what `clamped` has in its place. A token's row depends
/// on that row and the weights alone, on which experts other tokens have neither: experts have their rows together, and each product is
/// batch-invariant. The weight multiplies what goes into `down`, so that its gradient needs no output of an expert.
///
/// Without a tape, a load and adapters it is one op of the device, where that has it. Else it waits for the device once, for how many rows
/// each expert has.
///
/// Saves the routing and what silu reads, [T * K, 2F]; a recomputing frame saves the routing alone. `out`, `is_block_output`: as linear().
///
/// `of_experts`, unless its data is nullptr: the rows [T, L] that experts have in place of x, which then goes to the router alone; their
/// matrices are [.., L] and [L, F], and so is the result.
Var experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out = {}, bool is_block_output = false,
            const Var& of_experts = {});

/// An expert that all tokens pass, up to what its last product reads: silu(gate) * up of [T, 2F], times sigmoid(x w) of the row. Saves the
/// sigmoids, and what silu reads unless the frame recomputes. `gate_up` has no other reader.
Var gated_swiglu(Frame& frame, const Var& gate_up_T2F, const Var& x_TH, const VectorParameter& gate);

/// Whether experts() of so many tokens without a tape waits for nothing, so that it can be recorded.
bool can_record_experts(ops::OpContext& ctx, std::int64_t num_tokens, const ExpertsParameter& p);

}  // namespace prl::autograd
