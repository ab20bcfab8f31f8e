#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/hub/hub_settings.hpp"

namespace prl::io {

/// What is wanted of a model.
enum class ModelParts {
  kAll,   ///< config.json, weights as safetensors, tokenizer
  kText,  ///< the tokenizer with its chat template
};

/// Folder of a model as users name it, the first of these that there is:
///   1. a folder of that path;
///   2. a hub id whose files are complete in the local cache: nothing is asked of the hub then;
///   3. a hub id, downloaded into that cache, with progress.
/// Errors    Error{kNotFound} says what was looked for and where, and what is missing with HF_HUB_OFFLINE; those of HubClient.
std::filesystem::path find_model(const std::string& name, ModelParts parts, const HubSettings& settings);

/// Names of wanted files that a folder lacks, shards named by its index included; empty if it is complete.
std::vector<std::string> missing_model_files(const std::filesystem::path& folder, ModelParts parts);

/// Files of a repository that a model needs, config.json first; of weights either model.safetensors or the index, whose shards
/// follow when it is read. Error{kNotFound} naming what is there instead if there are no safetensors.
std::vector<std::string> model_files(const std::vector<std::string>& listed, ModelParts parts, const std::string& subject);

/// Shards that an index names, checked. Error{kCorrupt} names file and entry.
std::vector<std::string> shards_of_index(const std::filesystem::path& index);

}  // namespace prl::io
