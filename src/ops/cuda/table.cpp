#include "ops/cuda_table.hpp"

#include "ops/cuda/bodies.hpp"

namespace prl::ops {

const OpTable* cuda_op_table() {
  static const OpTable table{
      .name = "cuda/" PRL_CUDA_ARCH_TEXT,
      // .attention_varlen = cuda::attention_varlen,
      // .attention_varlen_backward = cuda::attention_varlen_backward,
      // .kv_write = cuda::kv_write,
      // .attention_paged = cuda::attention_paged,
  };
  return &table;
}

}  // namespace prl::ops
