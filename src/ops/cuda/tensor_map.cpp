#include "ops/cuda/tensor_map.hpp"

#include <cuda_runtime_api.h>
#include <fmt/ranges.h>

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

struct Elements {
  CUtensorMapDataType type;
  int bytes;
};
constexpr Elements kBf16{CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2}, kWords{CU_TENSOR_MAP_DATA_TYPE_UINT32, 4};

template <int kRank>
CUtensorMap make_map(const void* data, const MapShapeOf<kRank>& s, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                     Elements elements = kBf16) {
  CUtensorMap map{};
  cuuint64_t extents[kRank], strides[kRank - 1];
  cuuint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = s.extent[i];
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(s.stride[i - 1]) * static_cast<cuuint64_t>(elements.bytes);
  }
  const CUresult result =
      encode()(&map, elements.type, kRank, const_cast<void*>(data), extents, strides, s.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail(ErrorCode::kShape, "[ops] the tensor copy engine takes no view at {} of extents {}, {} elements apart (innermost first)", data,
         fmt::join(s.extent, ", "), fmt::join(s.stride, ", "));
  return map;
}

}  // namespace

CUtensorMap tensor_map(const void* data, const MapShape& s) { return make_map(data, s); }
CUtensorMap tensor_map_5(const void* data, const MapShapeOf<5>& s) { return make_map(data, s); }
CUtensorMap words_map(const void* data, const MapShape& s) { return make_map(data, s, CU_TENSOR_MAP_SWIZZLE_NONE, kWords); }
CUtensorMap words_map_5(const void* data, const MapShapeOf<5>& s) { return make_map(data, s, CU_TENSOR_MAP_SWIZZLE_NONE, kWords); }

CUtensorMap rows_map(const void* data, std::int64_t rows, std::int64_t K, std::int64_t stride, int box_rows, int box_blocks) {
  constexpr std::int64_t kBlock = 64;
  return tensor_map(data,
                    {{static_cast<std::uint64_t>(kBlock), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(K / kBlock)},
                     {rows == 1 ? K : stride, kBlock},
                     {static_cast<std::uint32_t>(kBlock), static_cast<std::uint32_t>(box_rows), static_cast<std::uint32_t>(box_blocks)}});
}

CUtensorMap whole_rows_map(const void* data, std::int64_t rows, std::int64_t K, std::int64_t stride, int box_rows) {
  const std::int64_t apart = rows == 1 ? K : stride;
  return tensor_map(data, {{static_cast<std::uint64_t>(K), static_cast<std::uint64_t>(rows), 1},
                           {apart, rows * apart},
                           {64, static_cast<std::uint32_t>(box_rows), 1}});
}

CUtensorMap unswizzled_rows_map(const void* data, std::int64_t rows, int box_rows) {
  return make_map<3>(data, {{64, static_cast<std::uint64_t>(rows), 1}, {64, 64 * rows}, {64, static_cast<std::uint32_t>(box_rows), 1}},
                     CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace prl::ops::cuda
