// Part of an instruction set's kernels: norms, activations, rotations, casts, optimizers over one row or chunk.
namespace prl::ops::cpu::PRL_SIMD {

constexpr int kLanes = Vec::kLanes;

/// body(offset, lanes) over [0, n): whole vectors, then one partial.
template <typename Body>
inline void for_vectors(std::int64_t n, Body body) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}
template <typename T>
inline Vec get(const T* p, int lanes) {
  return lanes == kLanes ? load(p) : load_n(p, lanes);
}
template <typename T>
inline void put(T* p, Vec v, int lanes) {
  if (lanes == kLanes)
    store(p, v);
  else
    store_n(p, v, lanes);
}

template <typename T>
void rms_norm_t(T* y, const T* x, const float* w, std::int64_t n, float eps) {
  Vec sum = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l);
    sum = fma(a, a, sum);
  });
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(n) + eps);
  for_vectors(n, [&](std::int64_t i, int l) { put(y + i, get(x + i, l) * set1(scale) * get(w + i, l), l); });
}

template <typename T>
void layer_norm_t(T* y, const T* x, const float* w, const float* b, std::int64_t n, float eps) {
  Vec sum = zero();
  for_vectors(n, [&](std::int64_t i, int l) { sum = sum + get(x + i, l); });
  const float mean = reduce_add(sum) / static_cast<float>(n);
  Vec squares = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    // What lies behind the end is zero, and is to add nothing.
    const Vec away = get(x + i, l) - set1(mean), there = l == kLanes ? away : select_first(l, away, zero());
    squares = fma(there, there, squares);
  });
  const Vec scale = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
  for_vectors(n, [&](std::int64_t i, int l) { put(y + i, fma((get(x + i, l) - set1(mean)) * scale, get(w + i, l), get(b + i, l)), l); });
}

template <typename T>
void rms_norm_backward_t(T* dx, float* dw, const T* dy, const T* x, const float* w, std::int64_t n, float eps, bool accumulate) {
  Vec squares = zero(), dots = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l);
    squares = fma(a, a, squares);
    dots = fma(get(dy + i, l) * get(w + i, l), a, dots);
  });
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps);
  const Vec s = set1(scale);
  const Vec k = set1(reduce_add(dots) * scale * scale * scale / static_cast<float>(n));
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l), g = get(dy + i, l);
    put(dw + i, fma(g, a * s, get(dw + i, l)), l);
    Vec d = fnma(k, a, g * get(w + i, l) * s);
    if (accumulate) d = get(dx + i, l) + d;
    put(dx + i, d, l);
  });
}

template <typename T>
void add_t(T* out, const T* a, const T* b, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, get(a + i, l) + get(b + i, l), l); });
}

template <typename T>
void swiglu_t(T* out, const T* gate, const T* up, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l);
    put(out + i, g * sigmoid(g) * get(up + i, l), l);
  });
}

template <typename T>
void swiglu_backward_t(T* dgate, T* dup, const T* dout, const T* gate, const T* up, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l), d = get(dout + i, l), u = get(up + i, l);
    const Vec s = sigmoid(g);
    const Vec silu = g * s;
    put(dup + i, d * silu, l);
    put(dgate + i, d * u * fma(silu, set1(1.0f) - s, s), l);
  });
}

/// GELU in its tanh form, x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3), and its slope.
struct Gelu {
  Vec value, slope;
  explicit Gelu(Vec x) {
    // Beyond 16 the sigmoid is 0 or 1, and the cube of a large x would be no finite number. Of a NaN the second operand remains.
    const Vec above = max(set1(-16.0f), x), near = min(set1(16.0f), above), square = near * near;
    const Vec twice = set1(1.59576912f), cubic = set1(0.07135481f);  // 2 sqrt(2 / pi), and 0.044715 of it
    const Vec s = sigmoid(near * fma(cubic, square, twice));
    value = above * s;
    slope = fma(near * s * (set1(1.0f) - s), fma(set1(3.0f) * cubic, square, twice), s);
  }
};

template <typename T>
void gelu_tanh_t(T* out, const T* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, Gelu(get(x + i, l)).value, l); });
}

template <typename T>
void squared_relu_t(T* out, const T* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec r = max(zero(), get(x + i, l));  // a NaN, the second operand, remains
    put(out + i, r * r, l);
  });
}
template <typename T>
void squared_relu_backward_t(T* dx, const T* dout, const T* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec r = max(zero(), get(x + i, l));
    put(dx + i, get(dout + i, l) * (r + r), l);
  });
}

template <typename T>
void geglu_t(T* out, const T* gate, const T* up, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, Gelu(get(gate + i, l)).value * get(up + i, l), l); });
}

template <typename T>
void geglu_backward_t(T* dgate, T* dup, const T* dout, const T* gate, const T* up, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec d = get(dout + i, l), u = get(up + i, l);
    const Gelu gelu(get(gate + i, l));
    put(dup + i, d * gelu.value, l);
    put(dgate + i, d * u * gelu.slope, l);
  });
}

/// What ops::ClampedGate makes of one gate and one up.
struct ClampedPair {
  Vec gate, up, gate_sigmoid;  ///< both clamped, `up` plus 1
  ClampedPair(Vec g, Vec u, float alpha, float limit)
      // Of a NaN the second operand remains.
      : gate(min(set1(limit), g)), up(min(set1(limit), max(set1(-limit), u)) + set1(1.0f)), gate_sigmoid(sigmoid(gate * set1(alpha))) {}
};

template <typename T>
void clamped_swiglu_t(T* out, const float* gate, const float* up, std::int64_t n, float alpha, float limit) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const ClampedPair p(get(gate + i, l), get(up + i, l), alpha, limit);
    put(out + i, p.gate * p.gate_sigmoid * p.up, l);
  });
}

template <typename T>
void clamped_swiglu_backward_t(float* gate, float* up, const T* dout, std::int64_t n, float alpha, float limit) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l), u = get(up + i, l), d = get(dout + i, l);
    const ClampedPair p(g, u, alpha, limit);
    const Vec slope = p.gate_sigmoid * fma(set1(alpha) * p.gate, set1(1.0f) - p.gate_sigmoid, set1(1.0f));
    const Vec at_most = set1(limit);
    put(gate + i, select_less(at_most, g, zero(), d * p.up * slope), l);
    put(up + i, select_less(at_most, u, zero(), select_less(u, set1(-limit), zero(), d * p.gate * p.gate_sigmoid)), l);
  });
}

template <typename T>
void rope_t(T* x, const float* cos, const float* sin, std::int64_t half, bool inverse) {
  for_vectors(half, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l), b = get(x + half + i, l), c = get(cos + i, l);
    const Vec s = inverse ? zero() - get(sin + i, l) : get(sin + i, l);
    put(x + i, fnma(b, s, a * c), l);
    put(x + half + i, fma(a, s, b * c), l);
  });
}

template <typename To, typename From>
void cast_t(To* out, const From* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, get(x + i, l), l); });
}

template <typename T>
void accumulate_t(float* acc, const T* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(acc + i, get(acc + i, l) + get(x + i, l), l); });
}

template <typename T>
void scale_row_t(T* out, const T* x, float factor, std::int64_t n) {
  const Vec f = set1(factor);
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, get(x + i, l) * f, l); });
}

template <typename T>
float dot_row_t(const T* a, const T* b, std::int64_t n) {
  Vec sum = zero();
  for_vectors(n, [&](std::int64_t i, int l) { sum = fma(get(a + i, l), get(b + i, l), sum); });
  return reduce_add(sum);
}

template <typename T>
float dot_weights_t(const T* x, const float* w, std::int64_t n) {
  Vec sum = zero();
  for_vectors(n, [&](std::int64_t i, int l) { sum = fma(get(x + i, l), get(w + i, l), sum); });
  return reduce_add(sum);
}

template <typename T>
void store_scaled_t(T* x, const float* w, float factor, std::int64_t n, bool accumulate) {
  const Vec f = set1(factor);
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec v = get(w + i, l);
    put(x + i, accumulate ? fma(f, v, get(x + i, l)) : f * v, l);
  });
}

template <typename T>
void accumulate_scaled_t(float* acc, const T* x, float factor, std::int64_t n) {
  const Vec f = set1(factor);
  for_vectors(n, [&](std::int64_t i, int l) { put(acc + i, fma(f, get(x + i, l), get(acc + i, l)), l); });
}

template <typename T>
void store_row_t(T* out, const float* c, const float* bias, std::int64_t n, bool accumulate) {
  for_vectors(n, [&](std::int64_t i, int l) {
    Vec a = get(c + i, l);
    if (bias != nullptr) a = a + get(bias + i, l);
    if (accumulate) a = get(out + i, l) + a;
    put(out + i, a, l);
  });
}

#define PRL_BY_DTYPE(dtype, call_f32, call_bf16) \
  if ((dtype) == DType::kBF16) {                 \
    call_bf16;                                   \
  } else {                                       \
    call_f32;                                    \
  }

inline float* f32(void* p) { return static_cast<float*>(p); }
inline const float* f32(const void* p) { return static_cast<const float*>(p); }
inline BFloat16* bf16(void* p) { return static_cast<BFloat16*>(p); }
inline const BFloat16* bf16(const void* p) { return static_cast<const BFloat16*>(p); }

void rms_norm(void* y, const void* x, const float* w, std::int64_t n, float eps, DType t) {
  PRL_BY_DTYPE(t, rms_norm_t(f32(y), f32(x), w, n, eps), rms_norm_t(bf16(y), bf16(x), w, n, eps))
}
void rms_norm_backward(void* dx, float* dw, const void* dy, const void* x, const float* w, std::int64_t n, float eps, bool accumulate,
                       DType t) {
  PRL_BY_DTYPE(t, rms_norm_backward_t(f32(dx), dw, f32(dy), f32(x), w, n, eps, accumulate),
               rms_norm_backward_t(bf16(dx), dw, bf16(dy), bf16(x), w, n, eps, accumulate))
}
void add(void* out, const void* a, const void* b, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, add_t(f32(out), f32(a), f32(b), n), add_t(bf16(out), bf16(a), bf16(b), n))
}
void swiglu(void* out, const void* gate, const void* up, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, swiglu_t(f32(out), f32(gate), f32(up), n), swiglu_t(bf16(out), bf16(gate), bf16(up), n))
}
void swiglu_backward(void* dgate, void* dup, const void* dout, const void* gate, const void* up, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, swiglu_backward_t(f32(dgate), f32(dup), f32(dout), f32(gate), f32(up), n),
               swiglu_backward_t(bf16(dgate), bf16(dup), bf16(dout), bf16(gate), bf16(up), n))
}
void layer_norm(void* y, const void* x, const float* w, const float* b, std::int64_t n, float eps, DType t) {
  PRL_BY_DTYPE(t, layer_norm_t(f32(y), f32(x), w, b, n, eps), layer_norm_t(bf16(y), bf16(x), w, b, n, eps))
}
void gelu_tanh(void* out, const void* x, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, gelu_tanh_t(f32(out), f32(x), n), gelu_tanh_t(bf16(out), bf16(x), n))
}
void squared_relu(void* out, const void* x, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, squared_relu_t(f32(out), f32(x), n), squared_relu_t(bf16(out), bf16(x), n))
}
void squared_relu_backward(void* dx, const void* dout, const void* x, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, squared_relu_backward_t(f32(dx), f32(dout), f32(x), n), squared_relu_backward_t(bf16(dx), bf16(dout), bf16(x), n))
}
void geglu(void* out, const void* gate, const void* up, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, geglu_t(f32(out), f32(gate), f32(up), n), geglu_t(bf16(out), bf16(gate), bf16(up), n))
}
void geglu_backward(void* dgate, void* dup, const void* dout, const void* gate, const void* up, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, geglu_backward_t(f32(dgate), f32(dup), f32(dout), f32(gate), f32(up), n),
               geglu_backward_t(bf16(dgate), bf16(dup), bf16(dout), bf16(gate), bf16(up), n))
}
void clamped_swiglu(void* out, const float* gate, const float* up, std::int64_t n, float alpha, float limit, DType t) {
  PRL_BY_DTYPE(t, clamped_swiglu_t(f32(out), gate, up, n, alpha, limit), clamped_swiglu_t(bf16(out), gate, up, n, alpha, limit))
}
void clamped_swiglu_backward(float* gate, float* up, const void* dout, std::int64_t n, float alpha, float limit, DType t) {
  PRL_BY_DTYPE(t, clamped_swiglu_backward_t(gate, up, f32(dout), n, alpha, limit),
               clamped_swiglu_backward_t(gate, up, bf16(dout), n, alpha, limit))
}
void rope(void* x, const float* cos, const float* sin, std::int64_t half, bool inverse, DType t) {
  PRL_BY_DTYPE(t, rope_t(f32(x), cos, sin, half, inverse), rope_t(bf16(x), cos, sin, half, inverse))
}
void cast(void* out, DType to, const void* x, DType from, std::int64_t n) {
  if (to == DType::kBF16) {
    PRL_BY_DTYPE(from, cast_t(bf16(out), f32(x), n), cast_t(bf16(out), bf16(x), n))
  } else {
    PRL_BY_DTYPE(from, cast_t(f32(out), f32(x), n), cast_t(f32(out), bf16(x), n))
  }
}
void accumulate(float* acc, const void* x, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, accumulate_t(acc, f32(x), n), accumulate_t(acc, bf16(x), n))
}
void scale_row(void* out, const void* x, float factor, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, scale_row_t(f32(out), f32(x), factor, n), scale_row_t(bf16(out), bf16(x), factor, n))
}
float dot_row(const void* a, const void* b, std::int64_t n, DType t) {
  return t == DType::kBF16 ? dot_row_t(bf16(a), bf16(b), n) : dot_row_t(f32(a), f32(b), n);
}
float dot_weights(const void* x, const float* w, std::int64_t n, DType t) {
  return t == DType::kBF16 ? dot_weights_t(bf16(x), w, n) : dot_weights_t(f32(x), w, n);
}
void store_scaled(void* x, const float* w, float factor, std::int64_t n, bool acc, DType t) {
  PRL_BY_DTYPE(t, store_scaled_t(f32(x), w, factor, n, acc), store_scaled_t(bf16(x), w, factor, n, acc))
}
void accumulate_scaled(float* acc, const void* x, float factor, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, accumulate_scaled_t(acc, f32(x), factor, n), accumulate_scaled_t(acc, bf16(x), factor, n))
}
void store_row(void* out, const float* c, const float* bias, std::int64_t n, bool acc, DType t) {
  PRL_BY_DTYPE(t, store_row_t(f32(out), c, bias, n, acc), store_row_t(bf16(out), c, bias, n, acc))
}

float sum_squares(const float* x, std::int64_t n) {
  Vec sum = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l);
    sum = fma(a, a, sum);
  });
  return reduce_add(sum);
}
void scale(float* x, float factor, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(x + i, get(x + i, l) * set1(factor), l); });
}

void adamw(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& a) {
  const Vec beta1 = set1(a.beta1), beta2 = set1(a.beta2), rest1 = set1(1.0f - a.beta1), rest2 = set1(1.0f - a.beta2);
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec d = get(g + i, l) * set1(a.grad_scale);
    const Vec m1 = fma(beta1, get(m + i, l), rest1 * d);
    const Vec v1 = fma(beta2, get(v + i, l), rest2 * d * d);
    put(m + i, m1, l);
    put(v + i, v1, l);
    const Vec denominator = fma(sqrt(v1), set1(a.inverse_sqrt_correction2), set1(a.eps));
    put(p + i, get(p + i, l) * set1(a.decay) - set1(a.step_size) * m1 / denominator, l);
  });
}
void sgd(float* p, float* buffer, const float* g, std::int64_t n, const SgdStep& a) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec w = get(p + i, l);
    Vec d = fma(set1(a.weight_decay), w, get(g + i, l) * set1(a.grad_scale));
    if (a.momentum != 0.0f) {
      const Vec b = a.first ? d : fma(set1(a.momentum), get(buffer + i, l), d);
      put(buffer + i, b, l);
      d = a.nesterov ? fma(set1(a.momentum), b, d) : b;
    }
    put(p + i, fnma(set1(a.lr), d, w), l);
  });
}
void sign_sgd(float* p, const float* g, std::int64_t n, float lr, float weight_decay) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec d = get(g + i, l), w = get(p + i, l);
    const Vec sign = select_less(zero(), d, set1(1.0f), select_less(d, zero(), set1(-1.0f), d));  // 0 and NaN pass through
    put(p + i, fnma(set1(lr), sign, fnma(set1(lr * weight_decay), w, w)), l);
  });
}
void axpby(float* out, float a, const float* x, float b, const float* y, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, fma(set1(a), get(x + i, l), set1(b) * get(y + i, l)), l); });
}
float read_sum(const float* x, std::int64_t n) {
  Vec s[8];
  for (Vec& v : s) v = zero();
  for (std::int64_t i = 0; i + 8 * kLanes <= n; i += 8 * kLanes)
    for (int j = 0; j < 8; ++j) s[j] = s[j] + load(x + i + j * kLanes);
  return reduce_add(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
}

ChunkStats chunk_stats(float* x, std::int64_t n, float temperature) {
  if (temperature != 1.0f) for_vectors(n, [&](std::int64_t i, int l) { put(x + i, get(x + i, l) / set1(temperature), l); });
  Vec top = set1(-__builtin_inff());
  for_vectors(n, [&](std::int64_t i, int l) { top = max(top, l == kLanes ? load(x + i) : load_n(x + i, l, -__builtin_inff())); });
  const float m = reduce_max(top);
  if (m == -__builtin_inff()) {
    // Banned, all of them, or NaN, which the maximum passes over and which must not pass for banned.
    for (std::int64_t i = 0; i < n; ++i)
      if (x[i] != x[i]) return {x[i], x[i], x[i]};
    return {m, 0.0f, 0.0f};
  }
  Vec sum = zero(), weighted = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec d = (l == kLanes ? load(x + i) : load_n(x + i, l, -__builtin_inff())) - set1(m);
    const Vec e = exp(d);
    sum = sum + e;
    weighted = fma(e, max(set1(-1e30f), d), weighted);  // 0 * -inf would be NaN
  });
  return {m, reduce_add(sum), reduce_add(weighted)};
}

void exponentials_row(float* out, const float* x, float shift, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, exp(get(x + i, l) - set1(shift)), l); });
}

template <typename T>
void softmax_gradient_t(T* out, const float* x, std::int64_t n, float temperature, float lse, float coefficient) {
  for_vectors(n, [&](std::int64_t i, int l) {
    Vec a = get(x + i, l);
    if (temperature != 1.0f) a = a / set1(temperature);
    put(out + i, set1(coefficient) * exp(a - set1(lse)), l);
  });
}
void softmax_gradient(void* out, const float* x, std::int64_t n, float temperature, float lse, float coefficient, DType t) {
  PRL_BY_DTYPE(t, softmax_gradient_t(f32(out), x, n, temperature, lse, coefficient),
               softmax_gradient_t(bf16(out), x, n, temperature, lse, coefficient))
}

}  // namespace prl::ops::cpu::PRL_SIMD
