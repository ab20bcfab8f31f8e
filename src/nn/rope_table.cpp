#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <vector>

#include "nn/weights.hpp"

namespace prl::nn {
namespace {

/// LongRoPE's factors of the model; empty for models without.
std::span<const double> long_rope_factors(const ModelConfig& config) {
  if (!config.long_rope) return {};
  return config.max_position > config.long_rope->original_max_position ? config.long_rope->long_factors : config.long_rope->short_factors;
}

/// How much of each pair's frequency YaRN keeps, 0 to 1: formed in fp32 from bounds in fp64, as transformers does.
std::vector<float> kept_by_yarn(const ModelConfig& config) {
  const Yarn& y = *config.yarn;
  const auto dim = static_cast<double>(config.rotary_dim());
  const auto pair_that_turns = [&](double times) {
    return dim * std::log(static_cast<double>(y.original_max_position) / (times * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(config.rope_theta));
  };
  const double fast = pair_that_turns(y.beta_fast), slow = pair_that_turns(y.beta_slow);
  const double low = std::max(y.truncates ? std::floor(fast) : fast, 0.0), high = std::min(y.truncates ? std::ceil(slow) : slow, dim - 1);
  const auto first = static_cast<float>(low), width = static_cast<float>((high == low ? high + 0.001 : high) - low);
  std::vector<float> kept(static_cast<std::size_t>(config.rotary_dim() / 2));
  for (std::size_t i = 0; i < kept.size(); ++i) kept[i] = 1.0f - std::clamp((static_cast<float>(i) - first) / width, 0.0f, 1.0f);
  return kept;
}

/// Inverse frequencies, formed in fp32 as the checkpoints' authors form them. Llama 3 scaling: long waves are slowed by
/// `factor`, short ones are kept, those between are blended (Llama 3.1 reference code).
std::vector<float> inverse_frequencies(const ModelConfig& config) {
  const std::int64_t half = config.rotary_dim() / 2;
  std::vector<float> out(static_cast<std::size_t>(half));
  const RopeScaling& s = config.rope_scaling;
  const std::span<const double> divisors = long_rope_factors(config);
  const std::vector<float> kept = config.yarn ? kept_by_yarn(config) : std::vector<float>{};
  for (std::int64_t i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rotary_dim());
    const auto period = static_cast<float>(std::pow(config.rope_theta, static_cast<double>(exponent)));
    const std::size_t at = static_cast<std::size_t>(i);
    float frequency = divisors.empty() ? 1.0f / period : 1.0f / (static_cast<float>(divisors[at]) * period);
    if (!kept.empty()) frequency = 1.0f / (static_cast<float>(config.yarn->factor) * period) * (1.0f - kept[at]) + frequency * kept[at];
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
    if (config.rope_divisor != 1.0) frequency = frequency / static_cast<float>(config.rope_divisor);
    out[at] = frequency;
  }
  return out;
}

bool same_rope(const ModelConfig& a, const ModelConfig& b) {
  const RopeScaling &x = a.rope_scaling, &y = b.rope_scaling;
  return a.rotary_dim() == b.rotary_dim() && a.max_position == b.max_position && a.rope_theta == b.rope_theta && x.enabled == y.enabled &&
         x.factor == y.factor && x.low_freq_factor == y.low_freq_factor && x.high_freq_factor == y.high_freq_factor &&
         x.original_max_position == y.original_max_position && a.long_rope == b.long_rope && a.yarn == b.yarn &&
         a.rope_divisor == b.rope_divisor && a.window_rope_theta == b.window_rope_theta;
}

ops::RopeTable upload(const std::shared_ptr<DeviceRuntime>& runtime, const Shape& shape, std::span<const float> cosines,
                      std::span<const float> sines) {
  ops::RopeTable table{Tensor::empty(runtime, shape, DType::kF32), Tensor::empty(runtime, shape, DType::kF32)};
  runtime->copy_from_host(table.cos_PR2.data(), cosines.data(), table.cos_PR2.num_bytes());
  runtime->copy_from_host(table.sin_PR2.data(), sines.data(), table.sin_PR2.num_bytes());
  return table;
}

/// cos and sin of position * inverse frequency for all positions of the model, frequencies scaled as config.json asks.
ops::RopeTable make_rope_table(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config) {
  const std::vector<float> frequencies = inverse_frequencies(config);
  const auto half = static_cast<std::int64_t>(frequencies.size());
  const Shape shape{config.max_position, half};
  const auto factor = static_cast<float>(config.long_rope ? config.long_rope->attention_factor
                                         : config.yarn    ? config.yarn->attention_factor
                                                          : 1.0);
  std::vector<float> cosines(static_cast<std::size_t>(shape.num_elements())), sines(cosines.size());
  ThreadPool pool;
  constexpr std::int64_t kRows = 256;
  pool.parallel_for((config.max_position + kRows - 1) / kRows, [&](std::int64_t run) {
    for (std::int64_t p = run * kRows; p < std::min(config.max_position, (run + 1) * kRows); ++p) {
      for (std::int64_t i = 0; i < half; ++i) {
        // The angle is an fp32 product, like in training of the checkpoints; its cosine is then taken as exactly as fp32 holds it.
        const auto angle = static_cast<double>(static_cast<float>(p) * frequencies[static_cast<std::size_t>(i)]);
        const auto at = static_cast<std::size_t>(p * half + i);
        cosines[at] = static_cast<float>(std::cos(angle)) * factor;
        sines[at] = static_cast<float>(std::sin(angle)) * factor;
      }
    }
  });
  return upload(runtime, shape, cosines, sines);
}

/// That of layers with windows: their own base, and no scaling.
ops::RopeTable make_window_table(const std::shared_ptr<DeviceRuntime>& runtime, ModelConfig config) {
  config.rope_theta = *config.window_rope_theta;
  config.rope_scaling = {};
  config.long_rope.reset();
  config.yarn.reset();
  config.rope_divisor = 1.0;
  return make_rope_table(runtime, config);
}

/// All angles 0: a rotation by it gives the bits that it was given, up to the sign of a zero. So layers whose heads are not rotated run
/// the same kernels as the others.
ops::RopeTable make_identity_table(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config) {
  const Shape shape{config.max_position, config.rotary_dim() / 2};
  const auto count = static_cast<std::size_t>(shape.num_elements());
  return upload(runtime, shape, std::vector<float>(count, 1.0f), std::vector<float>(count, 0.0f));
}

}  // namespace

void set_rope_tables(Weights& weights, const std::shared_ptr<DeviceRuntime>& runtime, const WeightsPtr& previous) {
  const ModelConfig& config = weights.config;
  const bool is_same = previous != nullptr && same_rope(previous->config, config);
  weights.rope = is_same ? previous->rope : make_rope_table(runtime, config);
  if (config.window_rope_theta && config.window > 0)
    weights.window_rope = is_same && previous->window_rope.cos_PR2.defined() ? previous->window_rope : make_window_table(runtime, config);
  if (!config.unrotated_layers.empty())
    weights.no_rope = is_same && previous->no_rope.cos_PR2.defined() ? previous->no_rope : make_identity_table(runtime, config);
}

}  // namespace prl::nn
