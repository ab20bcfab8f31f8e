#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::text::jinja {

/// str methods of Python on UTF-8 text; positions are bytes, sizes of padding are characters.
std::string strip(std::string_view text, const std::optional<std::string>& characters, bool left, bool right);
/// str.split; `limit` negative: no limit. Without separator: runs of white space, no empty parts.
std::vector<std::string> split(std::string_view text, const std::optional<std::string>& separator, std::int64_t limit);
std::vector<std::string> split_from_right(std::string_view text, const std::optional<std::string>& separator, std::int64_t limit);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
std::string replace(std::string_view text, std::string_view from, std::string_view to, std::int64_t limit);
/// Non-overlapping occurrences; an empty needle is found between all characters.
std::size_t count(std::string_view text, std::string_view needle);
enum class Align : unsigned char { kLeft, kRight, kCenter };
std::string pad(std::string_view text, std::size_t width, std::string_view fill, Align align);

}  // namespace prl::text::jinja
