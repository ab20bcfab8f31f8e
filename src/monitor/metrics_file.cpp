#include "monitor/metrics_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::monitor {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{8} << 30;

/// Keeps writers of the same file out (sinks take the same lock); nothing to lock if there is no file.
class FileLock {
 public:
  explicit FileLock(const fs::path& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ >= 0) ::flock(fd_, LOCK_EX);
  }
  ~FileLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
};

struct FileRow {
  RowKey key;
  std::string_view line;
  bool is_ours = false;
};

template <typename OnLine>
void for_each_line(std::string_view bytes, OnLine on_line) {
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\n', at), bytes.size());
    if (end > at) on_line(bytes.substr(at, end - at), end < bytes.size());
    at = end + 1;
  }
}

std::string joined(const std::vector<FileRow>& rows) {
  std::string text;
  for (const FileRow& row : rows) {
    text += row.line;
    text += '\n';
  }
  return text;
}

}  // namespace

std::optional<RowKey> parse_row_key(std::string_view line) {
  constexpr std::string_view kStep = "{\"step\": ", kRole = ", \"role\": \"";
  if (!line.starts_with(kStep) || !line.ends_with('}') || line.find('\0') != std::string_view::npos) return std::nullopt;
  // Of two halves of rows that run into each other the second begins like a row, too.
  if (line.find(kStep, 1) != std::string_view::npos) return std::nullopt;
  RowKey key;
  const auto [end, error] = std::from_chars(line.data() + kStep.size(), line.data() + line.size(), key.step);
  if (error != std::errc{}) return std::nullopt;
  line.remove_prefix(static_cast<std::size_t>(end - line.data()));
  if (!line.starts_with(kRole)) return key;
  line.remove_prefix(kRole.size());
  key.role = std::string(line.substr(0, line.find('"')));
  return key;
}

TrimmedRows trim_rows(const fs::path& path, std::span<const std::string> roles, std::int64_t last_step, const fs::path& keep_late_in) {
  TrimmedRows trimmed;
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return trimmed;
  const FileLock lock(path);
  const std::string bytes = read_file(path, kMaxFileBytes);
  std::vector<FileRow> kept, late;
  std::map<std::pair<std::string, std::int64_t>, std::size_t> places;  // in kept
  for_each_line(bytes, [&](std::string_view line, bool is_ended) {
    std::optional<RowKey> key = is_ended ? parse_row_key(line) : std::nullopt;
    if (!key) {
      ++trimmed.num_damaged;
      return;
    }
    const bool is_ours = key->role.empty() || std::ranges::find(roles, key->role) != roles.end();
    if (is_ours && key->step > last_step) {
      ++trimmed.num_late;
      late.push_back({*key, line, is_ours});
      return;
    }
    if (is_ours && !key->role.empty()) {
      const auto [place, is_new] = places.emplace(std::pair{key->role, key->step}, kept.size());
      if (!is_new) {
        ++trimmed.num_doubled;
        kept[place->second].line = line;
        return;
      }
    }
    kept.push_back({std::move(*key), line, is_ours});
  });
  const auto by_step = [](const FileRow& a, const FileRow& b) { return a.key.step < b.key.step; };
  // Rows of one step stay in the order they came in; roles are never far apart in a run that was not resumed.
  std::map<std::string, std::int64_t> newest;
  bool is_ordered = true;
  for (const FileRow& row : kept) {
    if (!row.is_ours) continue;
    const auto [it, is_first] = newest.emplace(row.key.role, row.key.step);
    if (!is_first && row.key.step < it->second) is_ordered = false;
    it->second = row.key.step;
  }
  if (!is_ordered) std::ranges::stable_sort(kept, by_step);
  if (is_ordered && trimmed.num_late + trimmed.num_doubled + trimmed.num_damaged == 0) return trimmed;
  if (!keep_late_in.empty() && !late.empty()) {
    std::string before;
    if (fs::exists(keep_late_in, ignored)) before = read_file(keep_late_in, kMaxFileBytes);
    write_file_atomic(keep_late_in, before + joined(late));
  }
  write_file_atomic(path, joined(kept));
  return trimmed;
}

bool has_rows_of(const fs::path& path, const std::string& role) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return false;
  bool found = false;
  const std::string bytes = read_file(path, kMaxFileBytes);
  for_each_line(bytes, [&](std::string_view line, bool) {
    const std::optional<RowKey> key = parse_row_key(line);
    found = found || (key && (key->role == role || key->role.empty()));
  });
  return found;
}

std::optional<std::int64_t> last_row_of(const fs::path& path, std::string_view role) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return std::nullopt;
  std::optional<std::int64_t> last;
  const std::string bytes = read_file(path, kMaxFileBytes);
  for_each_line(bytes, [&](std::string_view line, bool) {
    const std::optional<RowKey> key = parse_row_key(line);
    if (key && key->role == role) last = std::max(last.value_or(key->step), key->step);
  });
  return last;
}

}  // namespace prl::monitor
