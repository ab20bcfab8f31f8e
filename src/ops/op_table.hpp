#pragma once

#include <span>

#include "ops/op_list.hpp"

namespace prl::ops {

/// The bodies of one kind of device. The public functions of ops/*.hpp check shapes and call these; a body may rely on
/// what they checked. An entry left empty is a kNotImplemented error.
struct OpTable {
  const char* name = "";         ///< shown in errors and by `prl doctor`: "cpu/avx512", ...
  const void* bodies = nullptr;  ///< the device's own: cpu::Kernels, ...
  /// OpContext::library of a session on this runtime; nullptr where none is needed.
  std::shared_ptr<void> (*make_library)(const std::shared_ptr<DeviceRuntime>&) = nullptr;

  /// Weights keep the layout of the matrix, so `share_linear` never copies.
  bool weights_are_row_major = false;
  /// lm_head_logprob and its gradient take memory for logits.
  bool keeps_logits = false;
#define PRL_OP(op) decltype(&ops::op) op = nullptr;
  PRL_FOR_EACH_OP(PRL_OP)
  PRL_FOR_EACH_OPTIONAL_OP(PRL_OP)
#undef PRL_OP

  // Those that differ from the public function, or that share its name with another.
  double (*sum_squares)(OpContext&, std::span<const ConstTensorView>) = nullptr;
  void (*finish_sample)(std::span<SampleResult>, PendingSamples&) = nullptr;
  std::size_t (*decode_plan_bytes)(OpContext&, std::int64_t num_sequences, std::int64_t max_context) = nullptr;
  bool (*norm_rope)(OpContext&, TensorView, const HeadInputs&) = nullptr;  ///< false: not for these sizes
  bool (*norm_rope_backward)(OpContext&, TensorView, TensorView, TensorView, TensorView, const HeadInputs&) = nullptr;
};

}  // namespace prl::ops
