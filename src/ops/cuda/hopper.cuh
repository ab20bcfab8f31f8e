#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

// Instructions of compute capability 9.0 that CUDA C++ has no name for: transaction barriers, the tensor copy engine, products of
// a warpgroup. Names and operands as in the PTX manual. Code that uses them lies inside #if PRL_HOPPER.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PRL_HOPPER 1
#else
#define PRL_HOPPER 0
#endif

namespace prl::ops::cuda::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

#if PRL_HOPPER

// Barriers ------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// One lane for all of its warp, after what any of them did before.
__device__ __forceinline__ void arrive_once_per_warp(std::uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
/// Arrives, and lets the phase wait for so many bytes of copies besides.
__device__ __forceinline__ void barrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
/// Until the phase of this parity has ended. A fresh barrier counts as having ended parity 1.
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
/// Ordinary writes to shared memory before it are seen by copies and warpgroup products after it.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A ring of buffers that one side fills and the other empties; both walk it in the same order.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  /// `count` places further, at most kSlots.
  __device__ __forceinline__ RingPlace ahead(int count) const {
    const int at = slot + count;
    return at < kSlots ? RingPlace{at, phase} : RingPlace{at - kSlots, phase ^ 1};
  }
};

// Copies --------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}
/// The box at (x, y, z), innermost first; `barrier` counts its bytes, those outside the tensor (read as zero) too.
/// Before copies by a map that lies in device memory and was written there.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, std::uint64_t* barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// How long the second-level cache keeps what a copy loads.
using CachePolicy = std::uint64_t;
/// For data that is read once: evicted first.
__device__ __forceinline__ CachePolicy read_once() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, std::uint64_t* barrier, CachePolicy policy, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;" ::
          "r"(shared_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, std::uint64_t* barrier, CachePolicy policy, int x, int y, int z,
                                         int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], "
      "%3;" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
      : "memory");
}

/// The box at (x, y, z) from shared memory, where others have written it and passed async_fence(); what lies outside the tensor stays. By
/// one thread, which then waits for it.
__device__ __forceinline__ void store_box(const void* from, const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// Until shared memory that this thread's boxes were stored from may be written again.
__device__ __forceinline__ void stored_boxes_are_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Until they are all in memory.
__device__ __forceinline__ void stored_boxes_are_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Four matrices of 8 x 8 bf16 go to shared memory: of matrix i a lane has row lane / 4, columns 2 (lane % 4) and the next in words[i], and
/// lane 8 i + j says where its row j lies.
__device__ __forceinline__ void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Registers -----------------------------------------------------------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Products of a warpgroup ---------------------------------------------------------------------------------------------------------
//
// Operands in shared memory are bf16 in blocks of [rows][64], 128 bytes a row, 1,024-byte aligned, swizzled by 128 bytes: what the
// copy engine writes for a box 64 elements wide. A matrix with more columns is several such blocks. Groups of 8 rows may lie
// further apart than their 1,024 bytes: `group_bytes`.

/// What all lanes of a warp hold, said so that the compiler believes it: it then forms operands' addresses in registers of the warp, side
/// by side with the products, in place of carrying each there from a lane's.
__device__ __forceinline__ std::uint32_t same_in_warp(std::uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

/// The k16 steps run along the 64 columns of a row: step s of a block starts at s * 32 bytes.
__device__ __forceinline__ std::uint64_t along_rows(std::uint32_t address, std::uint32_t group_bytes = 1024) {
  return (static_cast<std::uint64_t>(1) << 62) | (static_cast<std::uint64_t>(group_bytes >> 4) << 32) |
         (static_cast<std::uint64_t>(1) << 16) | ((address & 0x3ffff) >> 4);
}
/// The k16 steps run down the rows: step s starts at s * 2 groups; the next 64 output columns lie `block_bytes` further.
__device__ __forceinline__ std::uint64_t down_rows(std::uint32_t address, std::uint32_t block_bytes, std::uint32_t group_bytes = 1024) {
  return (static_cast<std::uint64_t>(1) << 62) | (static_cast<std::uint64_t>(group_bytes >> 4) << 32) |
         (static_cast<std::uint64_t>(block_bytes >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// What comes after waits for these sums of weights, neither of which is negative: the assembler moves a wait for products up, over
/// arithmetic that it does not depend on. The pause is never taken.
__device__ __forceinline__ void known_before_waits(float a, float b) {
  asm volatile("{\n.reg .pred p, q;\nsetp.lt.f32 p, %0, 0f00000000;\nsetp.lt.or.f32 q, %1, 0f00000000, p;\n@q nanosleep.u32 0;\n}" ::"f"(a),
               "f"(b)
               : "memory");
}

/// Keeps the compiler from moving reads and writes of registers across the products that use them.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define PRL_D8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PRL_D32(d, i) PRL_D8(d, i), PRL_D8(d, i + 8), PRL_D8(d, i + 16), PRL_D8(d, i + 24)
#define PRL_R32                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PRL_R64                                                                        \
  PRL_R32                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define PRL_R96                                                                        \
  PRL_R64                                                                              \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define PRL_R128                                                                               \
  PRL_R96                                                                                      \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"

/// d[64 x N] = (accumulate ? d : 0) + A B over one k16 step. Warp w holds rows 16 w to 16 w + 15; d[4 j + e] of a lane is row
/// lane / 4 (+ 8 for e >= 2), column 8 j + 2 (lane % 4) + e % 2. A: along_rows, or down_rows with kLeftDown = 1. B: along_rows (kDown = 0)
/// or down_rows (1).
template <int kDown, int kLeftDown = 0>
__device__ __forceinline__ void product(float (&d)[4], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %8, %7;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown), "n"(kLeftDown));
}
template <int kDown>
__device__ __forceinline__ void product(float (&d)[8], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, %11;\n}"
      : PRL_D8(d, 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown));
}
template <int kDown, int kLeftDown = 0>
__device__ __forceinline__ void product(float (&d)[16], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, "
      "%17, p, 1, 1, %20, %19;\n}"
      : PRL_D8(d, 0), PRL_D8(d, 8)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown), "n"(kLeftDown));
}
template <int kDown>
__device__ __forceinline__ void product(float (&d)[32], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PRL_R32 "}, %32, %33, p, 1, 1, 0, %35;\n}"
      : PRL_D32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown));
}
template <int kDown>
__device__ __forceinline__ void product(float (&d)[64], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PRL_R64 "}, %64, %65, p, 1, 1, 0, %67;\n}"
      : PRL_D32(d, 0), PRL_D32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown));
}
template <int kDown>
__device__ __forceinline__ void product(float (&d)[96], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" PRL_R96 "}, %96, %97, p, 1, 1, 0, %99;\n}"
      : PRL_D32(d, 0), PRL_D32(d, 32), PRL_D32(d, 64)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown));
}
template <int kDown, int kLeftDown = 0>
__device__ __forceinline__ void product(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PRL_R128 "}, %128, %129, p, 1, 1, %132, %131;\n}"
      : PRL_D32(d, 0), PRL_D32(d, 32), PRL_D32(d, 64), PRL_D32(d, 96)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kDown), "n"(kLeftDown));
}
/// A from registers: a[0..3] as mma.m16n8k16 has them.
template <int kDown>
__device__ __forceinline__ void product(float (&d)[32], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PRL_R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : PRL_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kDown));
}
template <int kDown>
__device__ __forceinline__ void product(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PRL_R64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : PRL_D32(d, 0), PRL_D32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kDown));
}

/// The same of E4M3 numbers over one k32 step, of which 128 bytes make a row of a block as well; both along_rows.
__device__ __forceinline__ void product_of_codes(float (&d)[4], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void product_of_codes(float (&d)[8], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;\n}"
      : PRL_D8(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void product_of_codes(float (&d)[16], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, "
      "%17, p, 1, 1;\n}"
      : PRL_D8(d, 0), PRL_D8(d, 8)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void product_of_codes(float (&d)[32], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PRL_R32 "}, %32, %33, p, 1, 1;\n}"
      : PRL_D32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void product_of_codes(float (&d)[64], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" PRL_R64 "}, %64, %65, p, 1, 1;\n}"
      : PRL_D32(d, 0), PRL_D32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

/// Of products whose left operand has the columns of the result, and the right its rows, d[i] and d[i + 1] are two rows of one column.
/// Lanes whose columns are neighbours exchange halves, so that each has a pair that lies together in a row of the result.
__device__ __forceinline__ std::uint32_t pair_of(float even_row, float odd_row, bool is_odd_column) {
  const float other = __shfl_xor_sync(0xffffffffu, is_odd_column ? even_row : odd_row, 4);
  const __nv_bfloat162 pair = is_odd_column ? __floats2bfloat162_rn(other, odd_row) : __floats2bfloat162_rn(even_row, other);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

#undef PRL_D8
#undef PRL_D32
#undef PRL_R32
#undef PRL_R64
#undef PRL_R96
#undef PRL_R128

#endif  // PRL_HOPPER

}  // namespace prl::ops::cuda::hopper
