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
#define PRL_OP(op) .op = cuda::op,
      PRL_FOR_EACH_OP(PRL_OP) PRL_FOR_EACH_OPTIONAL_OP(PRL_OP)
#undef PRL_OP
          .sum_squares = cuda::sum_squares,
      .finish_sample = cuda::finish_sample,
      .decode_plan_bytes = cuda::decode_plan_bytes,
      .norm_rope = cuda::norm_rope,
      .norm_rope_backward = cuda::norm_rope_backward,
  };
  return &table;
}

}  // namespace prl::ops
