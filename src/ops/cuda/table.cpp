#include "ops/cuda/blas.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda_table.hpp"

namespace prl::ops {
namespace {

std::shared_ptr<void> make_library(const std::shared_ptr<DeviceRuntime>& runtime) { return std::make_shared<cuda::Library>(runtime); }

}  // namespace

const OpTable* cuda_op_table() {
  static const OpTable table{
      .name = "cuda/" PRL_CUDA_ARCH_TEXT,
      .make_library = make_library,
      .weights_are_row_major = true,
      .keeps_logits = true,
      .pack_linear = cuda::pack_linear,
      .share_linear = cuda::share_linear,
      .linear = cuda::linear,
      .linear_backward_input = cuda::linear_backward_input,
      .linear_backward_weight = cuda::linear_backward_weight,
      .hash_rows = cuda::hash_rows,
      .matmul_f32 = cuda::matmul_f32,
      .attention_varlen = cuda::attention_varlen,
      .attention_varlen_backward = cuda::attention_varlen_backward,
      .kv_write = cuda::kv_write,
      .attention_paged = cuda::attention_paged,
      .lm_head_logprob = cuda::lm_head_logprob,
      .lm_head_logprob_backward = cuda::lm_head_logprob_backward,
      .edit_logits = cuda::edit_logits,
      .begin_sample = cuda::begin_sample,
      .finish_sample = cuda::finish_sample,
      .embedding = cuda::embedding,
      .embedding_backward = cuda::embedding_backward,
      .rms_norm = cuda::rms_norm,
      .add_rms_norm = cuda::add_rms_norm,
      .rms_norm_backward = cuda::rms_norm_backward,
      .head_norm = cuda::head_norm,
      .head_norm_backward = cuda::head_norm_backward,
      .add = cuda::add,
      .swiglu = cuda::swiglu,
      .swiglu_backward = cuda::swiglu_backward,
      .rope = cuda::rope,
      .cast = cuda::cast,
      .sum_squares = cuda::sum_squares,
      .scale = cuda::scale,
      .adamw = cuda::adamw,
      .sgd = cuda::sgd,
      .sign_sgd = cuda::sign_sgd,
      .muon = cuda::muon,
      .linear_fused = cuda::linear_fused,
      .decode_plan_bytes = cuda::decode_plan_bytes,
      .plan_decode = cuda::plan_decode,
      .attention_decode = cuda::attention_decode,
      .attention_decode_fused = cuda::attention_decode_fused,
      .begin_sample_head = cuda::begin_sample_head,
      .norm_rope = cuda::norm_rope,
      .norm_rope_backward = cuda::norm_rope_backward,
      .norm_rope_to_cache = cuda::norm_rope_to_cache,
  };
  return &table;
}

}  // namespace prl::ops
