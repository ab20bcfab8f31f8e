#include <cmath>
#include <numbers>
#include <vector>

#include "nn/weights.hpp"

namespace prl::nn {
namespace {

/// Inverse frequencies, formed in fp32 as the checkpoints' authors form them. Llama 3 scaling: long waves are slowed by
/// `factor`, short ones are kept, those between are blended (Llama 3.1 reference code).
std::vector<float> inverse_frequencies(const ModelConfig& config) {
  const std::int64_t half = config.rotary_dim() / 2;
  std::vector<float> out(static_cast<std::size_t>(half));
  const RopeScaling& s = config.rope_scaling;
  for (std::int64_t i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rotary_dim());
    float frequency = 1.0f / static_cast<float>(std::pow(config.rope_theta, static_cast<double>(exponent)));
    if (s.enabled) {
      const auto factor = static_cast<float>(s.factor);
      const auto original = static_cast<float>(s.original_max_position);
      const auto low = static_cast<float>(s.low_freq_factor), high = static_cast<float>(s.high_freq_factor);
      const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / frequency;
      if (wavelength > original / low) {
        frequency = frequency / factor;
      } else if (wavelength >= original / high) {
        const float smooth = (original / wavelength - low) / (high - low);
        frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
      }
    }
    out[static_cast<std::size_t>(i)] = frequency;
  }
  return out;
}

}  // namespace

ops::RopeTable make_rope_table(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config) {
  const std::vector<float> frequencies = inverse_frequencies(config);
  const auto half = static_cast<std::int64_t>(frequencies.size());
  const Shape shape{config.max_position, half};
  std::vector<float> cosines(static_cast<std::size_t>(shape.num_elements())), sines(cosines.size());
  ThreadPool pool;
  constexpr std::int64_t kRows = 256;
  pool.parallel_for((config.max_position + kRows - 1) / kRows, [&](std::int64_t run) {
    for (std::int64_t p = run * kRows; p < std::min(config.max_position, (run + 1) * kRows); ++p) {
      for (std::int64_t i = 0; i < half; ++i) {
        // The angle is an fp32 product, like in training of the checkpoints; its cosine is then taken as exactly as fp32 holds it.
        const auto angle = static_cast<double>(static_cast<float>(p) * frequencies[static_cast<std::size_t>(i)]);
        const auto at = static_cast<std::size_t>(p * half + i);
        cosines[at] = static_cast<float>(std::cos(angle));
        sines[at] = static_cast<float>(std::sin(angle));
      }
    }
  });
  ops::RopeTable table{Tensor::empty(runtime, shape, DType::kF32), Tensor::empty(runtime, shape, DType::kF32)};
  runtime->copy_from_host(table.cos_PR2.data(), cosines.data(), table.cos_PR2.num_bytes());
  runtime->copy_from_host(table.sin_PR2.data(), sines.data(), table.sin_PR2.num_bytes());
  return table;
}

}  // namespace prl::nn
