#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/hub/hub_cache.hpp"
#include "io/hub/hub_settings.hpp"
#include "net/http_client.hpp"

namespace prl::io {

/// What a repository holds at one commit.
struct HubListing {
  std::string commit;
  std::vector<std::string> files;  ///< paths inside it
};

/// Talks to the hub and fills the local cache. Downloads go on where they stopped, in this process or an earlier one, and count
/// only after size and hash agree with what the hub said. The token is sent to the hub's own host and to no other.
///
/// Errors    Error{kNotFound} no such repository, revision or file, or a private one; {kUnauthorized} gated, or a bad token;
///           {kUnavailable}, {kDeadline} naming the address; {kCorrupt} contents that do not match; {kIo}; {kOverloaded}.
/// Threads   one at a time per object; any number of objects and processes may share a cache.
class HubClient {
 public:
  explicit HubClient(HubSettings settings);

  HubListing list(const HubRepo& repo);
  /// Brings files into the cache, in order, and logs progress; returns the snapshot's folder. `commit` as from list().
  std::filesystem::path fetch(const HubRepo& repo, const std::string& commit, const std::vector<std::string>& files);
  const HubCache& cache() const noexcept { return cache_; }

 private:
  struct FileInfo {
    std::string etag;  ///< without quotes; names the blob
    std::optional<std::uint64_t> size;
    std::string url;  ///< where the contents are
  };
  class Progress;

  FileInfo ask(const HubRepo& repo, const std::string& commit, const std::string& file);
  void download(const HubRepo& repo, const std::string& file, const FileInfo& info, Progress& progress);
  /// One connection's worth of bytes, appended to `path`; false if the file is complete, by the server's word.
  void receive(const HubRepo& repo, const std::string& file, const FileInfo& info, const std::filesystem::path& path, Progress& progress);
  void verify(const std::string& file, const FileInfo& info, const std::filesystem::path& path) const;
  /// A GET or HEAD with redirects followed. A HEAD stops at a redirect to another host, whose headers tell what is wanted.
  net::BodyStream open(std::string method, std::string url, net::Fields headers);
  net::HttpReply get(const std::string& url);
  [[noreturn]] void raise(const net::HttpReply& reply, const HubRepo& repo, const std::string& file) const;
  std::string resolve_url(const HubRepo& repo, const std::string& commit, const std::string& file) const;

  HubSettings settings_;
  HubCache cache_;
  std::chrono::steady_clock::time_point deadline_;
  net::BlockingHttpClient http_;
};

}  // namespace prl::io
