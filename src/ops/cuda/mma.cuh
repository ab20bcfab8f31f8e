#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Matrix instructions of compute capability 8.0, one warp at a time. Names and fragments as in the PTX manual.

namespace prl::ops::cuda {

/// Four 8 x 8 matrices of bf16; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
/// d[16 x 8] += a[16 x 16] b[16 x 8].
__device__ __forceinline__ void multiply_add(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 bytes into shared memory, later; zeros if !exists.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// A matrix of kColumns in shared memory, rows padded so that eight of them start in different banks.
template <int kColumns>
struct PaddedMatrix {
  static constexpr int kPitch = kColumns + 8;
  static constexpr int kRowBytes = kPitch * 2;
  __nv_bfloat16* data;
  __device__ __forceinline__ __nv_bfloat16* at(int row, int column) const { return data + row * kPitch + column; }
  /// Left operand: rows [row, row + 16), columns [column, column + 16).
  __device__ __forceinline__ void left(std::uint32_t (&a)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(a, at(row + lane % 16, column + lane / 16 * 8));
  }
  /// Right operands of two products: d(m, n) sums over columns; n is rows [row, row + 8) with b[0], b[1] and the next 8 with b[2], b[3].
  __device__ __forceinline__ void right_rows(std::uint32_t (&b)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(b, at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8));
  }
  /// Right operands of two products: d(m, n) sums over rows [row, row + 16); n is columns [column, column + 8) and the next 8.
  __device__ __forceinline__ void right_columns(std::uint32_t (&b)[4], int row, int column) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices_transposed(b, at(row + lane % 16, column + lane / 16 * 8));
  }
};

}  // namespace prl::ops::cuda
