#include <cstring>
#include <type_traits>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/row_access.hpp"

namespace prl::ops::cpu {
namespace {

template <typename F>
void with_element_type(DType dtype, const F& f) {
  if (dtype == DType::kF32)
    f(float{});
  else
    f(BFloat16{});
}

float as_float(float x) { return x; }
float as_float(BFloat16 x) { return to_f32(x); }
void assign(float& to, float x) { to = x; }
void assign(BFloat16& to, float x) { to = to_bf16(x); }

template <typename T>
void copy(T* to, const T* from, std::int64_t count) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
}
template <typename T>
void clear(T* to, std::int64_t count) {
  std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>(count) * sizeof(T));
}

/// Where element i of the rotated ones stands in the inputs.
std::int64_t place_of(const LatentHeads& h, std::int64_t i) {
  if (!h.are_pairs_neighbours) return i;
  const std::int64_t half = h.rotary_dim / 2;
  return i < half ? 2 * i : 2 * (i - half) + 1;
}

/// A head's rotated elements from the inputs' order, or back to it.
template <typename T>
void order_pairs(T* to, const T* from, const LatentHeads& h) {
  for (std::int64_t i = 0; i < h.rotary_dim; ++i) to[i] = from[place_of(h, i)];
}
template <typename T>
void restore_pairs(T* to, const T* from, const LatentHeads& h) {
  for (std::int64_t i = 0; i < h.rotary_dim; ++i) to[place_of(h, i)] = from[i];
}

}  // namespace

void latent_heads(OpContext& ctx, TensorView qkv_TE, ConstTensorView q_TQ, ConstTensorView up_TU, ConstTensorView rotary_TR,
                  const LatentHeads& h) {
  const std::int64_t H = h.num_heads, D = h.head_dim, N = h.plain_dim, R = h.rotary_dim, V = h.value_dim;
  with_element_type(qkv_TE.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_rows(ctx, qkv_TE.shape.num_rows(), 3 * H * D, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        T* out = row_of<T>(qkv_TE, t);
        const T *q = row_of<T>(q_TQ, t), *up = row_of<T>(up_TU, t), *rotary = row_of<T>(rotary_TR, t);
        for (std::int64_t i = 0; i < H; ++i) {
          T *to_q = out + i * D, *to_k = to_q + H * D, *to_v = to_k + H * D;
          const T *from_q = q + i * (N + R), *from_up = up + i * (N + V);
          order_pairs(to_q, from_q + N, h);
          copy(to_q + R, from_q, N);
          clear(to_q + N + R, D - N - R);
          order_pairs(to_k, rotary, h);
          copy(to_k + R, from_up, N);
          clear(to_k + N + R, D - N - R);
          copy(to_v, from_up + N, V);
          clear(to_v + V, D - V);
        }
      }
    });
  });
}

void latent_heads_backward(OpContext& ctx, TensorView dq_TQ, TensorView dup_TU, TensorView drotary_TR, ConstTensorView dqkv_TE,
                           const LatentHeads& h) {
  const std::int64_t H = h.num_heads, D = h.head_dim, N = h.plain_dim, R = h.rotary_dim, V = h.value_dim;
  with_element_type(dqkv_TE.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_rows(ctx, dqkv_TE.shape.num_rows(), 3 * H * D, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const T* d = row_of<T>(dqkv_TE, t);
        for (std::int64_t i = 0; i < H && dq_TQ.data != nullptr; ++i) {
          T* to = row_of<T>(dq_TQ, t) + i * (N + R);
          copy(to, d + i * D + R, N);
          restore_pairs(to + N, d + i * D, h);
        }
        for (std::int64_t i = 0; i < H && dup_TU.data != nullptr; ++i) {
          T* to = row_of<T>(dup_TU, t) + i * (N + V);
          copy(to, d + (H + i) * D + R, N);
          copy(to + N, d + (2 * H + i) * D, V);
        }
        if (drotary_TR.data == nullptr) continue;
        T* to = row_of<T>(drotary_TR, t);
        for (std::int64_t r = 0; r < R; ++r) {
          float sum = 0.0f;
          for (std::int64_t i = 0; i < H; ++i) sum += as_float(d[(H + i) * D + r]);
          assign(to[place_of(h, r)], sum);
        }
      }
    });
  });
}

void narrow_heads(OpContext& ctx, TensorView y_TV, ConstTensorView x_TQ, const LatentHeads& h) {
  with_element_type(y_TV.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_rows(ctx, y_TV.shape.num_rows(), h.num_heads * h.head_dim, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t i = 0; i < h.num_heads; ++i)
          copy(row_of<T>(y_TV, t) + i * h.value_dim, row_of<T>(x_TQ, t) + i * h.head_dim, h.value_dim);
    });
  });
}

void narrow_heads_backward(OpContext& ctx, TensorView dx_TQ, ConstTensorView dy_TV, const LatentHeads& h) {
  with_element_type(dx_TQ.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_rows(ctx, dx_TQ.shape.num_rows(), h.num_heads * h.head_dim, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t i = 0; i < h.num_heads; ++i) {
          T* to = row_of<T>(dx_TQ, t) + i * h.head_dim;
          copy(to, row_of<T>(dy_TV, t) + i * h.value_dim, h.value_dim);
          clear(to + h.value_dim, h.head_dim - h.value_dim);
        }
      }
    });
  });
}

}  // namespace prl::ops::cpu
