#pragma once

#include "autograd/attention.hpp"
#include "nn/parameters.hpp"
#include "nn/weights.hpp"

namespace prl::nn {

// The decoder's only forward code: training, prefill and decode all come through here, which is what makes their rows equal bit
// for bit. Legend: T tokens, H hidden.

/// The residual stream between two layers is residual + delta; the sum is formed together with the norm that reads it.
struct Stream {
  autograd::Var residual_TH;
  autograd::Var delta_TH;  ///< undefined: the stream is `residual_TH` alone
};

/// Memory for the two halves of a stream, for passes that reuse the rest.
struct StreamBuffers {
  TensorView residual_TH, delta_TH;
};

/// Weights of a model with the gradients that belong to them (none: inference).
struct BoundModel {
  const Weights& weights;
  const Parameters* gradients = nullptr;
};

/// Decoder layer `i`. `out`, if given, receives the new stream; else it lies in fresh memory of the frame.
Stream decoder_layer(autograd::Frame& frame, const BoundModel& model, std::int64_t i, const Stream& in,
                     const autograd::AttentionIndex& index, const StreamBuffers* out);

/// Embedding, all layers and the final norm: h [T, H]. ids_T and index must outlive the frame's tape.
/// `recompute_freq` n > 0: every n-th layer keeps no activations (frames with a tape).
autograd::Var decoder_forward(autograd::Frame& frame, const BoundModel& model, ConstTensorView ids_T, const autograd::AttentionIndex& index,
                              std::span<const ops::KvLayer> kv_layers, int recompute_freq);

}  // namespace prl::nn
