#pragma once

#include <span>

#include "ops/attention.hpp"
#include "ops/fused.hpp"
#include "ops/hash.hpp"
#include "ops/lm_head.hpp"
#include "ops/logit_edits.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"

namespace prl::ops {

/// The bodies of one kind of device. The public functions of ops/*.hpp check shapes and call these; a body may rely on
/// what they checked. Signatures are those of the public functions. An entry left empty is a kNotImplemented error.
struct OpTable {
  const char* name = "";         ///< shown in errors and by `prl doctor`: "cpu/avx512", ...
  const void* bodies = nullptr;  ///< the device's own: cpu::Kernels, ...
  /// OpContext::library of a session on this runtime; nullptr where none is needed.
  std::shared_ptr<void> (*make_library)(const std::shared_ptr<DeviceRuntime>&) = nullptr;

  /// Weights keep the layout of the matrix, so `share_linear` never copies.
  bool weights_are_row_major = false;
  /// lm_head_logprob and its gradient take memory for logits.
  bool keeps_logits = false;
  LinearWeightPtr (*pack_linear)(OpContext&, ConstTensorView, ConstTensorView, DType, bool) = nullptr;
  LinearWeightPtr (*share_linear)(OpContext&, const Tensor&, ConstTensorView, bool) = nullptr;
  void (*linear)(OpContext&, TensorView, ConstTensorView, const LinearWeight&, const LinearWeight*) = nullptr;
  void (*linear_backward_input)(OpContext&, TensorView, ConstTensorView, const LinearWeight&, bool) = nullptr;
  void (*linear_backward_weight)(OpContext&, TensorView, TensorView, ConstTensorView, ConstTensorView, bool) = nullptr;
  void (*hash_rows)(OpContext&, std::span<std::uint64_t>, std::span<const HashedRows>, DType) = nullptr;
  void (*matmul_f32)(OpContext&, TensorView, ConstTensorView, ConstTensorView, bool) = nullptr;

  void (*attention_varlen)(OpContext&, TensorView, TensorView, const VarlenAttention&) = nullptr;
  void (*attention_varlen_backward)(OpContext&, TensorView, TensorView, TensorView, std::int64_t, std::int64_t, std::int64_t,
                                    ConstTensorView, ConstTensorView, ConstTensorView, const VarlenAttention&) = nullptr;
  void (*kv_write)(OpContext&, const KvLayer&, ConstTensorView, std::int64_t, ConstTensorView, std::int64_t,
                   std::span<const std::int32_t>) = nullptr;
  void (*attention_paged)(OpContext&, TensorView, const PagedAttention&) = nullptr;

  void (*lm_head_logprob)(OpContext&, TensorView, TensorView, TensorView, ConstTensorView, const LinearWeight&,
                          std::span<const std::int32_t>, std::span<const float>, TensorView) = nullptr;
  void (*lm_head_logprob_backward)(OpContext&, TensorView, TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
                                   const LinearWeight&, std::span<const std::int32_t>, std::span<const float>, bool,
                                   ConstTensorView) = nullptr;
  void (*edit_logits)(OpContext&, TensorView, ConstTensorView, const LogitEdits&) = nullptr;
  void (*begin_sample)(OpContext&, PendingSamples&, TensorView, ConstTensorView, std::span<const SampleRow>) = nullptr;
  void (*finish_sample)(std::span<SampleResult>, PendingSamples&) = nullptr;

  void (*embedding)(OpContext&, TensorView, ConstTensorView, const TokenIds&) = nullptr;
  void (*embedding_backward)(OpContext&, TensorView, ConstTensorView, ConstTensorView) = nullptr;
  void (*rms_norm)(OpContext&, TensorView, ConstTensorView, ConstTensorView, float) = nullptr;
  void (*add_rms_norm)(OpContext&, TensorView, TensorView, ConstTensorView, ConstTensorView, ConstTensorView, float) = nullptr;
  void (*rms_norm_backward)(OpContext&, TensorView, TensorView, ConstTensorView, ConstTensorView, ConstTensorView, float, bool) = nullptr;
  void (*head_norm)(OpContext&, TensorView, std::int64_t, ConstTensorView, std::int64_t, ConstTensorView, float) = nullptr;
  void (*head_norm_backward)(OpContext&, TensorView, std::int64_t, TensorView, ConstTensorView, std::int64_t, ConstTensorView, std::int64_t,
                             ConstTensorView, float) = nullptr;
  void (*add)(OpContext&, TensorView, ConstTensorView, ConstTensorView) = nullptr;
  void (*swiglu)(OpContext&, TensorView, ConstTensorView) = nullptr;
  void (*swiglu_backward)(OpContext&, TensorView, ConstTensorView, ConstTensorView) = nullptr;
  void (*rope)(OpContext&, TensorView, std::int64_t, ConstTensorView, const RopeTable&, bool) = nullptr;
  void (*cast)(OpContext&, TensorView, ConstTensorView) = nullptr;
  double (*sum_squares)(OpContext&, std::span<const ConstTensorView>) = nullptr;
  void (*scale)(OpContext&, TensorView, float) = nullptr;

  void (*adamw)(OpContext&, TensorView, TensorView, TensorView, ConstTensorView, const AdamWArgs&, TensorView) = nullptr;
  void (*sgd)(OpContext&, TensorView, TensorView, ConstTensorView, const SgdArgs&) = nullptr;
  void (*sign_sgd)(OpContext&, TensorView, ConstTensorView, float, float) = nullptr;
  void (*muon)(OpContext&, TensorView, TensorView, ConstTensorView, const MuonArgs&) = nullptr;

  // Not every device has these: attention from indices in its own memory, and fused forms of ops above.
  bool (*linear_fused)(OpContext&, TensorView, ConstTensorView, const LinearWeight&, const LinearFusion&) = nullptr;
  std::size_t (*decode_plan_bytes)(OpContext&, std::int64_t num_sequences, std::int64_t max_context) = nullptr;
  void (*plan_decode)(OpContext&, TensorView, ConstTensorView, const KvLayer&, const DecodeIndex&) = nullptr;
  void (*attention_decode)(OpContext&, TensorView, ConstTensorView, const KvLayer&, const DecodeIndex&, ConstTensorView, float) = nullptr;
  bool (*attention_decode_fused)(OpContext&, TensorView, const HeadInputs&, const KvLayer&, const DecodeIndex&, ConstTensorView,
                                 float) = nullptr;
  bool (*begin_sample_head)(OpContext&, PendingSamples&, TensorView, ConstTensorView, const LinearWeight&,
                            std::span<const SampleRow>) = nullptr;
  bool (*norm_rope)(OpContext&, TensorView, const HeadInputs&) = nullptr;  ///< false: not for these sizes
  bool (*norm_rope_backward)(OpContext&, TensorView, TensorView, TensorView, TensorView, const HeadInputs&) = nullptr;
  void (*norm_rope_to_cache)(OpContext&, TensorView, const KvLayer&, ConstTensorView, const HeadInputs&) = nullptr;
};

}  // namespace prl::ops
