#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

/// metrics.jsonl: rows of several roles, of which each begins {"step": N, "role": "R", "time": T.
namespace prl::monitor {

struct RowKey {
  std::int64_t step = 0;
  std::string role;  ///< empty in files of earlier versions
};
/// Of a line without its end; nullopt if the line is not whole, which a power loss or a full disk leaves behind.
std::optional<RowKey> parse_row_key(std::string_view line);

struct TrimmedRows {
  std::int64_t num_late = 0, num_doubled = 0, num_damaged = 0;
};
/// Makes the file hold what a run that resumes after `last_step` keeps: rows of `roles` up to that step, the last one of each role and
/// step, in the order of steps; lines that are not whole go. Rows of other roles stay as they are; rows without a role count as every
/// role's. The file is replaced at once, or not at all if nothing changes; a sink that has it open goes on in the new one. Late rows are
/// appended to `keep_late_in` first unless that is empty. Error{kIo}.
TrimmedRows trim_rows(const std::filesystem::path& path, std::span<const std::string> roles, std::int64_t last_step,
                      const std::filesystem::path& keep_late_in = {});
/// Whether the file holds a row of this role.
bool has_rows_of(const std::filesystem::path& path, const std::string& role);
/// The highest step among the rows of this role; nullopt if it has none.
std::optional<std::int64_t> last_row_of(const std::filesystem::path& path, std::string_view role);

}  // namespace prl::monitor
