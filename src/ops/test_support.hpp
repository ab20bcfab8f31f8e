#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "base/normal_draws.hpp"
#include "ops/cpu/table.hpp"

// What the tests of the ops share: sessions of every CPU kind, random and poisoned tensors, comparisons. In the program that tests the GPU
// (tests_gpu()) its kernels work on host memory that the device sees, and every op is waited for, so that a test may look at tensors as it
// does on the CPU.

namespace prl::ops::testing {

/// Whose bodies run: those of a CPU kind, or the GPU's.
struct Kind {
  cpu::CpuKind cpu = cpu::CpuKind::kPortable;
  bool is_cuda = false;
  Kind() = default;
  Kind(cpu::CpuKind kind) : cpu(kind) {}
};
inline const char* to_string(Kind kind) { return kind.is_cuda ? "cuda" : cpu::to_string(kind.cpu); }

/// The program's own: the CPU kind that this process uses, or the GPU.
Kind default_kind();
std::vector<Kind> available_kinds();
std::shared_ptr<DeviceRuntime> make_runtime(Kind kind);
const OpTable& table_of(Kind kind);

/// A session with the bodies of one kind.
struct Session {
  std::shared_ptr<DeviceRuntime> runtime;
  OpSession session;
  OpContext& ctx;

  explicit Session(Kind kind, int threads = 2) : runtime(make_runtime(kind)), session(runtime, threads), ctx(session.context()) {
    ctx.table = &table_of(kind);
  }

  Tensor filled(Shape shape, DType dtype, float value) {
    Tensor t = Tensor::empty(runtime, shape, dtype);
    for (std::int64_t i = 0; i < t.num_elements(); ++i) set(t, i, value);
    return t;
  }
  /// Outputs start as NaN, so that an element nobody wrote shows.
  Tensor poisoned(Shape shape, DType dtype) { return filled(shape, dtype, std::numeric_limits<float>::quiet_NaN()); }
  Tensor random(Shape shape, DType dtype, std::uint64_t seed, float scale = 1.0f) {
    Tensor t = Tensor::empty(runtime, shape, dtype);
    Rng rng(seed);
    const std::vector<float> values = normal_draws(rng, t.num_elements(), scale);
    for (std::int64_t i = 0; i < t.num_elements(); ++i) set(t, i, values[static_cast<std::size_t>(i)]);
    return t;
  }
  Tensor ints(const std::vector<std::int32_t>& values) {
    Tensor t = Tensor::empty(runtime, {static_cast<std::int64_t>(values.size())}, DType::kI32);
    std::copy(values.begin(), values.end(), t.as<std::int32_t>());
    return t;
  }
  static void set(Tensor& t, std::int64_t i, float v) {
    if (t.dtype() == DType::kBF16)
      t.as<BFloat16>()[i] = to_bf16(v);
    else
      t.as<float>()[i] = v;
  }
};

/// All of a matrix as rows of bytes.
inline TensorView as_bytes(Tensor& t) {
  const std::int64_t row_bytes = t.shape().num_cols() * static_cast<std::int64_t>(size_of(t.dtype()));
  return {t.data(), {t.shape().num_rows(), row_bytes}, DType::kU8, t.runtime()->device(), row_bytes};
}

/// Whether a tool watches every access of the GPU, as tools/cuda_check.sh says, which makes a kernel take hundreds of times as long: cases
/// may then be fewer and smaller, as long as each path is still taken.
inline bool is_watched() { return std::getenv("PRL_TEST_WATCHED") != nullptr; }

inline float get(const Tensor& t, std::int64_t i) { return t.dtype() == DType::kBF16 ? to_f32(t.as<BFloat16>()[i]) : t.as<float>()[i]; }
inline std::vector<float> values(const Tensor& t) {
  std::vector<float> out(static_cast<std::size_t>(t.num_elements()));
  for (std::int64_t i = 0; i < t.num_elements(); ++i) out[static_cast<std::size_t>(i)] = get(t, i);
  return out;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.num_bytes() == b.num_bytes() && std::memcmp(a.data(), b.data(), a.num_bytes()) == 0;
}

/// Largest |a - b| / (scale + |b|); NaN counts as infinite.
inline double worst_error(const std::vector<float>& a, const std::vector<double>& b, double scale) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double e = std::abs(static_cast<double>(a[i]) - b[i]) / (scale + std::abs(b[i]));
    if (!(e <= worst)) worst = std::isnan(e) ? std::numeric_limits<double>::infinity() : e;
  }
  return worst;
}

/// Rounding of a stored result: bf16 keeps 8 bits, fp32 24.
inline double tolerance(DType dtype, double f32) { return dtype == DType::kBF16 ? 6e-3 : f32; }

struct KindAndType {
  Kind kind;
  DType dtype;
};
inline std::ostream& operator<<(std::ostream& out, const KindAndType& k) {
  return out << to_string(k.kind) << "_" << prl::to_string(k.dtype);
}
inline std::vector<KindAndType> kinds_and_types() {
  std::vector<KindAndType> out;
  for (const Kind kind : available_kinds())
    for (const DType t : {DType::kF32, DType::kBF16}) out.push_back({kind, t});
  return out;
}

/// One test per kind and dtype.
class OpTest : public ::testing::TestWithParam<KindAndType> {
 protected:
  Kind kind() const { return GetParam().kind; }
  DType dtype() const { return GetParam().dtype; }
};

}  // namespace prl::ops::testing

#define PRL_OP_TEST_KINDS(suite) \
  INSTANTIATE_TEST_SUITE_P(Ops, suite, ::testing::ValuesIn(::prl::ops::testing::kinds_and_types()), ::testing::PrintToStringParamName())
