#include "nn/exact_parts.hpp"

#include <utility>
#include <vector>

#include "base/error.hpp"

namespace prl::nn {
namespace {

float rounded(float value) { return to_f32(to_bf16(value)); }
/// From the smallest to the greatest, so that each sum is exact.
float sum_of(float first, float second, float third) { return first + (second + third); }

}  // namespace

void split_exact(std::span<const float> values, std::span<float> parts, const std::string& subject) {
  const std::size_t n = values.size();
  PRL_CHECK(parts.size() == n * kNumExactParts, "{} parts of {} numbers", parts.size(), n);
  for (std::size_t i = 0; i < n; ++i) {
    const float first = rounded(values[i]), rest = values[i] - first, second = rounded(rest), third = rest - second;
    const bool is_zero = values[i] == 0.0f;  // 0 - 0 would lose its sign
    parts[i] = first;
    parts[n + i] = is_zero ? first : second;
    parts[2 * n + i] = is_zero ? first : third;
    if (rounded(third) != third || sum_of(first, second, third) != values[i])
      fail(ErrorCode::kCorrupt, "{}: element {} is {}, of which bfloat16 cannot hold all bits in {} parts", subject, i, values[i],
           kNumExactParts);
  }
}

void join_exact(std::span<const float> first, std::span<const float> second, std::span<const float> third, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = sum_of(first[i], second[i], third[i]);
}

WeightSource stored_source(const TensorSpec& spec, std::function<void(std::int64_t first, std::span<float> out)> read) {
  WeightSource source{
      .name = spec.name, .shape = spec.stored_shape(), .read = std::move(read), .layer = spec.layer, .is_exact = spec.is_exact()};
  if (spec.is_exact() && source.read)
    source.read = [read = std::move(source.read), n = source.shape[0]](std::int64_t first, std::span<float> out) {
      std::vector<float> parts(out.size() * kNumExactParts);
      const auto part = [&](std::size_t p) { return std::span(parts).subspan(p * out.size(), out.size()); };
      for (std::size_t p = 0; p < static_cast<std::size_t>(kNumExactParts); ++p) read(static_cast<std::int64_t>(p) * n + first, part(p));
      join_exact(part(0), part(1), part(2), out);
    };
  return source;
}

}  // namespace prl::nn
