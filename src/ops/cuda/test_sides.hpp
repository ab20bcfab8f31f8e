#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/normal_draws.hpp"
#include "ops/test_support.hpp"

namespace prl::ops::testing {

inline const float kNan = std::numeric_limits<float>::quiet_NaN();

/// A session on each side and tensors that hold the same values on both.
struct Sides {
  std::shared_ptr<DeviceRuntime> cpu_runtime = make_cpu_runtime(), gpu_runtime = make_cuda_runtime();
  OpSession cpu_session{cpu_runtime, 2}, gpu_session{gpu_runtime, 1};
  OpContext &cpu = cpu_session.context(), &gpu = gpu_session.context();

  Tensor random(Shape shape, DType dtype, std::uint64_t seed, float scale = 1.0f) {
    Tensor t = Tensor::empty(cpu_runtime, shape, dtype);
    Rng rng(seed);
    const std::vector<float> values = normal_draws(rng, t.num_elements(), scale);
    for (std::int64_t i = 0; i < t.num_elements(); ++i) Session::set(t, i, values[static_cast<std::size_t>(i)]);
    return t;
  }
  Tensor ints(const std::vector<std::int32_t>& values) {
    Tensor t = Tensor::empty(cpu_runtime, {static_cast<std::int64_t>(values.size())}, DType::kI32);
    std::ranges::copy(values, t.as<std::int32_t>());
    return t;
  }
  Tensor filled(Shape shape, DType dtype, float value) {
    Tensor t = Tensor::empty(cpu_runtime, shape, dtype);
    for (std::int64_t i = 0; i < t.num_elements(); ++i) Session::set(t, i, value);
    return t;
  }
  Tensor to_gpu(const Tensor& t) {
    Tensor out = Tensor::empty(gpu_runtime, t.shape(), t.dtype());
    gpu_runtime->copy_from_host(out.data(), t.data(), t.num_bytes());
    return out;
  }
  Tensor to_cpu(const Tensor& t) {
    Tensor out = Tensor::empty(cpu_runtime, t.shape(), t.dtype());
    gpu_runtime->copy_to_host(out.data(), t.data(), t.num_bytes());
    return out;
  }
  /// Largest |gpu - cpu| / (scale + |cpu|).
  double difference(const Tensor& on_gpu, const Tensor& on_cpu, double scale = 1.0) {
    const std::vector<float> a = values(to_cpu(on_gpu)), b = values(on_cpu);
    return worst_error(a, {b.begin(), b.end()}, scale);
  }
};

}  // namespace prl::ops::testing
