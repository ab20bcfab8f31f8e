#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "autograd/attention.hpp"
#include "autograd/experts.hpp"
#include "nn/activations.hpp"
#include "nn/parameters.hpp"
#include "nn/weights.hpp"
#include "ops/attention.hpp"
#include "ops/context.hpp"
#include "ops/shard_group.hpp"

namespace prl::nn {

/// Ranks that share a row (Ulysses).
using HeadExchange = autograd::HeadExchange;

/// What tokens [first, first + rows) of a batch enter the first layer as, in place of their rows of the embedding: tokens of an image.
struct FeatureRows {
  ConstTensorView rows_NH;  ///< in the compute dtype, contiguous
  std::int64_t first = 0;
};

/// Packed sequences for training. All host arrays.
struct PackedBatch {
  std::span<const std::int32_t> ids_T;
  std::span<const std::int32_t> positions_T;
  std::span<const std::int32_t> cu_seqlens;  ///< num_sequences + 1
  std::uint64_t dropout_seed = 0;            ///< of adapters that are trained with dropout
  /// The ids are this rank's part of a row, whose sequences `cu_seqlens` has; all parts are of one length. Heads must divide.
  HeadExchange* exchange = nullptr;
  int num_token_blocks = 1;  ///< of these ids, over which gradients are summed as a tree (autograd::sum_over_blocks)
  /// [num_layers, T, K], of mixtures of experts: which experts the ids have (ops::route); empty: those of the router.
  std::span<const std::int32_t> experts_LTK = {};
  /// [3, T], of models with a vision tower: what tokens turn with in time, height and width (ops::RopeSections); empty: positions_T in all
  /// three.
  std::span<const std::int32_t> rope_positions_3T = {};
  std::span<const FeatureRows> features = {};  ///< read until the end of forward(); these rows of the embedding get no gradient
  /// Of a head for multi-token prediction: the hidden states that it takes, in the compute dtype; read until the end of backward().
  ConstTensorView hidden_TH = {};
};

/// New tokens of several requests over a paged cache. Host arrays but for drawn_B; see ops::PagedAttention.
struct PagedBatch {
  std::span<const std::int32_t> ids_T;        ///< see ops::TokenIds
  std::span<const std::int32_t> positions_T;  ///< rows of the rotary table; where a token stands says context_len
  std::span<const std::int32_t> slot_T;       ///< where each token's k, v go
  std::span<const std::int32_t> query_start;  ///< num_sequences + 1
  std::span<const std::int32_t> context_len;  ///< num_sequences
  std::span<const std::int32_t> block_table;  ///< num_sequences * max_blocks
  std::int32_t max_blocks = 0;
  std::span<const std::int32_t> state_slot = {};  ///< num_sequences, of models with linear attention: which of KvCache's states
  ConstTensorView drawn_B = {};                   ///< tokens drawn by work that may still be enqueued
  /// Rows that name an adapter. All others have that of the weights, if there is one.
  std::span<const AdapterRows> adapters = {};
  std::span<const std::int32_t> rope_positions_3T = {};  ///< as PackedBatch's
  std::span<const FeatureRows> features = {};            ///< as PackedBatch's
  // With KvCache::hidden():
  std::span<const std::int32_t> read_hidden_T = {};   ///< of a head for multi-token prediction: the slot of the hidden state it takes
  std::span<const std::int32_t> write_hidden_T = {};  ///< where each token's hidden state goes, -1: nowhere; no slot twice
};

/// Most rows of a step that is recorded, a power of two: beyond it launches take less time than kernels. Steps are filled up for it, to
/// the next power of two at most.
inline constexpr std::int64_t kMaxRecordedRows = 2048;

/// The layers of a KvCache.
struct CacheLayers {
  std::vector<ops::KvLayer> kv;         ///< of softmax attention; without memory for the other layers
  std::vector<ops::StateLayer> states;  ///< of linear attention; without memory for the other layers
};

/// What sequences leave behind for their next tokens. Keys and values of the layers of softmax attention: k and v [num_blocks, Hkv,
/// block_size, D] in the compute dtype; k alone, of one head, where attention is to latents. Of layers of linear attention a state for each
/// sequence.
class KvCache {
 public:
  /// `config`: of the heads that this device computes.
  /// With `logs_routes`, for mixtures of experts alone, route_log() is there.
  KvCache(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, DType compute, std::int64_t num_blocks,
          std::int64_t block_size, bool logs_routes = false, std::int64_t num_states = 0);
  std::int64_t num_blocks() const noexcept { return num_blocks_; }
  std::int64_t block_size() const noexcept { return block_size_; }
  ops::KvLayer layer(std::int64_t i) const;
  CacheLayers layers() const;
  /// One of the states in place of another, in all layers; enqueued.
  void copy_state(DeviceRuntime& runtime, std::int64_t from, std::int64_t to) const;
  std::int64_t num_states() const noexcept { return num_states_; }
  /// Of one sequence in all layers of linear attention.
  static std::size_t bytes_per_state(const ModelConfig& config, DType compute, DeviceKind device) noexcept;
  static std::size_t bytes_per_block(const ModelConfig& config, DType compute, std::int64_t block_size) noexcept;
  /// Which experts the token in each slot had: [num_blocks * block_size] rows of num_layers times num_active_experts 16-bit numbers (kU8),
  /// 0 in layers without experts. Not defined unless asked for.
  const Tensor& route_log() const noexcept { return route_log_; }
  static std::size_t route_bytes_per_block(const ModelConfig& config, std::int64_t block_size) noexcept;
  /// The hidden state, behind the last norm, of the token in each slot: [num_slots() + num_guesses, H] in the compute dtype, for a head for
  /// multi-token prediction, which leaves what it guesses of them behind. Not defined until keep_hidden(), or until it is another's.
  const Tensor& hidden() const noexcept { return hidden_; }
  void keep_hidden(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config, DType compute, std::int64_t num_guesses);
  std::int64_t num_slots() const noexcept { return num_blocks_ * block_size_; }
  void share_hidden(const KvCache& of) { hidden_ = of.hidden_; }
  static std::size_t hidden_bytes_per_block(const ModelConfig& config, DType compute, std::int64_t block_size) noexcept;

 private:
  std::vector<Tensor> k_, v_, inputs_, states_;
  Tensor route_log_, hidden_;
  std::int64_t num_blocks_ = 0, block_size_ = 0, num_states_ = 0;
};

/// The decoder for inference: hidden states after the final norm. It runs the same layer code as training, so a row equals
/// TrainableModel's bit for bit. Reuses activation buffers between calls; one caller at a time.
class InferenceModel {
 public:
  /// `may_record`: whether steps of one token per sequence may be recorded as CUDA graphs. `shared`: with the other devices that compute
  /// parts of the same layers; all of them make the same calls.
  explicit InferenceModel(ops::OpContext& ctx, bool may_record = true, ops::SharedLayers shared = {});
  ~InferenceModel();
  /// Writes k, v of the new tokens into `cache` and returns h [T, H] in compute dtype, valid until the next call. A step of one token
  /// per sequence is recorded where the device can, once per set of weights and rounded-up batch size, and replayed from then on.
  TensorView forward_paged(const Weights& weights, KvCache& cache, const PagedBatch& batch);
  /// The rows of h, contiguous; valid until the next call.
  ConstTensorView hidden_rows(ConstTensorView h_TH, std::span<const std::int32_t> rows_B);
  /// logits_BV [B, V] fp32 of the last result of hidden_rows(); valid until its next call.
  TensorView logits(const Weights& weights, ConstTensorView h_BH);
  TensorView logits(const Weights& weights, ConstTensorView h_TH, std::span<const std::int32_t> rows_B) {
    return logits(weights, hidden_rows(h_TH, rows_B));
  }
  /// Varlen forward without cache and without tape (probe prompts, validation loss).
  TensorView forward_packed(const Weights& weights, const PackedBatch& batch);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Per-token results of a training forward pass, aligned with the *predicting* position: logp[i] is of targets[i] given
/// tokens 0..i of its sequence. Host fp32.
struct TokenStats {
  std::vector<float> logp_T;
  std::vector<float> entropy_T;
  std::vector<autograd::ExpertLoad> expert_loads = {};  ///< per layer that is a mixture of experts
};

/// Forward and backward pass; the loss is outside: the trainer computes it from logp on the host and passes d loss/d logp back.
/// Numerics  activations and their gradients are in the compute dtype of the weights; products, norms and softmax sum in fp32, and
///           gradients of parameters are fp32 throughout. Recomputation, offloading and saved logits change no bit of a gradient.
/// Memory    activations of the last forward() are saved until the next one; buffers are reused between steps.
class TrainableModel {
 public:
  TrainableModel(ops::OpContext& ctx, Parameters& parameters, ActivationCheckpointing checkpointing, ActivationOffload offload = {});
  ~TrainableModel();
  /// targets_T: the token each position must predict, -1 for none. temperatures_T > 0.
  TokenStats forward(const WeightsPtr& weights, const PackedBatch& batch, std::span<const std::int32_t> targets_T,
                     std::span<const float> temperatures_T);
  /// [T, H], behind the last norm, of the last forward() or evaluate(); valid until the next one.
  ConstTensorView hidden() const;
  /// Gradient of sum_t dlogp_T[t] * logp[t] of the last forward() is added to the parameters' grads. Once per forward.
  void backward(std::span<const float> dlogp_T);
  /// In place of forward() and backward() on a rank that has no row where others have one: the same calls to weights.layers and to the
  /// parameters' sections, in the same order.
  void pass_forward(const Weights& weights);
  void pass_backward(const Weights& weights);
  /// Saves the logits of up to `num_tokens` tokens for backward instead of recomputing them: num_tokens * ops::kept_row_bytes(). No
  /// effect where the device cannot. Not between forward() and backward().
  void keep_logits(std::int64_t num_tokens);
  /// Reserves memory for passes over `num_tokens` in `compute`; growing on demand would leave up to a fifth unused. Not between forward()
  /// and backward(). Error{kOutOfMemory}.
  void expect_tokens(std::int64_t num_tokens, DType compute);
  /// Shrinks buffers to the largest pass so far. Not between forward() and backward().
  void fit_memory();
  /// Forward only.
  TokenStats evaluate(const WeightsPtr& weights, const PackedBatch& batch, std::span<const std::int32_t> targets_T,
                      std::span<const float> temperatures_T);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// log p of prompt[i+1] given prompt[..i] on a fixed prompt, the proof that two holders of weights agree. Size n - 1.
std::vector<float> probe_logprobs(InferenceModel& model, ops::OpContext& ctx, const Weights& weights, std::span<const std::int32_t> prompt);
/// A deterministic probe prompt of `length` ids for a vocabulary.
std::vector<std::int32_t> probe_prompt(std::int64_t vocab_size, int length = 32);

}  // namespace prl::nn
