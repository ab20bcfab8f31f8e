#pragma once

#include <memory>

#include "autograd/offload.hpp"
#include "autograd/tape.hpp"
#include "nn/model_config.hpp"

namespace prl::nn {

/// Parts of a decoder layer whose activations are recomputed instead of saved. Every layer saves its residual sums and the output of its
/// attention in any case.
struct LayerParts {
  bool norm = false;       ///< normed inputs of attention and MLP, normed and rotated heads
  bool attn_proj = false;  ///< the projections q, k, v, and the heads made of them
  bool mlp = false;        ///< gate, up, and their product
  bool any() const noexcept { return norm || attn_proj || mlp; }
};

/// Which decoder layers save less and recompute the rest in the backward pass.
struct ActivationCheckpointing {
  int freq = 0;           ///< 0: none; n: every n-th layer
  LayerParts parts = {};  ///< what those layers do not save; with none set they save their input only
};

/// Where saved activations are stored until the backward pass.
struct ActivationOffload {
  std::shared_ptr<HostLink> link = {};  ///< in host memory behind it; nullptr: on the device
  int max_inflight = 5;                 ///< layers being copied at once; that many and one more have a buffer on the device
};

/// How a pass with a tape saves activations.
struct KeptActivations {
  ActivationCheckpointing checkpointing;
  autograd::Remake* remake = nullptr;             ///< wanted if checkpointing has parts
  autograd::OffloadedRegions* offload = nullptr;  ///< one region per layer, with what its rules read; its pass has begun

  bool is_checkpointed(std::int64_t layer) const noexcept { return checkpointing.freq > 0 && layer % checkpointing.freq == 0; }
};

/// Scratch memory that rounding the inputs of products takes in a pass over `num_tokens`, where EightBits says that they are: codes of the
/// widest, of experts' for each of a token's experts, and factors.
std::size_t rounded_input_bytes(const ModelConfig& config, std::int64_t num_tokens);

/// Predicts the memory of a TrainableModel for passes over `num_tokens` that save `num_kept_logits` rows of logits, from sizes alone;
/// scratch memory of ops is not included.
struct ActivationBytes {
  std::size_t device = 0, host = 0;
};
ActivationBytes activation_bytes(const ModelConfig& config, DType compute, std::int64_t num_tokens,
                                 const ActivationCheckpointing& checkpointing, const ActivationOffload& offload = {},
                                 std::int64_t num_kept_logits = 0);

}  // namespace prl::nn
