#include "nn/eight_bit_files.hpp"

#include <algorithm>
#include <bit>
#include <boost/json.hpp>
#include <cmath>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/tensor_table.hpp"
#include "ops/eight_bit.hpp"

namespace prl::nn {
namespace json = boost::json;
namespace {

constexpr std::string_view kWeightSuffix = ".weight";
constexpr std::string_view kScaleSuffix = "_scale";

int exponent_of_row(std::span<const float> row) {
  std::uint32_t greatest = 0;  // as bits: those of NaN are greater than all others
  for (const float value : row) greatest = std::max(greatest, std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  return ops::eight_bit_exponent(std::bit_cast<float>(greatest));
}

WeightSource codes_of(const WeightSource& source) {
  WeightSource codes = source;
  codes.is_eight_bit = false;
  codes.is_code = true;
  codes.read = [read = source.read, cols = source.shape.num_cols()](std::int64_t first, std::span<float> out) {
    read(first, out);
    for (std::size_t begin = 0; begin < out.size(); begin += static_cast<std::size_t>(cols)) {
      const std::span<float> row = out.subspan(begin, static_cast<std::size_t>(cols));
      const int exponent = exponent_of_row(row);
      for (float& value : row) value = ops::eight_bit_value(ops::eight_bit_code(value, exponent), 0);
    }
  };
  return codes;
}

WeightSource scales_of(const WeightSource& source) {
  WeightSource scales;
  scales.name = source.name + std::string(kScaleSuffix);
  scales.shape = Shape{source.shape.num_rows(), 1};
  scales.layer = source.layer;
  scales.is_exact = true;
  scales.read = [read = source.read, cols = source.shape.num_cols()](std::int64_t first, std::span<float> out) {
    std::vector<float> row(static_cast<std::size_t>(cols));
    for (std::size_t i = 0; i < out.size(); ++i) {
      read((first + static_cast<std::int64_t>(i)) * cols, row);
      out[i] = std::ldexp(1.0f, exponent_of_row(row));
    }
  };
  return scales;
}

}  // namespace

void mark_eight_bit(const ModelConfig& config, std::span<WeightSource> sources) {
  if (config.expert_names == ExpertNames::kStacked || config.expert_names == ExpertNames::kStackedRows)
    fail(ErrorCode::kNotImplemented,
         "quantization fp8: files of a {} model have all experts of a layer in one tensor, for which there are no scales of rows",
         config.model_type);
  ModelConfig eight = config;
  eight.eight_bits = EightBits::kWeights;
  const TensorTablePtr table = make_tensor_table(eight);
  std::set<std::string_view> names;
  for (const TensorSpec& spec : table->tensors())
    if (spec.is_eight_bit && spec.is_matrix()) names.insert(spec.name);
  for (WeightSource& source : sources) source.is_eight_bit = names.contains(source.name) && source.name.ends_with(kWeightSuffix);
}

std::vector<WeightSource> eight_bit_sources(std::vector<WeightSource> sources) {
  std::vector<WeightSource> out;
  for (WeightSource& source : sources) {
    if (!source.is_eight_bit) {
      out.push_back(std::move(source));
      continue;
    }
    out.push_back(codes_of(source));
    out.push_back(scales_of(source));
  }
  return out;
}

std::string eight_bit_config_json(const std::string& config_json, std::span<const WeightSource> sources) {
  json::value value = json::parse(config_json);
  // Modules that are neither embeddings nor coded; readers tie the head to the embedding without a tensor of its name.
  json::array ignored{"lm_head"};
  for (const WeightSource& source : sources) {
    const bool is_plain = source.name.ends_with(kWeightSuffix) && !source.is_code && source.shape.num_dims() == 2;
    if (!is_plain || source.name.find("embed") != std::string::npos || source.name.starts_with("lm_head")) continue;
    ignored.emplace_back(source.name.substr(0, source.name.size() - kWeightSuffix.size()));
  }
  const json::object weights{{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}, {"symmetric", true}, {"dynamic", false}};
  const json::object group{
      {"targets", json::array{"Linear"}}, {"weights", weights}, {"input_activations", nullptr}, {"output_activations", nullptr}};
  value.get_object()["quantization_config"] =
      json::object{{"quant_method", "compressed-tensors"}, {"format", "float-quantized"},
                   {"quantization_status", "compressed"},  {"config_groups", json::object{{"group_0", group}}},
                   {"kv_cache_scheme", nullptr},           {"ignore", std::move(ignored)}};
  return pretty_json(value);
}

}  // namespace prl::nn
