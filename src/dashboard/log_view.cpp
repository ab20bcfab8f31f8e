#include "dashboard/log_view.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <ctime>

#include "base/ascii.hpp"
#include "dashboard/inside.hpp"
#include "dashboard/line_reader.hpp"
#include "dashboard/member_scanner.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kLevels[] = {"debug", "info", "success", "warning", "error"};
/// Blocks from the end of a file, each twice as long as the one after it: the newest lines, which are asked for all the time, lie in the
/// first.
constexpr std::uint64_t kFirstBlockBytes = std::uint64_t{64} << 10, kBlockBytes = std::uint64_t{1} << 20;
constexpr int kMaxBlocks = 12;
constexpr std::size_t kMaxLineBytes = 8192;

bool holds(std::string_view text, std::string_view wanted) {
  return std::search(text.begin(), text.end(), wanted.begin(), wanted.end(),
                     [](char a, char b) { return ascii_lower(a) == ascii_lower(b); }) != text.end() ||
         wanted.empty();
}

std::string without_colors(std::string_view line) {
  std::string out;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\x1b') {
      out += line[i];
      continue;
    }
    if (i + 1 < line.size() && line[i + 1] == '[') {
      i += 2;
      while (i < line.size() && (line[i] < '@' || line[i] > '~')) ++i;
    }
  }
  return out;
}

bool is_time(std::string_view text) {
  if (text.size() != 8) return false;
  for (std::size_t i = 0; i < 8; ++i)
    if (i == 2 || i == 5 ? text[i] != ':' : text[i] < '0' || text[i] > '9') return false;
  return true;
}

/// "HH:mm:ss" of seconds since 1970, in the time zone of whoever looks at the server's text logs too.
std::string clock_of(double unix_seconds) {
  constexpr double kMax = 1e11;  // the year 5138
  if (!(unix_seconds >= 0) || unix_seconds > kMax) return {};
  const auto time = static_cast<std::time_t>(unix_seconds);
  std::tm local{};
  localtime_r(&time, &local);
  char text[16];
  std::strftime(text, sizeof text, "%H:%M:%S", &local);
  return text;
}

bool parse_json_line(std::string_view text, LogLine& line) {
  bool has_message = false;
  MemberScanner scanner([&](std::string_view section, std::string_view key, const Scalar& value) {
    if (!section.empty()) return;
    if (key == "timestamp") line.time = value.kind == Scalar::Kind::kNumber ? clock_of(value.number) : value.text;
    if (value.kind != Scalar::Kind::kText) return;
    if (key == "message") {
      line.text = value.text;
      has_message = true;
    } else if (key == "tag") {
      line.role = value.text;
    } else if (key == "level") {
      line.level = level_of(value.text).value_or(1);
    }
  });
  scanner.begin();
  if (scanner.feed(text) && scanner.end() && has_message) return true;
  line = LogLine{.offset = line.offset};
  return false;
}

void parse_text_line(std::string_view text, LogLine& line) {
  line.text = text;
  if (!is_time(text.substr(0, 8))) return;
  const std::size_t level_begin = text.find_first_not_of(' ', 8);
  if (level_begin == std::string_view::npos) return;
  const std::size_t level_end = std::min(text.find(' ', level_begin), text.size());
  const auto level = level_of(text.substr(level_begin, level_end - level_begin));
  if (!level) return;
  line.time = text.substr(0, 8);
  line.level = *level;
  std::string_view message = text.substr(std::min(level_end + 1, text.size()));
  const std::size_t close = message.starts_with('[') ? message.find("] ") : std::string_view::npos;
  constexpr std::size_t kMaxRoleBytes = 64;
  if (close != std::string_view::npos && close < kMaxRoleBytes) {
    line.role = message.substr(1, close - 1);
    message.remove_prefix(close + 2);
  }
  line.text = message;
}

}  // namespace

std::optional<int> level_of(std::string_view name) noexcept {
  for (std::size_t i = 0; i < std::size(kLevels); ++i)
    if (name.size() == kLevels[i].size() &&
        std::equal(name.begin(), name.end(), kLevels[i].begin(), [](char a, char b) { return ascii_lower(a) == b; }))
      return static_cast<int>(i);
  return std::nullopt;
}

std::string_view level_name(int level) noexcept { return kLevels[std::clamp(level, 0, 4)]; }

LogLine parse_log_line(std::string_view raw) {
  const std::string text = without_colors(raw.substr(0, kMaxLineBytes));
  LogLine line;
  if (!text.starts_with('{') || !parse_json_line(text, line)) parse_text_line(text, line);
  return line;
}

LogPage read_log(const fs::path& path, const LogQuery& query) {
  LogPage page;
  std::error_code ec;
  page.num_bytes = fs::file_size(path, ec);
  if (ec) page.num_bytes = 0;
  // Lines of a file that one role alone writes do not repeat its name.
  const std::string role_of_file = path.stem().string();
  std::uint64_t end = std::min(query.before.value_or(page.num_bytes), page.num_bytes);
  std::uint64_t block_bytes = kFirstBlockBytes;
  for (int block = 0; block < kMaxBlocks && end > 0 && page.lines.size() < query.max_lines; ++block) {
    const std::uint64_t begin = end > block_bytes ? end - block_bytes : 0;
    block_bytes = std::min(2 * block_bytes, kBlockBytes);
    const std::string bytes = read_range(path, begin, end - begin);
    // The first line of a block is whole only at the file's start; a line longer than a block is cut.
    std::size_t first = begin == 0 ? 0 : bytes.find('\n') + 1;
    if (begin > 0 && (first == 0 || first >= bytes.size())) first = 0;
    std::vector<LogLine> found;
    for (std::size_t at = first; at < bytes.size();) {
      const std::size_t stop = std::min(bytes.find('\n', at), bytes.size());
      LogLine line = parse_log_line(std::string_view(bytes).substr(at, stop - at));
      line.offset = begin + at;
      if (line.role.empty()) line.role = role_of_file;
      if (line.level >= query.min_level && (!query.role || line.role == *query.role) && holds(line.text, query.contains))
        found.push_back(std::move(line));
      at = stop + 1;
    }
    end = begin + first;
    const std::size_t room = query.max_lines - page.lines.size();
    if (found.size() > room) {
      end = found[found.size() - room].offset;
      found.erase(found.begin(), found.end() - static_cast<std::ptrdiff_t>(room));
    }
    page.lines.insert(page.lines.begin(), std::make_move_iterator(found.begin()), std::make_move_iterator(found.end()));
  }
  page.next = end;
  return page;
}

int attempt_of(const fs::path& file) {
  constexpr std::string_view kPrefix = "attempt_";
  const std::string first = file.empty() ? std::string() : file.begin()->string();
  int number = 0;
  if (!first.starts_with(kPrefix)) return 0;
  const auto [end, error] = std::from_chars(first.data() + kPrefix.size(), first.data() + first.size(), number);
  return error == std::errc() && end == first.data() + first.size() ? std::max(number, 0) : 0;
}

std::vector<fs::path> list_logs(const fs::path& folder, std::size_t max_files) {
  constexpr int kMaxDepth = 6;
  constexpr std::size_t kMaxFound = 10'000;  // of many attempts the newest are wanted, whose place in the order of a folder is any
  std::vector<fs::path> files;
  std::error_code ec;
  if (!is_inside(folder.parent_path(), folder)) return files;
  for (fs::recursive_directory_iterator it(folder, fs::directory_options::skip_permission_denied, ec), end; !ec && it != end;
       it.increment(ec)) {
    if (it.depth() >= kMaxDepth) it.disable_recursion_pending();
    if (it->path().extension() != ".log" || it->is_symlink(ec) || !it->is_regular_file(ec)) continue;
    files.push_back(it->path().lexically_relative(folder));
    if (files.size() >= kMaxFound) break;
  }
  std::ranges::sort(files, [](const fs::path& a, const fs::path& b) {
    const int attempt_a = attempt_of(a), attempt_b = attempt_of(b);
    return attempt_a != attempt_b ? attempt_a > attempt_b : a < b;
  });
  if (files.size() > max_files) files.resize(max_files);
  return files;
}

std::vector<fs::path> list_newest_logs(const fs::path& folder) {
  std::vector<fs::path> files = list_logs(folder);
  const int newest = files.empty() ? 0 : attempt_of(files.front());
  std::erase_if(files, [newest](const fs::path& file) { return attempt_of(file) != 0 && attempt_of(file) != newest; });
  return files;
}

}  // namespace prl::dashboard
