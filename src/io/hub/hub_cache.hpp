#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "io/hub/hub_settings.hpp"

namespace prl::io {

/// Holds an exclusive lock on a file while it lives; the kernel drops it when the process ends. Locks of Hugging Face's clients on
/// the same file exclude it too.
class FileLock {
 public:
  /// Error{kDeadline} naming the file after `timeout`; {kIo}.
  FileLock(const std::filesystem::path& path, std::chrono::milliseconds timeout);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_ = -1;
};

/// The local cache that Hugging Face's clients share:
///
///   models--<organisation>--<name>/
///     refs/main                     text: the commit that the branch pointed to when last asked
///     blobs/<etag>                  contents; <etag>.incomplete while they arrive
///     snapshots/<commit>/<file>     links to ../../blobs/<etag>
///   .locks/models--.../<etag>.lock
///
/// Threads  immutable; several processes may use one cache at once.
class HubCache {
 public:
  explicit HubCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  std::filesystem::path repo_folder(const HubRepo& repo) const;
  /// The commit behind the revision, as far as the cache knows. Malformed refs count as absent.
  std::optional<std::string> commit_of(const HubRepo& repo) const;
  std::filesystem::path snapshot(const HubRepo& repo, std::string_view commit) const;
  /// Whether the snapshot holds the file, its contents included.
  bool has_file(const HubRepo& repo, std::string_view commit, const std::string& file) const;
  std::filesystem::path blob(const HubRepo& repo, std::string_view etag) const;
  std::filesystem::path lock_file(const HubRepo& repo, std::string_view etag) const;

  /// Makes snapshots/<commit>/<file> point to a blob that is there. Error{kIo}.
  void link(const HubRepo& repo, std::string_view commit, const std::string& file, std::string_view etag) const;
  /// Notes what the revision points to; nothing for a revision that is a commit itself.
  void set_ref(const HubRepo& repo, std::string_view commit) const;

 private:
  std::filesystem::path folder_;
};

/// 40 hexadecimal digits.
bool is_commit(std::string_view text) noexcept;
/// Error{kCorrupt} naming `subject` unless `file` stays inside its folder ("a/b.txt", not "../b", "/b" or "a//b").
void check_hub_path(std::string_view file, std::string_view subject);

}  // namespace prl::io
