#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace prl {

/// Whole file as bytes. Error{kNotFound}, {kIo}; {kInvalidArgument} if larger than `max_bytes`.
std::string read_file(const std::filesystem::path& path, std::uint64_t max_bytes = std::uint64_t{1} << 30);
/// Writes to "<path>.tmp-<pid>", fsyncs, renames over `path`, fsyncs the folder: readers see the old or the new file whole.
/// Error{kIo} says the path and the reason (a full disk, say) and leaves `path` untouched.
void write_file_atomic(const std::filesystem::path& path, std::string_view bytes);
/// fsyncs every file below `temporary` and renames the folder to `final_path` (which must not exist).
void publish_directory(const std::filesystem::path& temporary, const std::filesystem::path& final_path);
/// "step_<digits>" to its number, or -1.
std::int64_t parse_step_dir(std::string_view name) noexcept;
/// 64-bit XXH3 of bytes.
std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed = 0) noexcept;
std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed = 0) noexcept;

}  // namespace prl
