#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace prl::dashboard {

/// Follows a file of lines that another process appends to, from where the last call ended.
///
/// Lines come in pieces, so that memory does not grow with their length; a line without its end waits for the rest. A file that another
/// one replaced, that became shorter or whose known part changed is read again from its start: `restart` is called first.
/// Regular files only: a pipe or a device of that name counts as absent. One thread at a time.
class LineReader {
 public:
  struct Sink {
    std::function<void()> restart;                                                ///< forget everything of this file
    std::function<void(std::string_view piece)> piece;                            ///< a part of the current line, without its end
    std::function<void(std::uint64_t offset, std::uint64_t num_bytes)> end_line;  ///< where the line lies, its end not counted
  };
  explicit LineReader(std::filesystem::path path) : path_(std::move(path)) {}

  /// Reads up to `max_bytes`; true if that was not all there is. A file that cannot be read now is read later.
  bool read(const Sink& sink, std::uint64_t max_bytes);
  /// The pieces of a line that is not whole yet come again, once the file has another size: a killed run leaves a torn line for good.
  void rewind_line();
  const std::filesystem::path& path() const noexcept { return path_; }
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  bool is_same_file(int fd, std::uint64_t device, std::uint64_t inode, std::uint64_t size) const;
  void feed(std::string_view bytes, const Sink& sink);

  std::filesystem::path path_;
  std::uint64_t device_ = 0, inode_ = 0;
  std::uint64_t offset_ = 0;      ///< read so far
  std::uint64_t line_begin_ = 0;  ///< of the line that is not whole yet
  std::uint64_t torn_end_ = 0;    ///< where a line that was rewound ended without being whole; 0: there is none
  std::string tail_;              ///< the last bytes before offset_: they tell a rewritten file
  bool was_read_ = false;
};

/// `num_bytes` at `offset` of a regular file; fewer at its end. Error{kIo}, {kNotFound}.
std::string read_range(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t num_bytes);

}  // namespace prl::dashboard
