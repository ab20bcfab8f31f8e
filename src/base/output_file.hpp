#pragma once

#include <filesystem>
#include <string_view>

namespace prl {

/// For commands that write a file or a folder the user named: Error{kAlreadyExists} if it is there and `overwrite` is not set. An empty
/// folder and what is no regular file (/dev/stdout, say) are no obstacle. `option` is what the message says to add.
void refuse_overwrite(const std::filesystem::path& path, bool overwrite, std::string_view option = "--overwrite");

}  // namespace prl
