#pragma once

#include <filesystem>
#include <string>

namespace prl::dashboard {

/// The memory plans that the processes of a run made, from the files in `folder`: [{"process", "available", "total", "parts": [{"name",
/// "bytes", "foretold"?}, ...], "host": [...], "num_kv_blocks"}, ...], in the order of names, 64 at most. Damaged files are left out.
std::string plans_json(const std::filesystem::path& folder);

}  // namespace prl::dashboard
