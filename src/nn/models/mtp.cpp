#include <fmt/format.h>

#include "base/log.hpp"
#include "io/safetensors.hpp"
#include "nn/models/family.hpp"

// Heads for multi-token prediction: which of those that files hold this build computes.
namespace prl::nn {
namespace {

bool has_weight_files(const std::filesystem::path& folder) {
  return std::filesystem::exists(folder / "model.safetensors") || std::filesystem::exists(folder / "model.safetensors.index.json");
}

}  // namespace

void read_mtp(const ConfigReader& reader, const Family& family, const std::filesystem::path& folder, ModelConfig& config) {
  const bool is_named = reader.integer("mtp_num_hidden_layers", 0, 0, 64) > 0;
  const bool is_behind = family.mtp == MtpNames::kNextLayer && config.num_skipped_layers > 0;
  const bool is_apart = !config.has_single_parts && (is_named || family.mtp == MtpNames::kApart);
  if ((!is_behind && !is_apart) || !has_weight_files(folder)) return;
  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder);
  if (is_behind && files.find(fmt::format("model.layers.{}.eh_proj.weight", config.num_layers)).entry != nullptr)
    config.mtp = MtpConfig{MtpNames::kNextLayer, config.num_layers, folder};
  else if (is_apart && files.find("mtp.fc.weight").entry != nullptr)
    config.mtp = MtpConfig{MtpNames::kApart, 0, folder};
  if (!config.mtp || !reader.boolean("mtp_use_dedicated_embeddings", false)) return;
  log::info(
      "{}: key 'mtp_use_dedicated_embeddings' is true; this build has heads that share the model's embedding, so that one is left out",
      reader.subject());
  config.mtp.reset();
}

}  // namespace prl::nn
