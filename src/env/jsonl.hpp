#pragma once

#include <boost/json/object.hpp>

#include <filesystem>
#include <vector>

namespace prl::env {

/// The objects of a JSON Lines file, blank lines skipped. Error{kNotFound}; Error{kCorrupt} naming file and line.
std::vector<boost::json::object> read_jsonl(const std::filesystem::path& path);

}  // namespace prl::env
