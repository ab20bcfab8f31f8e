#include "ops/cuda/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "base/error.hpp"
#include "device/cuda/check.hpp"

namespace prl::ops::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's function, found at run time: nothing links libcuda.
Encode encode() {
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    PRL_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
      fail(ErrorCode::kUnavailable, "[ops] the NVIDIA driver has no cuTensorMapEncodeTiled; install driver 525 or newer");
    return reinterpret_cast<Encode>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap tensor_map(const void* data, const MapShape& s) {
  CUtensorMap map{};
  const cuuint64_t extents[3] = {s.extent[0], s.extent[1], s.extent[2]};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(s.stride[0]) * 2, static_cast<cuuint64_t>(s.stride[1]) * 2};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), extents, strides, s.box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail(ErrorCode::kShape, "[ops] the tensor copy engine takes no view at {} of [{}, {}, {}], {} and {} elements apart", data, s.extent[2],
         s.extent[1], s.extent[0], s.stride[1], s.stride[0]);
  return map;
}

}  // namespace prl::ops::cuda
