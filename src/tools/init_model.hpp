#pragma once

#include "config/tool_config.hpp"

namespace prl::tools {

/// Makes a model folder with random weights and a byte-level tokenizer. A model that is there is replaced with `overwrite`, and only once
/// the new one is complete. Error{kInvalidArgument} names the option; {kAlreadyExists}; {kIo}.
void init_model(const config::InitModelConfig& config);

}  // namespace prl::tools
