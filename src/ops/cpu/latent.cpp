#include <cstring>
#include <type_traits>
#include <utility>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/linear_weight.hpp"
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

/// y_TV = x_TK W^T or x_TK W of each head, where W are `count` rows of `up` from `first` on in each of its N + V. In fp32, one head after
/// another: what this costs is little beside a layer's other products.
struct HeadProducts {
  const LinearWeight& up;
  std::int64_t num_heads, rows_apart, first, count;
  bool is_transposed;  ///< W^T: from L to `count` elements a head; else from `count` to L

  /// Head i's elements lie at x_step i and y_step i of their rows.
  void run(OpContext& ctx, TensorView y, std::int64_t y_step, ConstTensorView x, std::int64_t x_step) const {
    const std::int64_t T = x.shape.num_rows(), L = up.num_inputs();
    const std::int64_t K = is_transposed ? L : count, N = is_transposed ? count : L;
    const auto bytes = [](std::int64_t floats) { return aligned_bytes(static_cast<std::size_t>(floats) * sizeof(float)); };
    char* memory = static_cast<char*>(ctx.workspace->require(bytes(count * L) + bytes(T * K) + bytes(T * N) + matmul_bytes(ctx, T, K, N)));
    const auto take = [&](std::int64_t floats) { return reinterpret_cast<float*>(std::exchange(memory, memory + bytes(floats))); };
    float *const w = take(count * L), *const in = take(T * K), *const out = take(T * N);
    with_element_type(y.dtype, [&](auto element) {
      using T_ = decltype(element);
      for (std::int64_t i = 0; i < num_heads; ++i) {
        parallel_rows(ctx, count, L, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t n = begin; n < end; ++n) up.unpack_row(i * rows_apart + first + n, w + n * L);
        });
        parallel_rows(ctx, T, K, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t)
            for (std::int64_t k = 0; k < K; ++k) in[t * K + k] = as_float(row_of<T_>(x, t)[i * x_step + k]);
        });
        matmul_with(ctx, out, in, w, T, K, N, is_transposed, memory);
        parallel_rows(ctx, T, N, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t t = begin; t < end; ++t)
            for (std::int64_t n = 0; n < N; ++n) assign(row_of<T_>(y, t)[i * y_step + n], out[t * N + n]);
        });
      }
    });
  }
};

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

void latent_queries(OpContext& ctx, TensorView out_TE, TensorView key_TK, ConstTensorView q_TQ, ConstTensorView latent_TL,
                    ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& h, const RopeTable& rope,
                    ConstTensorView positions_T) {
  const std::int64_t H = h.num_heads, N = h.plain_dim, R = h.rotary_dim, L = up.num_inputs(), E = R + L;
  const std::int64_t num_rows = out_TE.shape.num_rows();
  with_element_type(out_TE.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_rows(ctx, num_rows, H * R + E, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t i = 0; i < H; ++i) order_pairs(row_of<T>(out_TE, t) + i * E, row_of<T>(q_TQ, t) + i * (N + R) + N, h);
        order_pairs(row_of<T>(key_TK, t), row_of<T>(rotary_TR, t), h);
        copy(row_of<T>(key_TK, t) + R, row_of<T>(latent_TL, t), L);
      }
    });
  });
  HeadProducts{up, H, N + h.value_dim, 0, N, /*is_transposed=*/false}.run(ctx, out_TE.columns(R, H * E - R), E, q_TQ, N + R);
  cpu::rope(ctx, out_TE.reshaped({num_rows, H, E}), H * E, positions_T, rope, /*inverse=*/false);
  cpu::rope(ctx, key_TK.reshaped({num_rows, 1, E}), E, positions_T, rope, /*inverse=*/false);
}

void latent_values(OpContext& ctx, TensorView y_TV, ConstTensorView x_TL, const LinearWeight& up, const LatentHeads& h) {
  HeadProducts{up, h.num_heads, h.plain_dim + h.value_dim, h.plain_dim, h.value_dim, /*is_transposed=*/true}.run(ctx, y_TV, h.value_dim,
                                                                                                                 x_TL, up.num_inputs());
}

}  // namespace prl::ops::cpu
