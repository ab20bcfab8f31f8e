#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "nn/model_config.hpp"
#include "nn/models/config_reader.hpp"

namespace prl::nn {

/// What sets one Hugging Face model type apart: its switches in config.json, from which its tensors follow (TensorTable). One small file
/// each.
struct Family {
  std::string_view model_type;    ///< of config.json
  std::string_view architecture;  ///< "architectures" of config.json
  /// Sets the family's switches (biases, norms, head_dim default) after the common keys were read.
  void (*configure)(const ConfigReader& reader, ModelConfig& config);
  /// Adds the family's own keys to a config.json made here.
  void (*describe)(const ModelConfig& config, boost::json::object& object);
  // Where config.json says nothing:
  double partial_rotary_factor = 1.0;  ///< 1: whole heads, whatever it names
  double rope_theta = 10000.0;
  bool tie_word_embeddings = false;
};

/// All families of this build.
std::span<const Family* const> families() noexcept;
/// Error{kNotImplemented} that lists the known ones.
const Family& find_family(std::string_view model_type, std::string_view subject);

/// Refuses sliding windows that are switched on.
void refuse_sliding_window(const ConfigReader& reader, bool window_in_use);

extern const Family kLlamaFamily;
extern const Family kMistralFamily;
extern const Family kSmolLm3Family;
extern const Family kQwen2Family;
extern const Family kQwen3Family;
extern const Family kQwen3MoeFamily;
extern const Family kGlm4MoeFamily;

}  // namespace prl::nn
