// Part of an instruction set's kernels; PRL_SIMD names the namespace.
namespace prl::ops::cpu::PRL_SIMD {

/// e^x to about 1 ulp. Below -87.33 it is exactly 0, above 88 it stays at e^88, NaN stays NaN. One sequence of operations for
/// every lane, so a value does not depend on where it stands in a row.
inline Vec exp(Vec x) {
  const Vec lowest = set1(-87.33f);
  const Vec clamped = min(set1(88.0f), max(lowest, x));
  const Vec n = round(clamped * set1(1.44269504f));
  Vec r = fnma(n, set1(0.693359375f), clamped);  // ln 2 in two parts, the first with few bits
  r = fnma(n, set1(-2.12194440e-4f), r);
  // Cephes expf: minimax polynomial of (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2].
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return select_less(x, lowest, zero(), p * pow2(n));
}

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

}  // namespace prl::ops::cpu::PRL_SIMD
