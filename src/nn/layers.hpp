#pragma once

#include "autograd/attention.hpp"
#include "autograd/experts.hpp"
#include "nn/activations.hpp"
#include "nn/adapter_bank.hpp"
#include "nn/parameters.hpp"
#include "nn/weights.hpp"
#include "ops/shard_group.hpp"

namespace prl::nn {
struct CacheLayers;
struct FeatureRows;

// The decoder's only forward code: training, prefill and decode all come through here, which is what makes their rows equal bit
// for bit. Legend: T tokens, H hidden.

/// The residual stream between two layers is residual + delta; the sum is computed together with the norm that reads it.
struct Stream {
  autograd::Var residual_TH;
  autograd::Var delta_TH;  ///< undefined: the stream is `residual_TH` alone
};

/// Where a layer writes its outputs, and what it does not save. An undefined view is freshly allocated in the frame.
struct LayerMemory {
  TensorView residual_TH = {};  ///< for both of its sums
  TensorView delta_TH = {};     ///< for the outputs of attention and MLP, which no backward rule reads
  TensorView shared_TH = {};    ///< for what experts that all tokens pass add to the others' output
  TensorView queries_TQ = {};   ///< for what the products of latents give, which is laid out anew and read by no backward rule
  TensorView up_TU = {};
  bool wants_delta = false;            ///< the layer's stream is to have both parts, not their sum
  LayerParts again = {};               ///< recomputed by `remake`
  autograd::Remake* remake = nullptr;  ///< required if `again` has parts
};

/// Weights of a model with the gradients that belong to them (none: inference), and the adapters of the batch's rows.
struct BoundModel {
  const Weights& weights;
  const Parameters* gradients = nullptr;
  std::vector<AdapterRows> adapters = {};  ///< with gradients at most one, of all rows
  ops::DropoutMask dropout = {};           ///< of adapters in training; each block has masks of its own
  const AdapterBank* bank = nullptr;       ///< in place of `adapters`, by the tiles that lie in device memory
  AdapterTiles tiles = {};
  std::span<autograd::ExpertLoad> loads = {};  ///< per layer: what a forward pass adds to; empty: nobody wants it
  ops::SharedLayers shared = {};               ///< how `weights` that are a part of each layer meet the others; inference only
  ConstTensorView given_LTK = {};              ///< int32 [layers * T, K]: experts that tokens have (ops::route); no data: the router's
  const ops::RopeTable* step_rope = nullptr;   ///< of this batch's tokens, in place of the weights'; their positions count its rows
  std::span<const FeatureRows> features = {};
  ConstTensorView hidden_TH = {};     ///< of a head for multi-token prediction: what it takes beside the tokens
  autograd::RouteLog route_log = {};  ///< of all layers, K entries each in a row: KvCache::route_log()

  /// One without a weight if the model has no such norm.
  autograd::NormParameter norm(Block block, std::int64_t layer = -1) const;
  /// Of a vector; none if it is not trained.
  TensorView gradient(Block block, std::int64_t layer) const;
  /// A matrix with its bias. `next`: see ops::linear.
  autograd::LinearParameter linear(Block block, std::int64_t layer, const ops::LinearWeight* next, std::int64_t expert = -1) const;
  /// The mixture of experts of a layer.
  autograd::ExpertsParameter experts(std::int64_t layer) const;
  /// Whole rows of what this device and those that share its layers have computed parts of; `part` where it computes all. In memory of
  /// the group, until the next call.
  autograd::Var whole(autograd::Frame& frame, const autograd::Var& part) const;
  /// What adapters add to a matrix's product; nullptr if none does.
  std::shared_ptr<const autograd::LoraParameter> lora(Block block, std::int64_t layer, std::int64_t expert = -1) const;
};

/// Decoder layer `i`.
Stream decoder_layer(autograd::Frame& frame, const BoundModel& model, std::int64_t i, const Stream& in,
                     const autograd::AttentionIndex& index, const LayerMemory& memory);

/// Embedding, all layers and the final norm: h [T, H]. Ids and index must outlive the frame's tape, for which all ids must be known.
/// `cache`: paged only. `kept` is for frames with a tape; nullptr: all layers save all they need.
autograd::Var decoder_forward(autograd::Frame& frame, const BoundModel& model, const ops::TokenIds& ids,
                              const autograd::AttentionIndex& index, const CacheLayers* cache, const KeptActivations* kept);

}  // namespace prl::nn
