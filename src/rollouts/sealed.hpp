#pragma once

#include <string>
#include <string_view>

namespace prl::rollouts {

/// Bytes for a file that is refused if it was damaged since: `mark`, the XXH3 of `bytes` in 16 hex digits, then `bytes`.
std::string sealed(std::string_view mark, std::string_view bytes);
/// What sealed() was given, within `file`. Error{kCorrupt}, which does not name the file; `what`: "a file of a sample queue".
std::string_view unsealed(std::string_view mark, std::string_view file, std::string_view what);

}  // namespace prl::rollouts
