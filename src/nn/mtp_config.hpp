#pragma once

#include <cstdint>
#include <filesystem>

namespace prl::nn {

/// How files name the tensors of a head for multi-token prediction: "mtp.fc", "mtp.layers.0.", ... (Qwen 3.5), or as one more layer of the
/// model "model.layers.N.eh_proj", ... (DeepSeek-V3, GLM-4.5).
enum class MtpNames : std::uint8_t { kApart, kNextLayer };

/// A head for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2) in a model's files. Of several the first.
struct MtpConfig {
  MtpNames names = MtpNames::kApart;
  std::int64_t layer = 0;             ///< N in names of kNextLayer
  std::filesystem::path folder = {};  ///< whose files have its tensors; empty: none has
  bool operator==(const MtpConfig&) const = default;
};

}  // namespace prl::nn
