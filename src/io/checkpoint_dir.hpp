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

/// A file of a unit as its manifest lists it.
struct HashedFile {
  std::string path;  ///< relative to the unit's folder
  std::uint64_t num_bytes = 0;
  std::string xxh3;  ///< 16 hexadecimal digits
};
/// Reads the file. Error{kIo}, {kNotFound}.
HashedFile hash_file(const std::filesystem::path& folder, const std::string& path);

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
  /// Writes the manifest, syncs, renames. Error{kIo} leaves nothing under the final name. Files in `known`, which other processes wrote,
  /// are not read again; Error{kIo} if one is not there in the size that it names.
  void commit(std::span<const HashedFile> known = {});

 private:
  std::filesystem::path final_, temporary_;
  std::int64_t step_ = 0;
  bool has_unit_ = false, is_done_ = false;
};

/// <root>/step_<N>[/<unit>].
std::filesystem::path checkpoint_folder(const std::filesystem::path& root, std::int64_t step, const std::string& unit = {});
/// Reads the manifest and every file. Error{kNotFound} if there is no such unit, Error{kCorrupt} names the file that is missing,
/// of another size, changed or not listed. Of `num_readers` that look at the same unit, reader `reader` reads its share of the files and
/// looks at the sizes of the others.
void verify_checkpoint(const std::filesystem::path& root, std::int64_t step, const std::string& unit = {}, int reader = 0,
                       int num_readers = 1);
/// Steps for which every one of `units` is complete (none given: the step folder itself), ascending. Cheap: sizes are not compared.
std::vector<std::int64_t> list_checkpoints(const std::filesystem::path& root, std::span<const std::string> units = {});
/// The newest step of list_checkpoints() whose units all pass verify_checkpoint(); each that does not is skipped with a warning.
std::optional<std::int64_t> latest_checkpoint(const std::filesystem::path& root, std::span<const std::string> units = {});

/// Which steps survive a cleaning: the newest of all, the newest `keep_last`, and multiples of `keep_interval`. A rule that is absent
/// keeps nothing; both absent: everything stays.
struct CheckpointRetention {
  std::optional<std::int64_t> keep_last;
  std::optional<std::int64_t> keep_interval;
};
/// Which of `steps` (ascending) a cleaning removes.
std::vector<std::int64_t> expired_steps(std::span<const std::int64_t> steps, const CheckpointRetention& retention);
/// Removes the expired ones among the complete steps whole (all units) and returns them. `units` are all roles that a resume needs: a
/// step that lacks one of them neither counts nor is removed, because another role may still be writing its part. Several roles may
/// clean at once.
std::vector<std::int64_t> clean_checkpoints(const std::filesystem::path& root, std::span<const std::string> units,
                                            const CheckpointRetention& retention);
/// Removes a folder that readers may look into: it is renamed away before its files go, so that a kill in between leaves nothing that
/// looks complete. A folder that is gone already is no error; another failure is a warning and answers false. Links are left alone.
bool remove_published_folder(const std::filesystem::path& folder);
/// Removes leftovers ("*.tmp-*") of processes that are no longer alive on this machine. Returns how many.
int remove_stale_checkpoints(const std::filesystem::path& root);

}  // namespace prl::io
