#include "ops/cuda/bodies.hpp"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/map.cuh"
#include "ops/cuda/sums.hpp"

namespace prl::ops::cuda {
namespace {

struct Add {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = in[0][i] + in[1][i];
  }
};

struct Swiglu {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = gated(in[0][i], in[1][i]);
  }
};

/// In: dout, gate, up. Out: dgate, dup.
struct SwigluBackward {
  __device__ void operator()(float (&out)[2][kVec], const float (&in)[3][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[0][i] = in[1][i];
      out[1][i] = in[2][i];
      gated_backward(in[0][i], out[0][i], out[1][i]);
    }
  }
};

struct Geglu {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = gelu_gated(in[0][i], in[1][i]);
  }
};

/// As SwigluBackward.
struct GegluBackward {
  __device__ void operator()(float (&out)[2][kVec], const float (&in)[3][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[0][i] = in[1][i];
      out[1][i] = in[2][i];
      gelu_gated_backward(in[0][i], out[0][i], out[1][i]);
    }
  }
};

struct Copy {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[1][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = in[0][i];
  }
};

struct Scale {
  float factor;
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[1][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = in[0][i] * factor;
  }
};

/// The two halves of [T, 2F] as [T, F] each.
template <typename View>
View half(const View& v, std::int64_t cols, int which) {
  return v.columns(which * cols, cols);
}

template <typename Body>
void with_any_float(DType dtype, Body&& body) {
  if (dtype == DType::kF16)
    body(__half{});
  else
    with_type(dtype, body);
}

/// Elements per sum in fp32; see the contract of sum_squares.
constexpr std::int64_t kSumChunk = 4096;
constexpr int kSumBlock = 128;

/// By all threads of a block: the sum of squares of elements [begin, end), for thread 0.
__device__ __forceinline__ float squares_of_chunk(const float* x, std::int64_t begin, std::int64_t end) {
  __shared__ float scratch[kSumBlock / kWarp];
  const bool wide = reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
  float sum = 0.0f;
  for (std::int64_t i = begin + threadIdx.x * kVec; i < end; i += kSumBlock * kVec) {
    float v[kVec];
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kVec), end - i));
    if (wide && count == kVec)
      load<true>(v, x + i, count);
    else
      load<false>(v, x + i, count);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum = fmaf(v[j], v[j], sum);
  }
  return block_sum(sum, scratch);
}
__global__ void __launch_bounds__(kSumBlock) chunk_squares_kernel(float* partial, const float* x, std::int64_t n) {
  const std::int64_t begin = blockIdx.x * kSumChunk;
  const float sum = squares_of_chunk(x, begin, min(n, begin + kSumChunk));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
/// A chunk of one of many tensors, and where its sum goes.
struct ChunkOfTensor {
  const float* x;
  std::int32_t count, at;
};
__global__ void __launch_bounds__(kSumBlock) squares_of_chunks_kernel(float* partial, const ChunkOfTensor* chunks) {
  const ChunkOfTensor chunk = chunks[blockIdx.x];
  const float sum = squares_of_chunk(chunk.x, 0, chunk.count);
  if (threadIdx.x == 0) partial[chunk.at] = sum;
}

constexpr int kTotalBlock = 1024;
__global__ void __launch_bounds__(kTotalBlock) total_kernel(double* total, const float* partial, std::int64_t count) {
  __shared__ double scratch[kTotalBlock / kWarp];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kTotalBlock) sum += static_cast<double>(partial[i]);
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *total = sum;
}

/// One thread takes 8 pairs of one head.
template <typename T>
__global__ void __launch_bounds__(kMapBlock)
    rope_kernel(T* x, std::int64_t token_stride, const std::int32_t* positions, const float* cosines, const float* sines,
                std::uint32_t total, int heads, int dim, int half, std::int64_t num_positions, bool inverse, bool wide,
                ::prl::cuda::FaultWord* fault) {
  const std::uint32_t v = blockIdx.x * kMapBlock + threadIdx.x;
  if (v >= total) return;
  const auto vectors = static_cast<std::uint32_t>((half + kVec - 1) / kVec);
  const std::uint32_t row = v / vectors, t = row / static_cast<std::uint32_t>(heads);
  const int i0 = static_cast<int>(v - row * vectors) * kVec, count = min(kVec, half - i0);
  const std::int32_t position = positions[t];
  if (position < 0 || position >= num_positions) {
    ::prl::cuda::report(fault, ::prl::cuda::Fault::kRopePosition, t);
    return;
  }
  T* head = x + t * token_stride + static_cast<std::int64_t>(row - t * static_cast<std::uint32_t>(heads)) * dim + i0;
  const float* c_row = cosines + static_cast<std::int64_t>(position) * half + i0;
  const float* s_row = sines + static_cast<std::int64_t>(position) * half + i0;
  float a[kVec], b[kVec], c[kVec], s[kVec], first[kVec], second[kVec];
  const auto rotate = [&](auto is_wide_row) {
    constexpr bool kWide = decltype(is_wide_row)::value;
    load<kWide>(a, head, count);
    load<kWide>(b, head + half, count);
    load<kWide>(c, c_row, count);
    load<kWide>(s, s_row, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float sine = inverse ? -s[i] : s[i];
      first[i] = fmaf(-b[i], sine, a[i] * c[i]);
      second[i] = fmaf(a[i], sine, b[i] * c[i]);
    }
    store<kWide>(head, first, count);
    store<kWide>(head + half, second, count);
  };
  if (wide)
    rotate(std::true_type{});
  else
    rotate(std::false_type{});
}

}  // namespace

void add(OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b) {
  with_type(out.dtype, [&](auto t) {
    using T = decltype(t);
    map<T, T, 1, 2>(ctx, {out}, {a, b}, Add{});
  });
}

namespace {

template <typename Gate>
void gate_rows(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F, Gate gate) {
  const std::int64_t F = out_TF.shape.num_cols();
  with_type(out_TF.dtype, [&](auto t) {
    using T = decltype(t);
    map<T, T, 1, 2>(ctx, {out_TF}, {half(gate_up_T2F, F, 0), half(gate_up_T2F, F, 1)}, gate);
  });
}

template <typename Gate>
void gate_rows_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F, Gate gate) {
  const std::int64_t F = dout_TF.shape.num_cols();
  with_type(dout_TF.dtype, [&](auto t) {
    using T = decltype(t);
    map<T, T, 2, 3>(ctx, {half(dgate_up_T2F, F, 0), half(dgate_up_T2F, F, 1)}, {dout_TF, half(gate_up_T2F, F, 0), half(gate_up_T2F, F, 1)},
                    gate);
  });
}

}  // namespace

void swiglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) { gate_rows(ctx, out_TF, gate_up_T2F, Swiglu{}); }
void swiglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  gate_rows_backward(ctx, dgate_up_T2F, dout_TF, gate_up_T2F, SwigluBackward{});
}
void geglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) { gate_rows(ctx, out_TF, gate_up_T2F, Geglu{}); }
void geglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  gate_rows_backward(ctx, dgate_up_T2F, dout_TF, gate_up_T2F, GegluBackward{});
}

void rope(OpContext& ctx, TensorView x_THD, std::int64_t token_stride, ConstTensorView positions_T, const RopeTable& table, bool inverse) {
  const std::int64_t T = x_THD.shape[0], heads = x_THD.shape[1], dim = x_THD.shape[2], pairs = table.num_pairs();
  const std::int64_t total = T * heads * ceil_div(pairs, kVec);
  PRL_CHECK(total < (std::int64_t{1} << 32) - kMapBlock, "rope over {} tokens of {} heads in one launch", T, heads);
  const bool wide = pairs % kVec == 0 && dim % kVec == 0 && is_aligned(x_THD.data, 16) &&
                    token_stride * static_cast<std::int64_t>(size_of(x_THD.dtype)) % 16 == 0;
  with_type(x_THD.dtype, [&](auto t) {
    using E = decltype(t);
    rope_kernel<E><<<static_cast<unsigned>(ceil_div(total, kMapBlock)), kMapBlock, 0, stream_of(ctx)>>>(
        x_THD.as<E>(), token_stride, positions_T.as<std::int32_t>(), table.cos_PR2.as<float>(), table.sin_PR2.as<float>(),
        static_cast<std::uint32_t>(total), static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(pairs),
        table.cos_PR2.shape()[0], inverse, wide, fault_word_of(ctx));
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void cast(OpContext& ctx, TensorView out, ConstTensorView x) {
  with_any_float(out.dtype,
                 [&](auto o) { with_any_float(x.dtype, [&](auto i) { map<decltype(o), decltype(i), 1, 1>(ctx, {out}, {x}, Copy{}); }); });
}

std::int64_t sum_squares_floats(std::int64_t n) { return round_up(ceil_div(n, kSumChunk), 2); }

void sum_squares_to(OpContext& ctx, double* total, float* scratch, const float* x, std::int64_t n) {
  const std::int64_t chunks = ceil_div(n, kSumChunk);
  chunk_squares_kernel<<<static_cast<unsigned>(chunks), kSumBlock, 0, stream_of(ctx)>>>(scratch, x, n);
  PRL_CUDA_CHECK(cudaGetLastError());
  total_kernel<<<1, kTotalBlock, 0, stream_of(ctx)>>>(total, scratch, chunks);
  PRL_CUDA_CHECK(cudaGetLastError());
}

double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs) {
  double* device_total = nullptr;
  float* scratch = nullptr;
  std::int64_t chunks = 0;
  for (const ConstTensorView& x : xs) chunks += ceil_div(x.shape.num_elements(), kSumChunk);
  const auto carve = [&](void* memory) {
    Carver c(memory);
    device_total = c.take<double>(1);
    scratch = c.take<float>(chunks);
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  std::int64_t at = 0;
  for (const ConstTensorView& x : xs) {
    const std::int64_t n = x.shape.num_elements();
    if (n == 0) continue;
    chunk_squares_kernel<<<static_cast<unsigned>(ceil_div(n, kSumChunk)), kSumBlock, 0, stream_of(ctx)>>>(scratch + at, x.as<float>(), n);
    PRL_CUDA_CHECK(cudaGetLastError());
    at += ceil_div(n, kSumChunk);
  }
  total_kernel<<<1, kTotalBlock, 0, stream_of(ctx)>>>(device_total, scratch, chunks);
  PRL_CUDA_CHECK(cudaGetLastError());
  double total = 0;
  ctx.runtime->copy_to_host(&total, device_total, sizeof total);
  return total;
}

void chunk_squares(OpContext& ctx, std::span<float> out_C, std::span<const ConstTensorView> xs) {
  static_assert(kSumChunk == kSquaresChunk);
  constexpr std::int64_t kFewChunks = 64;           // of tensors that share a launch: adapters have thousands
  constexpr std::size_t kChunksOfLaunch = 1 << 15;  // half a megabyte is staged for them
  float* partial = static_cast<float*>(ctx.workspace->require(out_C.size_bytes()));
  std::vector<ChunkOfTensor> shared;
  const auto launch_shared = [&] {
    if (shared.empty()) return;
    const ChunkOfTensor* chunks = staged(ctx, std::span<const ChunkOfTensor>(shared));
    squares_of_chunks_kernel<<<static_cast<unsigned>(shared.size()), kSumBlock, 0, stream_of(ctx)>>>(partial, chunks);
    PRL_CUDA_CHECK(cudaGetLastError());
    shared.clear();
  };
  std::int64_t at = 0;
  for (const ConstTensorView& x : xs) {
    const std::int64_t n = x.shape.num_elements(), chunks = ceil_div(n, kSumChunk);
    if (xs.size() > 1 && chunks <= kFewChunks) {
      for (std::int64_t c = 0; c < chunks; ++c)
        shared.push_back({x.as<float>() + c * kSumChunk, static_cast<std::int32_t>(std::min(kSumChunk, n - c * kSumChunk)),
                          static_cast<std::int32_t>(at + c)});
      if (shared.size() >= kChunksOfLaunch) launch_shared();
    } else if (chunks > 0) {
      chunk_squares_kernel<<<static_cast<unsigned>(chunks), kSumBlock, 0, stream_of(ctx)>>>(partial + at, x.as<float>(), n);
      PRL_CUDA_CHECK(cudaGetLastError());
    }
    at += chunks;
  }
  launch_shared();
  ctx.runtime->copy_to_host(out_C.data(), partial, out_C.size_bytes());
}

namespace {

constexpr int kScanBlock = 256;
constexpr unsigned kScanGrid = 2048;

__device__ bool is_not_finite(float value) { return !isfinite(value); }
__device__ bool is_not_finite(__nv_bfloat16 value) { return (__bfloat16_as_ushort(value) & 0x7f80u) == 0x7f80u; }

/// first = min(first, index of an element that is not finite).
template <typename T>
__global__ void __launch_bounds__(kScanBlock) find_not_finite_kernel(unsigned long long* first, const T* x, std::int64_t n) {
  constexpr int kPer = 16 / sizeof(T);
  const std::int64_t num_wide = reinterpret_cast<std::uintptr_t>(x) % 16 == 0 ? n / kPer : 0;
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(kScanBlock) + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kScanBlock;
  for (std::int64_t i = thread; i < num_wide; i += step) {
    const uint4 raw = reinterpret_cast<const uint4*>(x)[i];
    T values[kPer];
    memcpy(values, &raw, sizeof raw);
#pragma unroll
    for (int j = 0; j < kPer; ++j)
      if (is_not_finite(values[j])) atomicMin(first, static_cast<unsigned long long>(i * kPer + j));
  }
  for (std::int64_t i = num_wide * kPer + thread; i < n; i += step)
    if (is_not_finite(x[i])) atomicMin(first, static_cast<unsigned long long>(i));
}

}  // namespace

std::int64_t find_not_finite(OpContext& ctx, ConstTensorView x) {
  auto* first = static_cast<unsigned long long*>(ctx.workspace->require(sizeof(unsigned long long)));
  PRL_CUDA_CHECK(cudaMemsetAsync(first, 0xff, sizeof *first, stream_of(ctx)));
  const std::int64_t n = x.shape.num_elements();
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(kScanGrid, ceil_div(n, kScanBlock)));
  with_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    find_not_finite_kernel<T><<<grid, kScanBlock, 0, stream_of(ctx)>>>(first, x.as<T>(), n);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  unsigned long long found = 0;
  ctx.runtime->copy_to_host(&found, first, sizeof found);
  return static_cast<std::int64_t>(found);  // all bits set: -1
}

void scale(OpContext& ctx, TensorView x, float factor) { map<float, float, 1, 1>(ctx, {x}, {x}, Scale{factor}); }

}  // namespace prl::ops::cuda
