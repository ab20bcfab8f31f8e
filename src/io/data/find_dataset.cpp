#include "io/data/find_dataset.hpp"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "io/data/row_table.hpp"
#include "io/hub/hub_client.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kMaxFiles = 1'000'000;
constexpr const char* kCard = "README.md";

std::vector<CardConfig> card_of(const fs::path& folder) {
  const fs::path path = folder / kCard;
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return {};
  return read_dataset_card(read_file(path, kMaxCardBytes), path.string());
}

/// Paths of all files below a folder, relative to it.
std::vector<std::string> list_folder(const fs::path& folder) {
  std::vector<std::string> files;
  try {
    for (auto it = fs::recursive_directory_iterator(folder); it != fs::recursive_directory_iterator(); ++it) {
      if (it->is_directory() && it->path().filename().string().starts_with('.')) {
        it.disable_recursion_pending();
      } else if (it->is_regular_file()) {  // links to files count
        files.push_back(it->path().lexically_relative(folder).generic_string());
        if (files.size() > kMaxFiles) fail(ErrorCode::kInvalidArgument, "{} holds more than {} files", folder.string(), kMaxFiles);
      }
    }
  } catch (const fs::filesystem_error& cause) {
    fail(ErrorCode::kIo, "cannot list {}: {}", folder.string(), cause.what());
  }
  return files;
}

std::vector<fs::path> in_folder(const fs::path& folder, const DatasetPart& part, std::string_view subject) {
  std::vector<fs::path> paths;
  for (const std::string& file : select_data_files(list_folder(folder), card_of(folder), part, subject)) paths.push_back(folder / file);
  return paths;
}

/// Warns if "x-00002-of-00007" lacks neighbours: a part that was not downloaded.
void warn_of_missing_shards(const std::vector<fs::path>& files, std::string_view subject) {
  for (const fs::path& file : files) {
    const std::string name = file.filename().string();
    const std::size_t of = name.find("-of-");
    std::size_t wanted = 0;
    if (of == std::string::npos || std::from_chars(name.data() + of + 4, name.data() + name.size(), wanted).ec != std::errc()) continue;
    if (wanted != files.size())
      log::warning("{}: {} of {} shards are in the cache; the others are left out", subject, files.size(), wanted);
    return;
  }
}

std::vector<fs::path> from_hub(const std::string& name, const DatasetPart& part, const HubSettings& settings) {
  const HubRepo repo{HubKind::kDataset, name, "main"};
  HubClient hub(settings);
  const HubListing listing = hub.list(repo);
  const std::string subject = fmt::format("data set {} on {}", name, settings.endpoint);
  std::vector<CardConfig> card;
  if (std::find(listing.files.begin(), listing.files.end(), kCard) != listing.files.end())
    card = card_of(hub.fetch(repo, listing.commit, {kCard}));
  const std::vector<std::string> files = select_data_files(listing.files, card, part, subject);
  const fs::path folder = hub.fetch(repo, listing.commit, files);
  std::vector<fs::path> paths;
  for (const std::string& file : files) paths.push_back(folder / file);
  return paths;
}

}  // namespace

std::vector<fs::path> find_data_files(const std::string& name, const DatasetPart& part, const HubSettings& settings) {
  std::error_code error;
  if (fs::is_regular_file(name, error)) {
    if (part.subset) fail(ErrorCode::kNotFound, "{} is a file and has no subset '{}'", name, *part.subset);
    if (part.split != "train") fail(ErrorCode::kNotFound, "{} is a file: its only split is train, not '{}'", name, part.split);
    return {name};
  }
  if (fs::is_directory(name, error)) return in_folder(name, part, name);
  if (!is_hub_id(name))
    fail(ErrorCode::kNotFound, "data {}: there is no such file or folder, and it is no name on the Hugging Face hub either", name);
  const HubCache cache(settings.cache_dir);
  const HubRepo repo{HubKind::kDataset, name, "main"};
  const auto from_cache = [&]() -> std::vector<fs::path> {
    const std::optional<std::string> commit = cache.commit_of(repo);
    if (!commit || !fs::is_directory(cache.snapshot(repo, *commit), error)) return {};
    const std::string subject = fmt::format("the copy of data set {} in {}", name, settings.cache_dir.string());
    std::vector<fs::path> paths = in_folder(cache.snapshot(repo, *commit), part, subject);
    warn_of_missing_shards(paths, subject);
    return paths;
  };
  if (settings.is_offline) {
    std::vector<fs::path> paths = from_cache();
    if (paths.empty())
      fail(ErrorCode::kNotFound,
           "data {}: there is no such file or folder, it is not in the cache {}, and HF_HUB_OFFLINE forbids to download it", name,
           settings.cache_dir.string());
    return paths;
  }
  try {
    return from_hub(name, part, settings);
  } catch (const Error& cause) {
    if (cause.code() != ErrorCode::kUnavailable && cause.code() != ErrorCode::kDeadline) {
      if (cause.code() == ErrorCode::kNotFound)
        throw cause.with_context(fmt::format("data {}: there is no such file or folder; from the hub", name));
      throw;
    }
    std::vector<fs::path> paths = from_cache();
    if (paths.empty())
      throw cause.with_context(fmt::format("data {}: there is no such file or folder, no copy in the cache, and from the hub", name));
    log::warning("{}; the copy of {} in the cache is used", cause.what(), name);
    return paths;
  }
}

}  // namespace prl::io
