#include "base/log.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.hpp"
#include "base/log_progress.hpp"
#include "base/utf8.hpp"

namespace prl::log {
namespace {

struct FileCloser {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

struct Role {
  File file;
  RoleConsole console;
};

struct State {
  std::mutex mutex;
  Options options;
  File file;
  std::map<std::string, Role, std::less<>> roles;
  std::optional<std::chrono::steady_clock::time_point> last_step_line;
};

// The log is the one process-wide service: a line must be possible from any place, also while everything else fails.
State& state() {
  static State instance;
  return instance;
}
thread_local std::string role_of_thread;

constexpr std::string_view kNames[] = {"DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR"};
constexpr std::string_view kColors[] = {"\033[34m", "\033[1m", "\033[32m", "\033[33m", "\033[31m"};

File open_append(const std::filesystem::path& path) {
  std::error_code ignored;  // opening then says what is wrong with the folder
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), ignored);
  File file(std::fopen(path.c_str(), "ae"));
  if (!file) fail(ErrorCode::kIo, "log file {} cannot be opened for writing: {}", path.string(), std::strerror(errno));
  return file;
}

/// "trainer/train_run" of "/anywhere/src/trainer/train_run.cpp".
std::string_view module_of(std::string_view file) {
  constexpr std::string_view kSources = "src/";
  if (const std::size_t at = file.rfind(kSources); at != std::string_view::npos) file.remove_prefix(at + kSources.size());
  return file.substr(0, file.rfind('.'));
}

std::string json_line(Level level, std::string_view tag, std::string_view message, const Where& where) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  boost::json::object line;
  line["timestamp"] = std::chrono::duration<double>(now).count();
  line["level"] = kNames[static_cast<int>(level)];
  line["message"] = replace_invalid_utf8(message);
  line["module"] = module_of(where.file);
  line["function"] = where.function;
  line["line"] = where.line;
  if (!tag.empty()) line["tag"] = tag;
  return boost::json::serialize(line) + "\n";
}

std::string text_line(Level level, std::string_view tag, std::string_view message, bool color) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char clock[16];
  std::strftime(clock, sizeof clock, "%H:%M:%S", &local);
  const auto index = static_cast<int>(level);
  const std::string tag_part = tag.empty() ? "" : fmt::format("[{}] ", tag);
  if (!color) return fmt::format("{} {:>7} {}{}\n", clock, kNames[index], tag_part, message);
  return fmt::format("\033[2m{}\033[0m {}{:>7}\033[0m {}{}\n", clock, kColors[index], kNames[index], tag_part, message);
}

}  // namespace

void setup(const Options& options) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.options = options;
  s.file = options.file.empty() ? nullptr : open_append(options.file);
}

Level parse_level(std::string_view name) {
  for (int i = 0; i < 5; ++i) {
    std::string lower;
    for (char c : kNames[i]) lower.push_back(static_cast<char>(c - 'A' + 'a'));
    if (name == lower || name == kNames[i]) return static_cast<Level>(i);
  }
  if (name == "warn") return Level::kWarning;
  fail(ErrorCode::kInvalidArgument, "log level \"{}\" is unknown; one of debug, info, success, warning, error", name);
}

bool is_enabled(Level level) noexcept { return level >= state().options.level; }

namespace {

/// Under the lock. Step lines come at most once per step_interval.
bool is_step_due(State& s) {
  const auto now = std::chrono::steady_clock::now();
  if (s.last_step_line && std::chrono::duration<double>(now - *s.last_step_line).count() < s.options.step_interval) return false;
  s.last_step_line = now;
  return true;
}

enum class Kind { kPlain, kStep, kProgress };

/// What a level, a tag and a clock take of a line.
constexpr std::size_t kPrefixColumns = 17;

std::size_t terminal_width() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

void write_line(Level level, std::string_view tag, std::string_view message, Kind kind, const Where& where) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (level < s.options.level) return;
  if (tag.empty()) tag = role_of_thread.empty() ? std::string_view(s.options.tag) : std::string_view(role_of_thread);
  static const bool is_tty = isatty(STDERR_FILENO) != 0;
  static const bool has_color = is_colored(is_tty, std::getenv("NO_COLOR"), std::getenv("TERM"));
  const bool color = s.options.color || has_color;
  const auto role = s.roles.find(role_of_thread);
  bool on_console = !s.options.quiet_console;
  if (role != s.roles.end())
    on_console = on_console && (level >= role->second.console.level || kind == Kind::kProgress) &&
                 (kind != Kind::kStep || role->second.console.steps);
  if (on_console && kind == Kind::kStep) on_console = is_step_due(s);
  const std::string console = s.options.json ? json_line(level, tag, message, where) : text_line(level, tag, message, color);
  if (on_console && is_tty && kind == Kind::kStep && !s.options.json) {
    const std::size_t width = terminal_width();
    const std::string fitted = text_line(level, tag, fit_fields(message, width > kPrefixColumns ? width - kPrefixColumns : 0), color);
    std::fwrite(fitted.data(), 1, fitted.size(), stderr);
  } else if (on_console) {
    std::fwrite(console.data(), 1, console.size(), stderr);
  }
  const std::string plain = s.options.json || !color ? console : text_line(level, tag, message, s.options.color);
  auto put = [&](std::FILE* f) {
    std::fwrite(plain.data(), 1, plain.size(), f);
    std::fflush(f);
  };
  if (s.file) put(s.file.get());
  if (role != s.roles.end()) put(role->second.file.get());
}

}  // namespace

void write(Level level, std::string_view tag, std::string_view message, const Where& where) {
  write_line(level, tag, message, Kind::kPlain, where);
}
void write_step(std::string_view message, const Where& where) { write_line(Level::kSuccess, {}, message, Kind::kStep, where); }
void write_progress(std::string_view message, const Where& where) { write_line(Level::kInfo, {}, message, Kind::kProgress, where); }

bool is_colored(bool is_terminal, const char* no_color, const char* term) noexcept {
  return is_terminal && (no_color == nullptr || *no_color == '\0') && (term == nullptr || std::string_view(term) != "dumb");
}

std::string fit_fields(std::string_view line, std::size_t width) {
  constexpr std::string_view kBetween = " | ";
  std::string out(line);
  while (width != 0 && out.size() > width) {
    const std::size_t last = out.rfind(kBetween);
    const std::size_t before = last == std::string::npos || last == 0 ? std::string::npos : out.rfind(kBetween, last - 1);
    if (before == std::string::npos) break;
    out.erase(before, last - before);
  }
  return out;
}

void set_thread_role(std::string_view role) { role_of_thread = role; }
std::string thread_role() { return role_of_thread; }

void add_role_file(std::string_view role, const std::filesystem::path& file, RoleConsole console) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.roles[std::string(role)] = Role{open_append(file), console};
}

}  // namespace prl::log
