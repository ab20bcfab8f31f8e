#pragma once

#include <cuda.h>

#include <cstdint>

namespace prl::ops::cuda {

/// A view of bf16 memory for the tensor copy engine: extents, innermost first and contiguous, and the box one copy takes.
template <int kRank>
struct MapShapeOf {
  std::uint64_t extent[kRank];
  std::int64_t stride[kRank - 1];  ///< elements between neighbours in the second extent and those after it; multiples of 8
  std::uint32_t box[kRank];        ///< box[0] is 64: a row of 128 bytes, which is swizzled
};
using MapShape = MapShapeOf<3>;
/// `data` is 16-byte aligned. Elements of a box outside the extents read as zero. Error{kShape} if the driver refuses the shape.
CUtensorMap tensor_map(const void* data, const MapShape& shape);
CUtensorMap tensor_map_5(const void* data, const MapShapeOf<5>& shape);
/// The same for memory of 4 bytes an element, which a copy leaves as it lies: strides are multiples of 4, box[0] is any.
CUtensorMap words_map(const void* data, const MapShape& shape);
CUtensorMap words_map_5(const void* data, const MapShapeOf<5>& shape);
/// A matrix [rows, K], K a multiple of 64, as [K / 64][rows][64] with boxes [box_blocks][box_rows][64]. Nothing is said about the stride of
/// a single row.
CUtensorMap rows_map(const void* data, std::int64_t rows, std::int64_t K, std::int64_t stride, int box_rows, int box_blocks);
/// The same of any K that is a multiple of 8, as [1][rows][K] with boxes [1][box_rows][64]: beyond K is zero.
CUtensorMap whole_rows_map(const void* data, std::int64_t rows, std::int64_t K, std::int64_t stride, int box_rows);
/// Rows of 128 bytes, one after the other, which a copy of box_rows of them leaves as they lie: [1][rows][64] of two bytes each. A plain
/// copy of bytes would do, but racecheck takes what such a copy writes over for still being read, whatever was waited for.
CUtensorMap unswizzled_rows_map(const void* data, std::int64_t rows, int box_rows);

}  // namespace prl::ops::cuda
