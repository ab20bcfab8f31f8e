#include <algorithm>
#include <numeric>

#include "base/error.hpp"
#include "nn/models/family.hpp"

namespace prl::nn {
namespace {

constexpr std::string_view kSliding = "sliding_attention";

}  // namespace

std::vector<std::string> read_layer_types(const ConfigReader& reader, std::int64_t num_layers, std::string_view other, std::string_view key,
                                          std::string_view usual) {
  const std::vector<std::string> types = reader.strings(key);
  if (reader.has(key) && static_cast<std::int64_t>(types.size()) != num_layers)
    fail(ErrorCode::kCorrupt, "{}: key '{}': wanted a type for each of the {} layers, found {}", reader.subject(), key, num_layers,
         types.size());
  for (const std::string& type : types)
    if (type != other && type != usual)
      fail(ErrorCode::kNotImplemented, "{}: key '{}': '{}'; this build has {} and {}", reader.subject(), key, type, usual, other);
  return types;
}

std::vector<std::int64_t> layers_of_type(const std::vector<std::string>& types, std::string_view type) {
  std::vector<std::int64_t> layers;
  for (std::size_t i = 0; i < types.size(); ++i)
    if (types[i] == type) layers.push_back(static_cast<std::int64_t>(i));
  return layers;
}

namespace {

/// Layers [first, num_layers).
std::vector<std::int64_t> layers_from(std::int64_t first, std::int64_t num_layers) {
  std::vector<std::int64_t> layers(static_cast<std::size_t>(std::max<std::int64_t>(0, num_layers - first)));
  std::iota(layers.begin(), layers.end(), first);
  return layers;
}

}  // namespace

void read_window(const ConfigReader& reader, const WindowKeys& keys, ModelConfig& config) {
  std::int64_t window = keys.without;
  if (reader.names("sliding_window")) window = reader.integer("sliding_window", keys.of_null, 1, std::int64_t{1} << 31);
  if (keys.is_switched && !reader.boolean("use_sliding_window", false)) window = 0;
  std::vector<std::int64_t> layers = window > 0 ? keys.layers : std::vector<std::int64_t>{};
  if (const std::vector<std::string> types = read_layer_types(reader, config.num_layers, kSliding); !types.empty()) {
    const std::vector<std::int64_t> named = layers_of_type(types, kSliding);
    if (!named.empty() && window == 0)
      fail(ErrorCode::kCorrupt, "{}: key 'layer_types' has layers of {}, but no window is in use (keys {}'sliding_window')",
           reader.subject(), kSliding, keys.is_switched ? "'use_sliding_window', " : "");
    if (!keys.are_layers_named && named != layers)
      fail(ErrorCode::kNotImplemented, "{}: key 'layer_types': layers of model type '{}' are all of one type, {} here", reader.subject(),
           config.model_type, window > 0 ? kSliding : kFullAttention);
    layers = named;
  }
  // One that all positions fit into changes nothing, unless its layers rotate in another way.
  if (layers.empty() || (window >= config.max_position && !config.window_rope_theta)) return;
  config.window = window;
  config.windowed_layers = std::move(layers);
}

void read_common_window(const ConfigReader& reader, std::int64_t without, bool is_switched, ModelConfig& config) {
  read_window(reader,
              {.without = without, .is_switched = is_switched, .are_layers_named = false, .layers = layers_from(0, config.num_layers)},
              config);
}

void read_qwen_window(const ConfigReader& reader, ModelConfig& config) {
  const std::int64_t first = reader.integer("max_window_layers", 28, 0, 1 << 20);
  read_window(reader, {.without = 4096, .layers = layers_from(first, config.num_layers)}, config);
}

void describe_window(const ModelConfig& config, const WindowKeys& keys, boost::json::object& object) {
  if (keys.is_switched) object["use_sliding_window"] = config.window > 0;
  if (config.window == 0) {
    if (!keys.is_switched) object["sliding_window"] = nullptr;
    return;
  }
  object["sliding_window"] = config.window;
  if (!keys.are_layers_named) return;
  boost::json::array types;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    types.emplace_back(boost::json::string_view((config.window_of(layer) > 0 ? kSliding : kFullAttention)));
  object["layer_types"] = std::move(types);
}

}  // namespace prl::nn
