// Part of an instruction set's kernels: the gated delta rule, state spaces, and the causal convolution before them.
namespace prl::ops::cpu::PRL_SIMD {

/// Vectors of a tile of states: sums of so many columns fill the units that add.
constexpr int kDeltaVectors = 4;
constexpr int kDeltaCols = kDeltaVectors * kLanes;

/// ln(1 + e^x). With z = e^-|x| it is max(x, 0) + 2 artanh(z / (2 + z)), whose series has an error of 1e-9 of itself at z = 1.
inline Vec softplus(Vec x) {
  const Vec z = exp(min(x, zero() - x));
  const Vec s = z / (set1(2.0f) + z), s2 = s * s;
  Vec p = set1(1.0f / 15.0f);
  for (const float c : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f}) p = fma(p, s2, set1(c));
  return fma(s + s, p, max(x, zero()));
}

template <typename T>
void delta_gates_t(float* decay, float* beta, const T* a, const T* b, const float* rate, const float* bias, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec log_decay = (zero() - exp(get(rate + i, l))) * softplus(get(a + i, l) + get(bias + i, l));
    put(decay + i, exp(log_decay), l);
    put(beta + i, sigmoid(get(b + i, l)), l);
  });
}
void delta_gates(float* decay, float* beta, const void* a, const void* b, const float* rate, const float* bias, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, delta_gates_t(decay, beta, f32(a), f32(b), rate, bias, n), delta_gates_t(decay, beta, bf16(a), bf16(b), rate, bias, n))
}

template <typename T>
void delta_gates_backward_t(const DeltaGatesGrad& g, std::int64_t n) {
  const T *a = static_cast<const T*>(g.a), *b = static_cast<const T*>(g.b);
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec beta = sigmoid(get(b + i, l)), x = get(a + i, l) + get(g.bias + i, l), rate = zero() - exp(get(g.rate + i, l));
    const Vec dlog_decay = get(g.dlog_decay + i, l), dx = dlog_decay * rate * sigmoid(x);
    put(static_cast<T*>(g.db) + i, get(g.dbeta + i, l) * (beta * (set1(1.0f) - beta)), l);
    put(static_cast<T*>(g.da) + i, dx, l);
    put(g.drate + i, fma(dlog_decay, rate * softplus(x), get(g.drate + i, l)), l);
    put(g.dbias + i, get(g.dbias + i, l) + dx, l);
  });
}
void delta_gates_backward(const DeltaGatesGrad& g, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, delta_gates_backward_t<float>(g, n), delta_gates_backward_t<BFloat16>(g, n))
}

template <typename T>
void state_gates_t(float* decay, float* step, const T* a, const float* rate, const float* bias, const StepLimits& limits, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec s = min(set1(limits.max), max(set1(limits.min), softplus(get(a + i, l) + get(bias + i, l))));
    put(decay + i, exp((zero() - exp(get(rate + i, l))) * s), l);
    put(step + i, s, l);
  });
}
void state_gates(float* decay, float* step, const void* a, const float* rate, const float* bias, const StepLimits& limits, std::int64_t n,
                 DType t) {
  PRL_BY_DTYPE(t, state_gates_t(decay, step, f32(a), rate, bias, limits, n), state_gates_t(decay, step, bf16(a), rate, bias, limits, n))
}

template <typename T>
void state_gates_backward_t(const DeltaGatesGrad& g, const StepLimits& limits, std::int64_t n) {
  const T* a = static_cast<const T*>(g.a);
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec x = get(a + i, l) + get(g.bias + i, l), free = softplus(x), rate = zero() - exp(get(g.rate + i, l));
    const Vec step = min(set1(limits.max), max(set1(limits.min), free)), dlog_decay = get(g.dlog_decay + i, l);
    alignas(64) float dx[kLanes], steps[kLanes];
    store(dx, fma(dlog_decay, rate, get(g.dbeta + i, l)) * sigmoid(x));
    store(steps, free);
    for (int j = 0; j < kLanes; ++j)
      if (!(steps[j] > limits.min && steps[j] < limits.max)) dx[j] = 0.0f;
    put(static_cast<T*>(g.da) + i, load(dx), l);
    put(g.drate + i, fma(dlog_decay, rate * step, get(g.drate + i, l)), l);
    put(g.dbias + i, get(g.dbias + i, l) + load(dx), l);
  });
}
void state_gates_backward(const DeltaGatesGrad& g, const StepLimits& limits, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, state_gates_backward_t<float>(g, limits, n), state_gates_backward_t<BFloat16>(g, limits, n))
}

constexpr float kUnitEps = 1e-6f;

template <typename T>
void unit_row_t(float* out, const T* x, float factor, std::int64_t n) {
  const Vec scale = set1(factor / __builtin_sqrtf(dot_row_t(x, x, n) + kUnitEps));
  for_vectors(n, [&](std::int64_t i, int l) { put(out + i, get(x + i, l) * scale, l); });
}
void unit_row(float* out, const void* x, float factor, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, unit_row_t(out, f32(x), factor, n), unit_row_t(out, bf16(x), factor, n))
}
template <typename T>
void unit_row_backward_t(T* dx, const T* x, const float* dout, float factor, std::int64_t n) {
  Vec squares = zero(), dots = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec v = get(x + i, l);
    squares = fma(v, v, squares);
    dots = fma(get(dout + i, l), v, dots);
  });
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) + kUnitEps);
  const Vec k = set1(reduce_add(dots) * scale * scale), s = set1(factor * scale);
  for_vectors(n, [&](std::int64_t i, int l) { put(dx + i, fnma(k, get(x + i, l), get(dout + i, l)) * s, l); });
}
void unit_row_backward(void* dx, const void* x, const float* dout, float factor, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, unit_row_backward_t(f32(dx), f32(x), dout, factor, n), unit_row_backward_t(bf16(dx), bf16(x), dout, factor, n))
}

/// What the state decayed to and what a token adds to it: to = P = decay * from, r = P^T k.
template <int kV>
inline void decay_state(float* to, std::int64_t to_stride, const float* from, std::int64_t from_stride, const float* k, int key_dim,
                        float decay, Vec (&r)[kV]) {
  for (Vec& v : r) v = zero();
  const Vec factor = set1(decay);
  for (int i = 0; i < key_dim; ++i, to += to_stride, from += from_stride) {
    const Vec key = set1(k[i]);
    for (int v = 0; v < kV; ++v) {
      const Vec p = load(from + v * kLanes) * factor;
      store(to + v * kLanes, p);
      r[v] = fma(key, p, r[v]);
    }
  }
}

/// to = P = decay * from.
template <int kV>
inline void shrink_state(float* to, std::int64_t to_stride, const float* from, std::int64_t from_stride, int key_dim, float decay) {
  const Vec factor = set1(decay);
  for (int i = 0; i < key_dim; ++i, to += to_stride, from += from_stride)
    for (int v = 0; v < kV; ++v) store(to + v * kLanes, load(from + v * kLanes) * factor);
}

template <int kV, bool kHasOut, typename T>
void state_space_t(const DeltaTile& a) {
  for (std::int64_t t = 0; t < a.num_tokens; ++t) {
    const float *q = a.q + t * a.key_dim, *k = a.k + t * a.key_dim;
    const T* value = static_cast<const T*>(a.v) + t * a.v_stride;
    const Vec step = set1(a.beta[t * a.gate_stride]), factor = set1(a.decay[t * a.gate_stride]), skip = set1(a.skip);
    Vec d[kV], o[kV];
    for (int v = 0; v < kV; ++v) {
      d[v] = step * load(value + v * kLanes);
      o[v] = zero();
    }
    float* row = a.state;
    for (int i = 0; i < a.key_dim; ++i, row += a.state_stride) {
      const Vec key = set1(k[i]), query = set1(q[i]);
      for (int v = 0; v < kV; ++v) {
        const Vec s = fma(key, d[v], load(row + v * kLanes) * factor);
        store(row + v * kLanes, s);
        if constexpr (kHasOut) o[v] = fma(query, s, o[v]);
      }
    }
    if constexpr (kHasOut)
      for (int v = 0; v < kV; ++v) store(static_cast<T*>(a.out) + t * a.out_stride + v * kLanes, fma(skip, load(value + v * kLanes), o[v]));
  }
}

template <int kV, bool kHasOut, typename T>
void delta_rule_t(const DeltaTile& a) {
  for (std::int64_t t = 0; t < a.num_tokens; ++t) {
    const float *q = a.q + t * a.key_dim, *k = a.k + t * a.key_dim;
    const T* value = static_cast<const T*>(a.v) + t * a.v_stride;
    Vec r[kV], d[kV], o[kV];
    decay_state<kV>(a.state, a.state_stride, a.state, a.state_stride, k, a.key_dim, a.decay[t * a.gate_stride], r);
    const Vec beta = set1(a.beta[t * a.gate_stride]);
    for (int v = 0; v < kV; ++v) {
      d[v] = beta * (load(value + v * kLanes) - r[v]);
      o[v] = zero();
    }
    float* row = a.state;
    for (int i = 0; i < a.key_dim; ++i, row += a.state_stride) {
      const Vec key = set1(k[i]), query = set1(q[i]);
      for (int v = 0; v < kV; ++v) {
        const Vec s = fma(key, d[v], load(row + v * kLanes));
        store(row + v * kLanes, s);
        if constexpr (kHasOut) o[v] = fma(query, s, o[v]);
      }
    }
    if constexpr (kHasOut)
      for (int v = 0; v < kV; ++v) store(static_cast<T*>(a.out) + t * a.out_stride + v * kLanes, o[v]);
  }
}

/// Element i is the sum over the lanes of rows[i].
inline Vec lane_sums(Vec (&rows)[kLanes]) {
  transpose(rows);
  Vec sum = rows[0];
  for (int i = 1; i < kLanes; ++i) sum = sum + rows[i];
  return sum;
}

/// All tokens forward, keeping P of each, and d and v - r; dq += S do.
template <int kV, typename T>
void delta_rule_again_t(const DeltaBackwardTile& b) {
  const DeltaTile& a = b.forward;
  const std::int64_t cols = kV * kLanes, size = a.key_dim * cols;
  for (std::int64_t t = 0; t < a.num_tokens; ++t) {
    const float* k = a.k + t * a.key_dim;
    float *state = b.states + t * size, *next = state + size;
    const T *value = static_cast<const T*>(a.v) + t * a.v_stride, *dout = static_cast<const T*>(b.dout) + t * b.dout_stride;
    Vec r[kV], d[kV], g[kV];
    const float *from = t == 0 ? a.state : state, decay = a.decay[t * a.gate_stride];
    const std::int64_t from_stride = t == 0 ? a.state_stride : cols;
    if (a.is_state_space) {
      for (Vec& v : r) v = zero();
      shrink_state<kV>(state, cols, from, from_stride, a.key_dim, decay);
    } else {
      decay_state<kV>(state, cols, from, from_stride, k, a.key_dim, decay, r);
    }
    const Vec beta = set1(a.beta[t * a.gate_stride]);
    for (int v = 0; v < kV; ++v) {
      const Vec e = load(value + v * kLanes) - r[v];
      d[v] = beta * e;
      g[v] = load(dout + v * kLanes);
      store(b.deltas + (2 * t) * cols + v * kLanes, d[v]);
      store(b.deltas + (2 * t + 1) * cols + v * kLanes, e);
    }
    const bool has_next = t + 1 < a.num_tokens;
    float* dq = b.dq + t * a.key_dim;
    for (int i = 0; i < a.key_dim; i += kLanes) {
      Vec rows[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const Vec key = set1(k[i + j]);
        rows[j] = zero();
        for (int v = 0; v < kV; ++v) {
          const Vec s = fma(key, d[v], load(state + (i + j) * cols + v * kLanes));
          if (has_next) store(next + (i + j) * cols + v * kLanes, s);
          rows[j] = fma(s, g[v], rows[j]);
        }
      }
      store(dq + i, load(dq + i) + lane_sums(rows));
    }
  }
}

template <int kV, typename T>
void delta_rule_backward_t(const DeltaBackwardTile& b) {
  delta_rule_again_t<kV, T>(b);
  const DeltaTile& a = b.forward;
  const std::int64_t cols = kV * kLanes, size = a.key_dim * cols;
  for (std::int64_t t = a.num_tokens - 1; t >= 0; --t) {
    const float *q = a.q + t * a.key_dim, *k = a.k + t * a.key_dim, *state = b.states + t * size;
    const T* dout = static_cast<const T*>(b.dout) + t * b.dout_stride;
    const float decay = a.decay[t * a.gate_stride], beta = a.beta[t * a.gate_stride];
    Vec g[kV], d[kV], dd[kV], dr[kV];
    for (int v = 0; v < kV; ++v) {
      g[v] = load(dout + v * kLanes);
      d[v] = load(b.deltas + (2 * t) * cols + v * kLanes);
      dd[v] = zero();
    }
    float* row = b.dstate;
    for (int i = 0; i < a.key_dim; ++i, row += cols) {
      const Vec key = set1(k[i]), query = set1(q[i]);
      for (int v = 0; v < kV; ++v) {
        const Vec ds = fma(query, g[v], load(row + v * kLanes));
        store(row + v * kLanes, ds);
        dd[v] = fma(key, ds, dd[v]);
      }
    }
    Vec dbeta = zero(), dskip = zero(), dlog[kV];
    for (int v = 0; v < kV; ++v) {
      const Vec dv = set1(beta) * dd[v], e = load(b.deltas + (2 * t + 1) * cols + v * kLanes);
      store(static_cast<T*>(b.dv) + t * b.dv_stride + v * kLanes, a.is_state_space ? fma(set1(a.skip), g[v], dv) : dv);
      dr[v] = a.is_state_space ? zero() : zero() - dv;
      dbeta = fma(dd[v], e, dbeta);
      dskip = fma(g[v], e, dskip);
      dlog[v] = zero();
    }
    if (a.is_state_space) b.dskip[t * a.gate_stride] += reduce_add(dskip);
    b.dbeta[t * a.gate_stride] += reduce_add(dbeta);
    const Vec factor = set1(decay);
    float* dk = b.dk + t * a.key_dim;
    for (int i = 0; i < a.key_dim; i += kLanes) {
      Vec rows[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const Vec key = set1(k[i + j]);
        rows[j] = zero();
        for (int v = 0; v < kV; ++v) {
          float* at = b.dstate + (i + j) * cols + v * kLanes;
          const Vec ds = load(at), p = load(state + (i + j) * cols + v * kLanes);
          const Vec dp = fma(key, dr[v], ds);
          rows[j] = fma(p, dr[v], fma(ds, d[v], rows[j]));
          dlog[v] = fma(dp, p, dlog[v]);
          store(at, dp * factor);
        }
      }
      store(dk + i, load(dk + i) + lane_sums(rows));
    }
    Vec total = dlog[0];
    for (int v = 1; v < kV; ++v) total = total + dlog[v];
    b.dlog_decay[t * a.gate_stride] += reduce_add(total);
  }
}

/// body(std::integral_constant) of the vectors of a tile.
template <typename Body>
inline void with_vectors(int num_cols, Body body) {
  switch (num_cols / kLanes) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    default: return body(std::integral_constant<int, kDeltaVectors>{});
  }
}
void delta_rule(const DeltaTile& a) {
  with_vectors(a.num_cols, [&](auto vectors) {
    constexpr int kV = decltype(vectors)::value;
    if (a.is_state_space) {
      if (a.out != nullptr) {
        PRL_BY_DTYPE(a.dtype, (state_space_t<kV, true, float>(a)), (state_space_t<kV, true, BFloat16>(a)))
      } else {
        PRL_BY_DTYPE(a.dtype, (state_space_t<kV, false, float>(a)), (state_space_t<kV, false, BFloat16>(a)))
      }
      return;
    }
    if (a.out != nullptr) {
      PRL_BY_DTYPE(a.dtype, (delta_rule_t<kV, true, float>(a)), (delta_rule_t<kV, true, BFloat16>(a)))
    } else {
      PRL_BY_DTYPE(a.dtype, (delta_rule_t<kV, false, float>(a)), (delta_rule_t<kV, false, BFloat16>(a)))
    }
  });
}
void delta_rule_backward(const DeltaBackwardTile& b) {
  with_vectors(b.forward.num_cols, [&](auto vectors) {
    constexpr int kV = decltype(vectors)::value;
    PRL_BY_DTYPE(b.forward.dtype, (delta_rule_backward_t<kV, float>(b)), (delta_rule_backward_t<kV, BFloat16>(b)))
  });
}

/// bias + sum over w of weight[w] * x[w], in that order; rows that are null lie before the sequence.
template <typename T>
inline Vec conv_sum(const T* const* x, const float* weight, std::int64_t weight_stride, int num_taps, const float* bias, std::int64_t i,
                    int l) {
  Vec sum = bias != nullptr ? get(bias + i, l) : zero();
  for (int w = 0; w < num_taps; ++w)
    if (x[w] != nullptr) sum = fma(get(weight + w * weight_stride + i, l), get(x[w] + i, l), sum);
  return sum;
}
template <typename T>
void conv_row_t(T* y, const void* const* x, const float* weight, std::int64_t weight_stride, int num_taps, const float* bias,
                std::int64_t n) {
  const T* rows[kMaxConvTaps];
  for (int w = 0; w < num_taps; ++w) rows[w] = static_cast<const T*>(x[w]);
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec sum = conv_sum(rows, weight, weight_stride, num_taps, bias, i, l);
    put(y + i, sum * sigmoid(sum), l);
  });
}
void conv_row(void* y, const void* const* x, const float* weight, std::int64_t weight_stride, int num_taps, const float* bias,
              std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, conv_row_t(f32(y), x, weight, weight_stride, num_taps, bias, n),
               conv_row_t(bf16(y), x, weight, weight_stride, num_taps, bias, n))
}

template <typename T>
void conv_backward_t(const ConvBackward& a) {
  const int W = a.num_taps;
  alignas(64) float ring[kMaxConvTaps][kConvCols], dw[kMaxConvTaps][kConvCols] = {}, dbias[kConvCols] = {};
  // The gradient of input s, whose taps are those of tokens s to s + W - 1, as far as the sequence goes.
  const auto write_dx = [&](std::int64_t s) {
    for_vectors(a.num_cols, [&](std::int64_t i, int l) {
      Vec sum = zero();
      for (int w = 0; w < W; ++w)
        if (const std::int64_t t = s + W - 1 - w; t < a.num_tokens)
          sum = fma(get(a.weight + w * a.weight_stride + i, l), get(ring[t % W] + i, l), sum);
      put(static_cast<T*>(a.dx) + s * a.dx_stride + i, sum, l);
    });
  };
  for (std::int64_t t = 0; t < a.num_tokens; ++t) {
    const T* rows[kMaxConvTaps];
    for (int w = 0; w < W; ++w) {
      const std::int64_t s = t - (W - 1) + w;
      rows[w] = s < 0 ? nullptr : static_cast<const T*>(a.x) + s * a.x_stride;
    }
    const T* dy = static_cast<const T*>(a.dy) + t * a.dy_stride;
    for_vectors(a.num_cols, [&](std::int64_t i, int l) {
      const Vec sum = conv_sum(rows, a.weight, a.weight_stride, W, a.bias, i, l), s = sigmoid(sum);
      const Vec d = get(dy + i, l) * fma(sum * s, set1(1.0f) - s, s);
      put(ring[t % W] + i, d, l);
      put(dbias + i, get(dbias + i, l) + d, l);
      for (int w = 0; w < W; ++w)
        if (rows[w] != nullptr) put(dw[w] + i, fma(d, get(rows[w] + i, l), get(dw[w] + i, l)), l);
    });
    if (t >= W - 1) write_dx(t - (W - 1));
  }
  for (std::int64_t s = a.num_tokens < W ? 0 : a.num_tokens - (W - 1); s < a.num_tokens; ++s) write_dx(s);
  for (int w = 0; w < W; ++w) accumulate_t(a.dweight + w * a.weight_stride, dw[w], a.num_cols);
  if (a.bias != nullptr) accumulate_t(a.dbias, dbias, a.num_cols);
}
void conv_backward(const ConvBackward& a) { PRL_BY_DTYPE(a.dtype, conv_backward_t<float>(a), conv_backward_t<BFloat16>(a)) }

template <typename T>
void gated_norm_t(T* y, const T* x, const T* gate, const float* w, std::int64_t n, float eps) {
  const Vec scale = set1(1.0f / __builtin_sqrtf(dot_row_t(x, x, n) / static_cast<float>(n) + eps));
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l);
    put(y + i, get(x + i, l) * scale * get(w + i, l) * (g * sigmoid(g)), l);
  });
}
void gated_norm(void* y, const void* x, const void* gate, const float* w, std::int64_t n, float eps, DType t) {
  PRL_BY_DTYPE(t, gated_norm_t(f32(y), f32(x), f32(gate), w, n, eps), gated_norm_t(bf16(y), bf16(x), bf16(gate), w, n, eps))
}
template <typename T>
void gated_norm_backward_t(T* dx, T* dgate, float* dw, const T* dy, const T* x, const T* gate, const float* w, std::int64_t n, float eps) {
  Vec squares = zero(), dots = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l), g = get(gate + i, l);
    squares = fma(a, a, squares);
    dots = fma(get(dy + i, l) * (g * sigmoid(g)) * get(w + i, l), a, dots);
  });
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps);
  const Vec s = set1(scale), k = set1(reduce_add(dots) * scale * scale * scale / static_cast<float>(n));
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec a = get(x + i, l), g = get(gate + i, l), open = sigmoid(g), silu = g * open, d = get(dy + i, l), weight = get(w + i, l);
    put(dw + i, fma(d * silu, a * s, get(dw + i, l)), l);
    put(dgate + i, d * (a * s * weight) * fma(silu, set1(1.0f) - open, open), l);
    put(dx + i, fnma(k, a, d * silu * weight * s), l);
  });
}
void gated_norm_backward(const GatedNormGrad& g, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, gated_norm_backward_t(f32(g.dx), f32(g.dgate), g.dw, f32(g.dy), f32(g.x), f32(g.gate), g.w, n, g.eps),
               gated_norm_backward_t(bf16(g.dx), bf16(g.dgate), g.dw, bf16(g.dy), bf16(g.x), bf16(g.gate), g.w, n, g.eps))
}

template <typename T>
void gated_group_norm_t(T* y, const T* x, const T* gate, const float* w, std::int64_t n, float eps) {
  const auto opened = [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l);
    return get(x + i, l) * (g * sigmoid(g));
  };
  Vec squares = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec h = opened(i, l);
    squares = fma(h, h, squares);
  });
  const Vec scale = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
  for_vectors(n, [&](std::int64_t i, int l) { put(y + i, opened(i, l) * scale * get(w + i, l), l); });
}
void gated_group_norm(void* y, const void* x, const void* gate, const float* w, std::int64_t n, float eps, DType t) {
  PRL_BY_DTYPE(t, gated_group_norm_t(f32(y), f32(x), f32(gate), w, n, eps), gated_group_norm_t(bf16(y), bf16(x), bf16(gate), w, n, eps))
}
template <typename T>
void gated_group_norm_backward_t(const GatedNormGrad& a, std::int64_t n) {
  const T *x = static_cast<const T*>(a.x), *gate = static_cast<const T*>(a.gate), *dy = static_cast<const T*>(a.dy);
  Vec squares = zero(), dots = zero();
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec g = get(gate + i, l), h = get(x + i, l) * (g * sigmoid(g));
    squares = fma(h, h, squares);
    dots = fma(get(dy + i, l) * get(a.w + i, l), h, dots);
  });
  const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + a.eps);
  const Vec s = set1(scale), k = set1(reduce_add(dots) * scale * scale * scale / static_cast<float>(n));
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec v = get(x + i, l), g = get(gate + i, l), open = sigmoid(g), silu = g * open, h = v * silu, d = get(dy + i, l);
    const Vec dh = fnma(k, h, d * get(a.w + i, l) * s);
    put(a.dw + i, fma(d, h * s, get(a.dw + i, l)), l);
    put(static_cast<T*>(a.dgate) + i, dh * v * fma(silu, set1(1.0f) - open, open), l);
    put(static_cast<T*>(a.dx) + i, dh * silu, l);
  });
}
void gated_group_norm_backward(const GatedNormGrad& g, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, gated_group_norm_backward_t<float>(g, n), gated_group_norm_backward_t<BFloat16>(g, n))
}

template <typename T>
void gate_row_t(T* y, const T* x, const T* gate, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) { put(y + i, get(x + i, l) * sigmoid(get(gate + i, l)), l); });
}
void gate_row(void* y, const void* x, const void* gate, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, gate_row_t(f32(y), f32(x), f32(gate), n), gate_row_t(bf16(y), bf16(x), bf16(gate), n))
}
template <typename T>
void gate_row_backward_t(T* dx, T* dgate, const T* dy, const T* x, const T* gate, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, int l) {
    const Vec d = get(dy + i, l), s = sigmoid(get(gate + i, l));
    put(dgate + i, d * get(x + i, l) * (s * (set1(1.0f) - s)), l);
    put(dx + i, d * s, l);
  });
}
void gate_row_backward(void* dx, void* dgate, const void* dy, const void* x, const void* gate, std::int64_t n, DType t) {
  PRL_BY_DTYPE(t, gate_row_backward_t(f32(dx), f32(dgate), f32(dy), f32(x), f32(gate), n),
               gate_row_backward_t(bf16(dx), bf16(dgate), bf16(dy), bf16(x), bf16(gate), n))
}

}  // namespace prl::ops::cpu::PRL_SIMD
