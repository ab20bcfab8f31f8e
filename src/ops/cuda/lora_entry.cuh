#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/lora.hpp"

namespace prl::ops::cuda {

constexpr int kMaxLoraParts = 4;  ///< of a weight: q, k and v, or the four projections of linear attention

/// A LoraWeight as kernels read it.
struct LoraEntry {
  const __nv_bfloat16* a;  ///< [num_ranks, K]; null: adds nothing
  const __nv_bfloat16* b[kMaxLoraParts];
  int first_output[kMaxLoraParts], num_outputs[kMaxLoraParts], first_rank[kMaxLoraParts], rank[kMaxLoraParts];
  float scale[kMaxLoraParts];
  int num_parts;
};
/// Rows of A that a copy by LoraEntryMemory::a_map takes, 64 inputs of each.
constexpr int kLoraMapRows = 8;
/// An entry in memory.
struct LoraEntryMemory {
  LoraEntry entry;
  alignas(128) CUtensorMap a_map;  ///< of A [K / 64][num_ranks][64] with boxes [1][kLoraMapRows][64], where K is a multiple of 64
};
static_assert(sizeof(LoraEntryMemory) == kLoraEntryBytes && std::is_trivially_copyable_v<LoraEntryMemory>);

/// Values of A x in shared memory that `rank` ranks take: products of 16 ranks are those that begin at a multiple of 16, or two parts of up
/// to 8.
__host__ __device__ constexpr int padded_rank(int rank) { return rank <= 8 ? 8 : (rank + 15) / 16 * 16; }

/// Neighbouring values from `at` on that fill a Vector, zero from `end` on. `is_vector`: `row + at` is as aligned as a Vector and `end` a
/// multiple of their number.
template <typename Vector>
__device__ __forceinline__ Vector load_values(const __nv_bfloat16* row, int at, int end, bool is_vector) {
  if (is_vector) return at < end ? __ldg(reinterpret_cast<const Vector*>(row + at)) : Vector{};
  constexpr int kCount = sizeof(Vector) / 2;
  __nv_bfloat16 values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = at + i < end ? row[at + i] : __float2bfloat16_rn(0.0f);
  Vector out;
  memcpy(&out, values, sizeof out);
  return out;
}
__device__ __forceinline__ uint2 load_4(const __nv_bfloat16* row, int at, int end, bool is_vector) {
  return load_values<uint2>(row, at, end, is_vector);
}
__device__ __forceinline__ uint4 load_8(const __nv_bfloat16* row, int at, int end, bool is_vector) {
  return load_values<uint4>(row, at, end, is_vector);
}

}  // namespace prl::ops::cuda
