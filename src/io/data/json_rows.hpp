#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::io {

/// Calls `each` with the text of every element of the JSON list in `text`, in order, without parsing the elements. Returns an empty
/// text, or what is wrong and at which byte.
std::string split_json_list(std::string_view text, const std::function<void(std::string_view element)>& each);

/// The same for the members of the JSON object in `text`: the key as it is written, in its quotes, and the text of the value.
std::string split_json_object(std::string_view text, const std::function<void(std::string_view key, std::string_view value)>& each);

/// Calls `each` with the cells of every record of a CSV text (RFC 4180: quotes, doubled quotes, line breaks inside quotes; LF or
/// CRLF). Returns an empty text, or what is wrong and at which line. Cells are valid during the call; `was_quoted` tells "" from nothing.
struct CsvCell {
  std::string text;
  bool was_quoted = false;
};
std::string split_csv(std::string_view text, char separator,
                      const std::function<void(const std::vector<CsvCell>& cells, std::int64_t line)>& each);

}  // namespace prl::io
