#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/models/family.hpp"

namespace prl::nn {
namespace {

constexpr std::int64_t kBlock = 128;
constexpr std::string_view kReadMethods = "this build reads unquantised checkpoints, 'fp8' and 'compressed-tensors'";

/// [128, 128]. Error{kNotImplemented} for other blocks.
void require_block(const ConfigReader& reader, std::string_view key) {
  const std::vector<std::int32_t> block = reader.ids(key, "two numbers");
  if (!std::ranges::equal(block, std::array{kBlock, kBlock}))
    fail(ErrorCode::kNotImplemented, "{}: key '{}' is [{}]; this build reads blocks of {} x {}", reader.subject(), key,
         fmt::join(block, ", "), kBlock, kBlock);
}

/// Of transformers' "fp8", the method of DeepSeek-V3: blocks, or one scale for a matrix.
Fp8Format read_fp8_format(const ConfigReader& reader) {
  const std::string format = reader.string("fmt", "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn")
    fail(ErrorCode::kNotImplemented, "{}: key 'fmt' is '{}'; this build reads 'e4m3' (also 'float8_e4m3fn')", reader.subject(), format);
  if (!reader.has("weight_block_size")) return {.scale_suffix = "_scale_inv"};
  require_block(reader, "weight_block_size");
  return {.block_rows = kBlock, .block_cols = kBlock, .scale_suffix = "_scale_inv"};
}

/// How one group of modules has its weights.
Fp8Format read_group(const ConfigReader& group) {
  const std::optional<ConfigReader> weights = group.object("weights");
  if (!weights)
    fail(ErrorCode::kNotImplemented, "{}: key 'weights' is missing; this build reads groups whose weights are FP8", group.subject());
  const std::int64_t bits = weights->integer("num_bits", 8, 1, 64);
  if (const std::string type = weights->string("type", "int"); type != "float" || bits != 8)
    fail(ErrorCode::kNotImplemented, "{}: keys 'type' and 'num_bits' are '{}' and {}; this build reads weights of type 'float' with 8 bits",
         weights->subject(), type, bits);
  if (!weights->boolean("symmetric", true))
    fail(ErrorCode::kNotImplemented, "{}: key 'symmetric' is false; this build reads weights without zero points", weights->subject());
  const std::string strategy = weights->string("strategy", "tensor");
  if (strategy == "tensor") return {.scale_suffix = "_scale"};
  if (strategy == "channel") return {.block_rows = 1, .scale_suffix = "_scale"};
  if (strategy != "block")
    fail(ErrorCode::kNotImplemented, "{}: key 'strategy' is '{}'; this build reads 'tensor', 'channel' and 'block'", weights->subject(),
         strategy);
  require_block(*weights, "block_structure");
  return {.block_rows = kBlock, .block_cols = kBlock, .scale_suffix = "_scale"};
}

/// Of compressed-tensors, the method of GLM-4.5-FP8.
Fp8Format read_compressed_format(const ConfigReader& reader) {
  reader.require_string("format", "", "float-quantized");
  for (const char* key : {"kv_cache_scheme", "sparsity_config", "transform_config"})
    if (const std::optional<ConfigReader> part = reader.object(key); part && !part->empty() && part->string("format", "") != "dense")
      fail(ErrorCode::kNotImplemented, "{}: key '{}': this build reads weights of FP8 without it", reader.subject(), key);
  const std::optional<ConfigReader> groups = reader.object("config_groups");
  std::optional<Fp8Format> format;
  for (const std::string& name : groups ? groups->keys_of_objects() : std::vector<std::string>{}) {
    const Fp8Format of_group = read_group(*groups->object(name));
    if (format && *format != of_group)
      fail(ErrorCode::kNotImplemented, "{}: key '{}': its weights are scaled in another way than those of other groups", groups->subject(),
           name);
    format = of_group;
  }
  if (!format) fail(ErrorCode::kCorrupt, "{}: key 'config_groups': wanted an object with at least one group", reader.subject());
  return *format;
}

}  // namespace

void read_quantization(const ConfigReader& reader, const Family& family, ModelConfig& config) {
  if (reader.has("compression_config"))
    fail(ErrorCode::kNotImplemented, "{}: key 'compression_config': {}, with a 'quantization_config'", reader.subject(), kReadMethods);
  const std::optional<ConfigReader> how = reader.object(kQuantization);
  if (!how) return;
  const std::string method = how->string("quant_method", "");
  if (method == "fp8")
    config.fp8 = read_fp8_format(*how);
  else if (method == "compressed-tensors")
    config.fp8 = read_compressed_format(*how);
  else if (!(method == "mxfp4" && family.has_mxfp4))
    fail(ErrorCode::kNotImplemented, "{}: key '{}' has the 'quant_method' '{}'; {}{}", reader.subject(), kQuantization, method,
         kReadMethods, family.has_mxfp4 ? ", and 'mxfp4'" : "");
}

}  // namespace prl::nn
