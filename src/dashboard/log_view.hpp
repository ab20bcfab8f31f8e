#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::dashboard {

/// One line of a log file, taken apart; a line that continues another has neither time nor level of its own.
struct LogLine {
  std::uint64_t offset = 0;
  std::string time = {}, role = {}, text = {};
  int level = 1;  ///< 0 debug, 1 info, 2 success, 3 warning, 4 error
};
/// "debug", "info", ...; nullopt for an unknown name.
std::optional<int> level_of(std::string_view name) noexcept;
std::string_view level_name(int level) noexcept;
/// Of a line of text ("HH:MM:SS LEVEL [role] message", with or without colours) or of JSON logging.
LogLine parse_log_line(std::string_view line);

struct LogQuery {
  int min_level = 0;
  std::optional<std::string> role = {};
  std::string contains = {};                 ///< ASCII letters without case; empty for all
  std::optional<std::uint64_t> before = {};  ///< lines that begin before this offset; none: from the end
  std::size_t max_lines = 300;
};
struct LogPage {
  std::vector<LogLine> lines;  ///< in the order of the file
  std::uint64_t next = 0;      ///< `before` of the page before this one; 0 when the file's start was reached
  std::uint64_t num_bytes = 0;
};
/// The newest lines that match. Looks at a bounded part of the file; a page may be empty though more lie before `next`.
LogPage read_log(const std::filesystem::path& path, const LogQuery& query);

/// Log files below `folder` (logs/), as paths relative to it, links not followed; at most `max_files`. Those of attempt_N come before
/// those of attempts before it, and files outside of attempts last.
std::vector<std::filesystem::path> list_logs(const std::filesystem::path& folder, std::size_t max_files = 500);
/// The same without attempts before the newest.
std::vector<std::filesystem::path> list_newest_logs(const std::filesystem::path& folder);
/// N of a file in attempt_N; 0 outside of attempts.
int attempt_of(const std::filesystem::path& file);

}  // namespace prl::dashboard
