#pragma once

#include <cstdint>
#include <filesystem>

#include "env/environment.hpp"

namespace prl::tools {

struct MakeDataOptions {
  std::filesystem::path output;    ///< JSONL file to write; replaced whole
  std::int64_t num_examples = -1;  ///< -1: every task of the split
  env::Split split = env::Split::kTrain;
};

/// Writes conversations for SFT ({"messages": [...], "tools": [...]} per line, without tools where there are none) from an environment's
/// demonstrations; returns how many. Error{kInvalidArgument} if the environment knows no demonstrations.
std::int64_t make_sft_data(const env::Environment& environment, const MakeDataOptions& options);

}  // namespace prl::tools
