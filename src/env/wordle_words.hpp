#pragma once

#include <span>
#include <string_view>

namespace prl::env {

/// Common English words of five letters, lower case, without repetition.
std::span<const std::string_view> wordle_words();

}  // namespace prl::env
