#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/data/dataset_layout.hpp"
#include "io/hub/hub_settings.hpp"

namespace prl::io {

/// Data files of one part of a data set as users name it, the first of these that there is:
///   1. a data file: its only split is train;
///   2. a folder, laid out as Hugging Face's data sets are;
///   3. a hub id. The hub is asked what the data set holds, and files of the part that are not in the local cache are downloaded.
///      Without the hub (HF_HUB_OFFLINE, no connection) the cache alone is used.
/// Errors    Error{kNotFound} says what was looked for, and which subsets or splits there are; those of HubClient.
std::vector<std::filesystem::path> find_data_files(const std::string& name, const DatasetPart& part, const HubSettings& settings);

}  // namespace prl::io
