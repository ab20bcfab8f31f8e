#pragma once

#include <fmt/core.h>

#include <string_view>
#include <utility>

#include "base/log.hpp"

namespace prl::log {

/// An INFO line about what is collected or waited for: the console shows it also of a role whose INFO lines it leaves out (RoleConsole).
void write_progress(std::string_view message, const Where& where = {});

template <typename... Args>
void progress(Format<std::type_identity_t<Args>...> f, Args&&... args) {
  if (is_enabled(Level::kInfo)) write_progress(fmt::format(f.format, std::forward<Args>(args)...), f.where);
}

/// The role that set_thread_role gave the calling thread, for threads that it starts.
std::string thread_role();

/// Whether colours belong on a stream that is (not) a terminal: not with NO_COLOR set to anything, not with TERM=dumb.
bool is_colored(bool is_terminal, const char* no_color, const char* term) noexcept;
/// `line` without the fields (" | ...") that do not fit into `width` columns; the last of them, an ETA, stays. 0: no limit.
std::string fit_fields(std::string_view line, std::size_t width);

}  // namespace prl::log
