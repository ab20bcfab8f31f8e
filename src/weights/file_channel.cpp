#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/regular_file.hpp"
#include "io/checkpoint_dir.hpp"
#include "io/safetensors.hpp"
#include "weights/weight_channel.hpp"

namespace prl::weights {

namespace fs = std::filesystem;

namespace {

constexpr const char* kStable = "STABLE";
constexpr const char* kManifest = "manifest.json";
constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{16} << 20;

fs::path folder_of(const fs::path& root, std::int64_t version) { return root / fmt::format("step_{}", version); }

/// Versions that have a folder, ascending, whole or not.
std::vector<std::int64_t> list_versions(const fs::path& root) {
  std::vector<std::int64_t> versions;
  std::error_code ec;
  for (fs::directory_iterator it(root, ec), end; !ec && it != end; it.increment(ec))
    if (const std::int64_t version = parse_step_dir(it->path().filename().string()); version >= 0) versions.push_back(version);
  std::ranges::sort(versions);
  return versions;
}

/// STABLE goes first, so that a reader never finds a folder that still looks whole while its files vanish.
void remove_version(const fs::path& folder) {
  std::error_code ec;
  fs::remove(folder / kStable, ec);
  fs::remove_all(folder, ec);
  if (ec) log::warning("cannot remove old broadcast {}: {}", folder.string(), ec.message());
}

class FileChannel final : public WeightChannel {
 public:
  explicit FileChannel(FileChannelOptions options) : options_(std::move(options)) {
    std::error_code ec;
    fs::create_directories(options_.folder, ec);
    if (ec) fail(ErrorCode::kIo, "[weight_broadcast] cannot create {}: {}", options_.folder.string(), ec.message());
  }

  void publish(Publication publication) override {
    PRL_CHECK(publication.save != nullptr, "a publication through files needs a save callback");
    // Only the trainer may: a reader on another machine would take the trainer's process for a dead one.
    if (!std::exchange(has_published_, true)) io::remove_stale_checkpoints(options_.folder);
    const std::int64_t version = publication.manifest.version.value;
    const fs::path folder = folder_of(options_.folder, version);
    // After a resume the starting version is there already, and an engine may be reading it: the same weights stay in place.
    if (holds(folder, publication.manifest)) return;
    // Anything else of that name is left over from a run that was stopped here; it must not mix with the new one.
    if (fs::exists(folder)) remove_version(folder);
    publication.save(folder);
    write_file_atomic(folder / kManifest, to_json(publication.manifest));
    write_file_atomic(folder / kStable, "");
    clean_up(version);
  }

  std::optional<PublishedWeights> latest() override { return newest_above(options_.folder, -1); }

  /// A thread of the feed looks at the folder: neither network file systems nor a coroutine's thread can be asked to say what changed.
  std::shared_ptr<VersionFeed> follow() override {
    return std::make_shared<PollingFeed>(describe(), options_.poll,
                                         [options = options_](PolicyVersion after) { return next_above(options.folder, after.value); });
  }

  std::string describe() const override { return "weights under " + options_.folder.string(); }

 private:
  /// The version if it is whole.
  static std::optional<PublishedWeights> read_version(const fs::path& root, std::int64_t version) {
    const fs::path folder = folder_of(root, version);
    std::error_code ec;
    if (!fs::exists(folder / kStable, ec)) return std::nullopt;
    const fs::path manifest_path = folder / kManifest;
    PublishedWeights found{parse_manifest(read_regular_file(manifest_path, kMaxManifestBytes), manifest_path.string()), nullptr, folder};
    if (found.manifest.version.value != version)
      fail(ErrorCode::kCorrupt, "[weight_broadcast] {} says version {}, its folder says {}", manifest_path.string(),
           found.manifest.version.value, version);
    return found;
  }
  static std::optional<PublishedWeights> newest_above(const fs::path& root, std::int64_t after) {
    std::vector<std::int64_t> versions = list_versions(root);
    for (auto it = versions.rbegin(); it != versions.rend() && *it > after; ++it)
      if (auto found = read_version(root, *it)) return found;
    return std::nullopt;
  }
  /// The oldest: two may have come since the last look, and a feed may keep each for its turn. Of those that a newer one follows damaged
  /// ones are passed over.
  static std::optional<PublishedWeights> next_above(const fs::path& root, std::int64_t after) {
    const std::vector<std::int64_t> versions = list_versions(root);
    for (const std::int64_t version : versions) {
      if (version <= after) continue;
      try {
        if (auto found = read_version(root, version)) return found;
      } catch (const Error& error) {
        if (version == versions.back()) throw;
        log::warning("{}", error.what());
      }
    }
    return std::nullopt;
  }

  static bool holds(const fs::path& folder, const WeightManifest& manifest) {
    std::error_code ec;
    if (!fs::exists(folder / kStable, ec)) return false;
    try {
      if (!(parse_manifest(read_regular_file(folder / kManifest, kMaxManifestBytes), folder.string()) == manifest)) return false;
      // The manifest speaks of the weights that were written; the files may have been damaged since.
      for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".safetensors") io::SafetensorsFile::open(entry.path());
      return true;
    } catch (const Error& error) {
      log::warning("{} is damaged and is written again: {}", folder.string(), error.what());
      return false;
    }
  }

  void clean_up(std::int64_t newest) const {
    const std::vector<std::int64_t> versions = list_versions(options_.folder);
    std::vector<std::int64_t> kept;
    if (options_.keep_interval && *options_.keep_interval > 0)
      std::ranges::copy_if(versions, std::back_inserter(kept),
                           [&](std::int64_t version) { return version % *options_.keep_interval == 0; });
    for (const std::int64_t expired : io::expired_steps(kept, options_.retention)) std::erase(kept, expired);
    for (const std::int64_t version : versions)
      if (version <= newest - options_.keep_versions && std::ranges::find(kept, version) == kept.end())
        remove_version(folder_of(options_.folder, version));
  }

  FileChannelOptions options_;
  bool has_published_ = false;
};

}  // namespace

std::shared_ptr<WeightChannel> make_file_channel(FileChannelOptions options) { return std::make_shared<FileChannel>(std::move(options)); }

void remove_broadcasts_after(const fs::path& folder, std::int64_t step) {
  for (const std::int64_t version : list_versions(folder))
    if (version > step) remove_version(folder_of(folder, version));
}

void remove_broadcasts_until(const fs::path& folder, std::int64_t step) {
  for (const std::int64_t version : list_versions(folder))
    if (version <= step) remove_version(folder_of(folder, version));
}

}  // namespace prl::weights
