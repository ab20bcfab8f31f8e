#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace prl::io {

/// Layout: <root>/step_<N>/<unit>/ (or <root>/step_<N>/ for an empty unit), one unit per role. A unit is written under
/// "<its name>.tmp-<pid>-<n>", gets a manifest.json with size and XXH3 of every file, is fsynced and renamed. What has its final
/// name and a manifest is complete; nothing else is ever listed.
inline constexpr const char* kManifestName = "manifest.json";

/// One unit of one step while it is being written. Not for several threads at once.
class CheckpointWriter {
 public:
  /// Makes the temporary folder. Error{kAlreadyExists} if the unit of this step is complete already; an incomplete one under the
  /// final name (no manifest) is replaced by commit().
  CheckpointWriter(const std::filesystem::path& root, std::int64_t step, const std::string& unit = {});
  /// Removes the temporary folder unless commit() succeeded.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Where to write files and subfolders.
  const std::filesystem::path& folder() const noexcept { return temporary_; }
  const std::filesystem::path& final_folder() const noexcept { return final_; }
  /// Writes the manifest, syncs, renames. Error{kIo} leaves nothing under the final name.
  void commit();

 private:
  std::filesystem::path final_, temporary_;
  std::int64_t step_ = 0;
  bool is_done_ = false;
};

/// <root>/step_<N>[/<unit>].
std::filesystem::path checkpoint_folder(const std::filesystem::path& root, std::int64_t step, const std::string& unit = {});
/// Reads the manifest and every file. Error{kNotFound} if there is no such unit, Error{kCorrupt} names the file that is missing,
/// of another size, changed or not listed.
void verify_checkpoint(const std::filesystem::path& root, std::int64_t step, const std::string& unit = {});
/// Steps for which every one of `units` is complete (none given: the step folder itself), ascending. Cheap: sizes are not compared.
std::vector<std::int64_t> list_checkpoints(const std::filesystem::path& root, std::span<const std::string> units = {});
/// The newest step of list_checkpoints() whose units all pass verify_checkpoint(); each that does not is skipped with a warning.
std::optional<std::int64_t> latest_checkpoint(const std::filesystem::path& root, std::span<const std::string> units = {});

/// Which steps survive a cleaning: the newest `keep_last`, and multiples of `keep_interval`. Absent: that rule keeps nothing;
/// both absent: everything stays.
struct CheckpointRetention {
  std::optional<std::int64_t> keep_last;
  std::optional<std::int64_t> keep_interval;
};
/// Removes other complete steps whole (all units) and returns them. A step is renamed away before its files go, so that a kill in
/// between leaves nothing that looks complete.
std::vector<std::int64_t> clean_checkpoints(const std::filesystem::path& root, std::span<const std::string> units,
                                            const CheckpointRetention& retention);
/// Removes leftovers ("*.tmp-*") of processes that are no longer alive on this machine. Returns how many.
int remove_stale_checkpoints(const std::filesystem::path& root);

}  // namespace prl::io
