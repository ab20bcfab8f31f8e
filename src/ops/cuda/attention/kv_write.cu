#include "ops/cuda/attention/kv_write.hpp"

#include "device/cuda/check.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kWriteThreads = 256;

/// One thread per 16 bytes of k and the same of v.
__global__ void __launch_bounds__(kWriteThreads) kv_write_kernel(const __grid_constant__ KvWriteParams p) {
  const int pieces = p.head_bytes / 16, per_token = pieces * p.num_heads;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWriteThreads + threadIdx.x;
  const std::int64_t token = i / per_token;
  if (token >= p.num_tokens) return;
  const int slot = p.slots[token];
  if (slot < 0) return;
  const int within = static_cast<int>(i % per_token), head = within / pieces, piece = within % pieces;
  const std::int64_t to =
      ((static_cast<std::int64_t>(slot / p.block_size) * p.num_heads + head) * p.block_size + slot % p.block_size) * pieces + piece;
  const auto from = [&](const void* base, std::int64_t stride) {
    return reinterpret_cast<const uint4*>(static_cast<const char*>(base) + token * stride)[within];
  };
  static_cast<uint4*>(p.k_cache)[to] = from(p.k, p.k_stride);
  if (p.v_cache != nullptr) static_cast<uint4*>(p.v_cache)[to] = from(p.v, p.v_stride);
}

}  // namespace

void launch_kv_write(const KvWriteParams& p, cudaStream_t stream) {
  const std::int64_t threads = static_cast<std::int64_t>(p.num_tokens) * p.num_heads * (p.head_bytes / 16);
  if (threads == 0) return;
  kv_write_kernel<<<static_cast<unsigned>((threads + kWriteThreads - 1) / kWriteThreads), kWriteThreads, 0, stream>>>(p);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
