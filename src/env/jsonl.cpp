#include "env/jsonl.hpp"

#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/json_python.hpp"

namespace prl::env {

std::vector<boost::json::object> read_jsonl(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  std::vector<boost::json::object> rows;
  std::int64_t line_number = 0;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\n', at), bytes.size());
    const std::string_view line = std::string_view(bytes).substr(at, end - at);
    at = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      boost::json::value value = text::parse_json(line);
      if (!value.is_object()) fail(ErrorCode::kCorrupt, "wanted a JSON object");
      rows.push_back(std::move(value.get_object()));
    } catch (const Error& error) {
      fail(ErrorCode::kCorrupt, "{}:{}: {}", path.string(), line_number, error.what());
    }
  }
  return rows;
}

}  // namespace prl::env
