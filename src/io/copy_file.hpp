#pragma once

#include <filesystem>

namespace prl::io {

/// Copies a file of any size to a path that is free, with the system's own reason when it fails: the standard library's copy calls a full
/// disk an input/output error. Links are followed. Error{kNotFound} or {kIo} naming the file; what was written of `to` is gone then.
void copy_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace prl::io
