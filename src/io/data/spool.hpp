#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "io/mapped_file.hpp"

namespace prl::io {

/// A temporary file without a name: written front to back, then mapped. The disk space is free again when the map is gone, also
/// after a crash. Lies in TMPDIR, or where the system keeps such files. Error{kIo}.
class Spool {
 public:
  Spool();
  ~Spool();
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;
  void append(std::string_view bytes);
  std::uint64_t size() const noexcept { return size_; }
  /// Nothing may be appended after it.
  std::shared_ptr<const MappedFile> map();

 private:
  void flush();
  int fd_ = -1;
  std::filesystem::path folder_;
  std::string buffer_;
  std::uint64_t size_ = 0;
};

/// The contents of a .gz or .zst file. Error{kCorrupt} names the file; {kIo}.
std::shared_ptr<const MappedFile> decompress_file(const std::filesystem::path& path);

}  // namespace prl::io
