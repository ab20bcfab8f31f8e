#pragma once

#include <cuda.h>

#include <cstdint>

namespace prl::ops::cuda {

/// A view of bf16 memory for the tensor copy engine: three extents, innermost first and contiguous, and the box one copy takes.
struct MapShape {
  std::uint64_t extent[3];
  std::int64_t stride[2];  ///< elements between neighbours in the second and third extent; multiples of 8
  std::uint32_t box[3];    ///< box[0] is 64: a row of 128 bytes, which is swizzled
};
/// `data` is 16-byte aligned. Elements of a box outside the extents read as zero. Error{kShape} if the driver refuses the shape.
CUtensorMap tensor_map(const void* data, const MapShape& shape);

}  // namespace prl::ops::cuda
