#pragma once

#include <stop_token>

#include "config/sft_config.hpp"

namespace prl::launch {

/// `prl sft`: supervised fine-tuning on one device. Returns the exit status.
int run_sft_role(const config::SftConfig& config, std::stop_token stop);

}  // namespace prl::launch
