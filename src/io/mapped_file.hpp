#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace prl::io {

/// A read-only memory map of one file; the pages stay valid while the object lives. Any thread.
class MappedFile {
 public:
  /// Error{kNotFound} or Error{kIo} names the path. An empty file maps to an empty span.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const noexcept { return {static_cast<const std::byte*>(data_), size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  MappedFile() = default;
  std::filesystem::path path_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace prl::io
