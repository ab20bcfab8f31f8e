#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace prl::ops::cuda {

struct KvWriteParams {
  const void *k, *v;                ///< [T][Hkv][D]
  std::int64_t k_stride, v_stride;  ///< bytes from token to token
  void *k_cache, *v_cache;          ///< [blocks][Hkv][block_size][D]; the latter nullptr: without v
  const std::int32_t* slots;        ///< device memory, [T]; negative: skipped
  std::int32_t num_tokens, num_heads, head_bytes, block_size;
};
/// Everything 16-byte aligned.
void launch_kv_write(const KvWriteParams& p, cudaStream_t stream);

}  // namespace prl::ops::cuda
