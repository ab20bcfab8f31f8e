#include <array>
#include <cmath>

#include "base/error.hpp"
#include "io/safetensors.hpp"
#include "nn/models/family.hpp"
#include "ops/attention.hpp"

// `vision_config` of config.json: the tower of Qwen 3.5. What a missing key means is what transformers takes it for.
namespace prl::nn {
namespace {

bool has_tower_files(const std::filesystem::path& folder) {
  if (!std::filesystem::exists(folder / "model.safetensors") && !std::filesystem::exists(folder / "model.safetensors.index.json"))
    return false;
  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder);
  const auto found = files.tensors().lower_bound(kTowerPrefix);
  return found != files.tensors().end() && found->first.starts_with(kTowerPrefix);
}

/// `mrope_section` of the part for text: pairs of time, height and width.
void read_sections(const ConfigReader& text, VisionConfig& vision) {
  std::array<std::int64_t, 3> sections{11, 11, 10};
  std::optional<ConfigReader> rope = text.object("rope_scaling");
  if (!rope || rope->empty()) rope = text.object("rope_parameters");
  if (rope && rope->has("mrope_section")) {
    const std::vector<std::int32_t> given = rope->ids("mrope_section", "three numbers of pairs");
    if (given.size() != 3)
      fail(ErrorCode::kCorrupt, "{}: key 'mrope_section' has {} numbers, wanted 3 (time, height, width)", rope->subject(), given.size());
    std::ranges::copy(given, sections.begin());
  }
  if (rope && !rope->boolean("mrope_interleaved", true))
    fail(ErrorCode::kNotImplemented, "{}: key 'mrope_interleaved' is false; this build turns pairs of the axes by turns", rope->subject());
  vision.height_section = sections[1];
  vision.width_section = sections[2];
}

}  // namespace

void read_vision(const ConfigReader& whole, const ConfigReader& text, const std::filesystem::path& folder, ModelConfig& config) {
  const std::optional<ConfigReader> reader = whole.object("vision_config");
  if (!reader || !has_tower_files(folder)) return;
  VisionConfig v;
  v.num_layers = reader->integer("depth", v.num_layers, 1, 256);
  v.hidden_size = reader->integer("hidden_size", v.hidden_size, 1, 1 << 16);
  v.intermediate_size = reader->integer("intermediate_size", v.intermediate_size, 1, 1 << 18);
  v.num_heads = reader->integer("num_heads", v.num_heads, 1, 1024);
  v.patch_size = reader->integer("patch_size", v.patch_size, 1, 64);
  v.temporal_patch = reader->integer("temporal_patch_size", v.temporal_patch, 1, 8);
  v.merge_size = reader->integer("spatial_merge_size", v.merge_size, 1, 8);
  v.output_size = reader->integer("out_hidden_size", 3584, 1, 1 << 20);
  v.num_positions = reader->integer("num_position_embeddings", v.num_positions, 1, 1 << 20);
  if (const std::optional<ConfigReader> rope = reader->object("rope_parameters")) v.rope_theta = rope->number("rope_theta", 1e4, 1.0, 1e12);
  if (const std::int64_t channels = reader->integer("in_channels", 3, 1, 64); channels != 3)
    fail(ErrorCode::kNotImplemented, "{}: key 'in_channels' is {}; this build has towers for 3", reader->subject(), channels);
  reader->require_string("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh");
  if (!reader->ids("deepstack_visual_indexes").empty())
    fail(ErrorCode::kNotImplemented, "{}: key 'deepstack_visual_indexes' is not empty; this build has towers without", reader->subject());
  if (v.hidden_size % v.num_heads != 0 || v.head_dim() % 4 != 0)
    fail(ErrorCode::kCorrupt, "{}: hidden_size {} and num_heads {} give no heads of a multiple of 4 elements", reader->subject(),
         v.hidden_size, v.num_heads);
  if (v.head_dim() > ops::kHeadDims.back())
    fail(ErrorCode::kNotImplemented, "{}: heads of {} elements; this build has at most {}", reader->subject(), v.head_dim(),
         ops::kHeadDims.back());
  const auto side = static_cast<std::int64_t>(std::llround(std::sqrt(static_cast<double>(v.num_positions))));
  if (side * side != v.num_positions)
    fail(ErrorCode::kCorrupt, "{}: key 'num_position_embeddings' is {}, wanted a square", reader->subject(), v.num_positions);
  v.image_token_id = static_cast<std::int32_t>(whole.integer("image_token_id", 248056, 0, (std::int64_t{1} << 24)));
  read_sections(text, v);
  v.folder = folder;
  config.vision = v;
}

}  // namespace prl::nn
