#include "io/hub/hub_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json.hpp>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "io/hub/hub_client.hpp"
#include "io/safetensors.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kRanks = "tiktoken.model";
/// Taken where they are; of these only tokenizer.json is needed, or what stands in its place.
constexpr const char* kTextFiles[] = {"tokenizer.json",
                                      kRanks,
                                      "tokenizer_config.json",
                                      "special_tokens_map.json",
                                      "added_tokens.json",
                                      "vocab.json",
                                      "merges.txt",
                                      "chat_template.jinja",
                                      "chat_template.json",
                                      "generation_config.json",
                                      "preprocessor_config.json",
                                      "additional_chat_templates/tool_use.jinja"};

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 6;
  const std::vector<std::string> first(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(kMost, names.size())));
  return fmt::format("{}{}", fmt::join(first, ", "), names.size() > kMost ? fmt::format(" and {} more", names.size() - kMost) : "");
}

}  // namespace

std::vector<std::string> shards_of_index(const fs::path& index) {
  const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "{}: {}", index.string(), what); };
  json::parse_options options;
  options.max_depth = 8;
  json::error_code error;
  const json::value value = json::parse(read_file(index, kMaxSafetensorsHeaderBytes), error, json::storage_ptr(), options);
  const json::object* object = error ? nullptr : value.if_object();
  const json::value* map = object == nullptr ? nullptr : object->if_contains("weight_map");
  if (map == nullptr || !map->is_object()) bad("no JSON object with a weight_map");
  std::set<std::string> shards;
  for (const auto& member : map->get_object()) {
    if (!member.value().is_string()) bad(fmt::format("tensor '{}': its shard is no string", std::string_view(member.key())));
    const std::string shard(std::string_view(member.value().get_string()));
    if (shard.empty() || fs::path(shard).filename() != fs::path(shard))
      bad(fmt::format("tensor '{}': its shard '{}' is not a file of this folder", std::string_view(member.key()), shard.substr(0, 200)));
    shards.insert(shard);
  }
  return {shards.begin(), shards.end()};
}

std::vector<std::string> missing_model_files(const fs::path& folder, ModelParts parts) {
  std::vector<std::string> missing;
  const auto want = [&](const std::string& name) {
    if (!is_there(folder / name)) missing.push_back(name);
  };
  if (!is_there(folder / kRanks)) want("tokenizer.json");
  if (parts == ModelParts::kText) return missing;
  want("config.json");
  if (is_there(folder / kWhole)) return missing;
  if (!is_there(folder / kIndex)) {
    missing.emplace_back(kWhole);
    return missing;
  }
  for (const std::string& shard : shards_of_index(folder / kIndex)) want(shard);
  return missing;
}

std::vector<std::string> model_files(const std::vector<std::string>& listed, ModelParts parts, const std::string& subject) {
  const auto has = [&](std::string_view name) { return std::find(listed.begin(), listed.end(), name) != listed.end(); };
  std::vector<std::string> files;
  if (parts == ModelParts::kAll) {
    if (!has("config.json"))
      fail(ErrorCode::kNotFound, "{} holds no config.json, but {}", subject, listed.empty() ? "nothing" : list_of(listed));
    files.emplace_back("config.json");
  }
  if (parts == ModelParts::kText && !has("tokenizer.json") && !has(kRanks))
    fail(ErrorCode::kNotFound, "{} holds no tokenizer.json, but {}", subject, listed.empty() ? "nothing" : list_of(listed));
  for (const char* name : kTextFiles)
    if (has(name)) files.emplace_back(name);
  if (parts == ModelParts::kText) return files;
  if (has(kWhole)) {
    files.emplace_back(kWhole);
  } else if (has(kIndex)) {
    files.emplace_back(kIndex);
  } else {
    std::vector<std::string> others;
    for (const std::string& name : listed)
      if (name.ends_with(".bin") || name.ends_with(".gguf") || name.ends_with(".pth") || name.ends_with(".safetensors"))
        others.push_back(name);
    fail(ErrorCode::kNotFound, "{} holds no model.safetensors{}{}", subject, others.empty() ? "" : ", but " + list_of(others),
         std::any_of(others.begin(), others.end(), [](const std::string& n) { return n.ends_with(".gguf"); })
             ? "; download a GGUF file and convert it with `prl convert`"
             : "");
  }
  return files;
}

fs::path find_model(const std::string& name, ModelParts parts, const HubSettings& settings) {
  std::error_code error;
  if (fs::is_directory(name, error)) return name;
  if (!is_hub_id(name))
    fail(ErrorCode::kNotFound,
         "model {}: there is no such folder, and it is no name on the Hugging Face hub either. Give the path of a model folder "
         "(config.json, "
         "safetensors, tokenizer.json), a hub id such as Qwen/Qwen3-0.6B, or make a small model with `prl init-model`",
         name);
  const HubRepo repo{HubKind::kModel, name, "main"};
  const HubCache cache(settings.cache_dir);
  const std::optional<std::string> cached = cache.commit_of(repo);
  std::vector<std::string> missing;
  if (cached) {
    const fs::path snapshot = cache.snapshot(repo, *cached);
    missing = missing_model_files(snapshot, parts);
    if (missing.empty()) {
      log::debug("model {}: from the cache, {}", name, snapshot.string());
      return snapshot;
    }
  }
  if (settings.is_offline) {
    if (cached)
      fail(ErrorCode::kNotFound, "model {}: the copy in {} lacks {}, and HF_HUB_OFFLINE forbids to download it", name,
           cache.snapshot(repo, *cached).string(), list_of(missing));
    fail(ErrorCode::kNotFound, "model {}: there is no such folder, it is not in the cache {}, and HF_HUB_OFFLINE forbids to download it",
         name, settings.cache_dir.string());
  }
  try {
    HubClient hub(settings);
    const HubListing listing = hub.list(repo);
    log::info("model {}: downloading from {} into {}", name, settings.endpoint, settings.cache_dir.string());
    std::vector<std::string> files = model_files(listing.files, parts, fmt::format("model {} on {}", name, settings.endpoint));
    fs::path folder = hub.fetch(repo, listing.commit, files);
    if (!files.empty() && files.back() == kIndex) folder = hub.fetch(repo, listing.commit, shards_of_index(folder / kIndex));
    return folder;
  } catch (const Error& cause) {
    if (cause.code() != ErrorCode::kUnavailable && cause.code() != ErrorCode::kDeadline && cause.code() != ErrorCode::kNotFound) throw;
    throw Error(cause.code(), fmt::format("model {}: there is no folder of that name{}; from the hub: {}", name,
                                          cached ? ", the copy in the cache is not complete" : " and no copy in the cache", cause.what()));
  }
}

}  // namespace prl::io
