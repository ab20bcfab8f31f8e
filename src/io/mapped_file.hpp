#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace prl::io {

/// A read-only memory map of one file; the pages stay valid while the object lives. Any thread.
///
/// Somebody may cut the file short, or its disk may fail, while it is mapped; the kernel then answers a read with SIGBUS, which would end
/// the process. Here such a read sees zeros instead, and check_whole() throws from then on: whoever has copied bytes out calls it before
/// using them.
class MappedFile {
 public:
  /// Error{kNotFound} or Error{kIo} names the path. An empty file maps to an empty span.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const noexcept { return {static_cast<const std::byte*>(data_), size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }
  /// Error{kCorrupt} naming the file if a page of it could not be read.
  void check_whole() const;

 private:
  MappedFile() = default;
  std::filesystem::path path_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
  int guard_ = -1;  // which entry of the table of guarded maps; -1: none was free
  std::atomic<bool> is_cut_{false};
};

}  // namespace prl::io
