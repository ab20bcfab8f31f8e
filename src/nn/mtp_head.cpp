#include "nn/mtp_head.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "io/safetensors.hpp"
#include "nn/stored_weights.hpp"
#include "nn/weight_blocks.hpp"

namespace prl::nn {

ModelConfig mtp_head_config(const ModelConfig& model) {
  PRL_CHECK(model.mtp.has_value(), "a {} model without a head for multi-token prediction", model.model_type);
  ModelConfig head = model;
  head.is_mtp_head = true;
  head.num_layers = 1;
  head.num_skipped_layers = 0;
  head.linear = {};
  head.window = 0;
  head.windowed_layers.clear();
  head.window_rope_theta.reset();
  head.unrotated_layers.clear();
  head.dense_layers.clear();
  head.vision.reset();
  head.raw_json.clear();
  return head;
}

WeightsPtr mtp_head_of(const Weights& model, const WeightsPtr& head) {
  auto of_model = std::make_shared<Weights>(*head);
  of_model->version = model.version;
  share_with_model(*of_model, model);
  return of_model;
}

WeightsPtr with_mtp_head(const WeightsPtr& model, const WeightsPtr& head) {
  auto whole = std::make_shared<Weights>(*model);
  whole->mtp = mtp_head_of(*model, head);
  return whole;
}

bool is_of_mtp_head(std::string_view name, const ModelConfig& model) {
  if (!model.mtp) return false;
  if (model.mtp->names == MtpNames::kApart) return name.starts_with("mtp.");
  for (std::int64_t i = 0; i < model.num_skipped_layers; ++i)
    if (name.starts_with(fmt::format("model.layers.{}.", model.num_layers + i))) return true;
  return false;
}

std::vector<WeightSource> mtp_sources(const ModelConfig& model) {
  std::vector<WeightSource> sources;
  if (!model.mtp || model.mtp->folder.empty()) return sources;
  const auto files = std::make_shared<const io::SafetensorsFolder>(io::SafetensorsFolder::open(model.mtp->folder));
  for (const auto& [name, ref] : files->tensors()) {
    if (!is_of_mtp_head(name, model) || is_of_fp8(name, model)) continue;
    const std::vector<std::int64_t>& shape = ref.entry->shape;
    const std::int64_t count = ref.entry->num_elements(), rows = shape.empty() ? 1 : shape[0];
    StoredTensor stored(ref);
    if (model.fp8 && ref.entry->type == io::StoredType::kF8E4M3) stored = stored.scaled(find_scales(*files, ref, *model.fp8));
    sources.push_back({.name = name,
                       .shape = shape.size() < 2 ? Shape{count} : Shape{rows, count / std::max<std::int64_t>(rows, 1)},
                       .read =
                           [files, stored](std::int64_t first, std::span<float> out) {
                             stored.read_f32(first, out);
                             stored.check_whole();
                           },
                       .is_exact = ref.entry->type == io::StoredType::kF32,
                       .file_shape = shape});
  }
  return sources;
}

}  // namespace prl::nn
