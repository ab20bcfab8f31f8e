#pragma once

#include <cuda_runtime_api.h>

namespace prl::cuda {

/// Error{kUnavailable} (kOutOfMemory for memory) that names the call, the place and what CUDA says.
[[noreturn]] void call_failed(const char* call, const char* file, int line, cudaError_t status);

}  // namespace prl::cuda

/// Every CUDA call goes through this, and every kernel launch is followed by PRL_CUDA_CHECK(cudaGetLastError()).
#define PRL_CUDA_CHECK(call)                                           \
  do {                                                                 \
    const cudaError_t prl_status = (call);                             \
    if (prl_status != cudaSuccess) [[unlikely]]                        \
      ::prl::cuda::call_failed(#call, __FILE__, __LINE__, prl_status); \
  } while (false)
