#pragma once

#include <fmt/core.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace prl::log {

/// Severity. kSuccess lies between kInfo and kWarning and marks finished steps (spec 8.2).
enum class Level { kDebug, kInfo, kSuccess, kWarning, kError };

struct Options {
  Level level = Level::kInfo;
  bool json = false;           ///< one flat JSON object per line instead of text
  bool color = false;          ///< ANSI colours even when stderr is not a terminal
  std::string tag;             ///< put in brackets before each message, e.g. "trainer"
  std::filesystem::path file;  ///< also append there, empty for none; folders are made
  bool quiet_console = false;  ///< write only to the file
  double step_interval = 0;    ///< seconds, least time between two step lines on the console; files get every line
};

/// Replaces the process-wide sinks. Call once in main, before threads start; until then lines go to stderr at kInfo.
void setup(const Options& options);
Level parse_level(std::string_view name);
bool is_enabled(Level level) noexcept;
/// The statement behind a line; JSON lines name it.
struct Where {
  const char* file = "";  ///< as the compiler was given it
  int line = 0;
  const char* function = "";
};
/// Writes one line "HH:mm:ss LEVEL [tag] message" to stderr and the file. Any thread.
void write(Level level, std::string_view tag, std::string_view message, const Where& where = {});
/// A kSuccess line that reports one of many steps; the console may leave it out (Options::step_interval, RoleConsole::steps).
void write_step(std::string_view message, const Where& where = {});

/// A checked format string and the statement that it stands in. The built-ins rather than std::source_location: clang 14 has no other.
template <typename... Args>
struct Format {
  template <typename Text>
  FMT_CONSTEVAL Format(const Text& text, const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                       const char* function = __builtin_FUNCTION())
      : format(text), where{file, line, function} {}
  fmt::format_string<Args...> format;
  Where where;
};

template <typename... Args>
void debug(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kDebug)) write(Level::kDebug, {}, fmt::format(f.format, std::forward<Args>(args)...), f.where);
}
template <typename... Args>
void info(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kInfo)) write(Level::kInfo, {}, fmt::format(f.format, std::forward<Args>(args)...), f.where);
}
template <typename... Args>
void success(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kSuccess)) write(Level::kSuccess, {}, fmt::format(f.format, std::forward<Args>(args)...), f.where);
}
template <typename... Args>
void warning(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kWarning)) write(Level::kWarning, {}, fmt::format(f.format, std::forward<Args>(args)...), f.where);
}
template <typename... Args>
void error(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  write(Level::kError, {}, fmt::format(f.format, std::forward<Args>(args)...), f.where);
}
template <typename... Args>
void step(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kSuccess)) write_step(fmt::format(f.format, std::forward<Args>(args)...), f.where);
}

/// What of a role's lines the console shows; its file and Options::file get all.
struct RoleConsole {
  Level level = Level::kDebug;  ///< lines below are left out
  bool steps = true;
};

/// Colocated roles share one process: the tag of the calling thread names the role in its lines and selects the role's
/// own log file, if one was added with add_role_file. The only thread-local state of the project.
void set_thread_role(std::string_view role);
void add_role_file(std::string_view role, const std::filesystem::path& file, RoleConsole console = {});

}  // namespace prl::log
