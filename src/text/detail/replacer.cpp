#include "text/detail/replacer.hpp"

#include "base/error.hpp"
#include "text/detail/json_access.hpp"

namespace prl::text::detail {

std::string escape_pattern(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (std::string_view(R"(\^$.[]|()?*+{}-#)").find(c) != std::string_view::npos) out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

std::string read_pattern(const boost::json::object& object, const std::string& where) {
  const std::string key = where + ".pattern";
  const boost::json::object& pattern = as_object(require(object, "pattern", where), key);
  if (const auto* regex = find(pattern, "Regex")) return std::string(as_string(*regex, key + ".Regex"));
  return escape_pattern(as_string(require(pattern, "String", key), key + ".String"));
}

Replacer::Replacer(const boost::json::object& object, const std::string& where)
    : content_(as_string(require(object, "content", where), where + ".content")) {
  const std::string source = read_pattern(object, where);
  if (source.empty()) fail(ErrorCode::kNotImplemented, "{}.pattern: an empty pattern is not supported", where);
  const boost::json::object& pattern = require(object, "pattern", where).get_object();
  if (find(pattern, "Regex") != nullptr)
    regex_.emplace(source, where + ".pattern");
  else
    literal_ = as_string(require(pattern, "String", where), where);
}

std::string Replacer::apply(std::string_view text, std::vector<std::uint32_t>* origin) const {
  std::string out;
  out.reserve(text.size() + text.size() / 2);
  std::size_t done = 0;
  const auto keep_until = [&](std::size_t end) {
    out.append(text, done, end - done);
    if (origin == nullptr) return;
    for (; done < end; ++done) origin->push_back(static_cast<std::uint32_t>(done));
  };
  const auto replace = [&](std::size_t begin, std::size_t end) {
    keep_until(begin);
    out += content_;
    if (origin != nullptr) origin->insert(origin->end(), content_.size(), static_cast<std::uint32_t>(end == 0 ? 0 : end - 1));
    done = end;
  };
  if (regex_) {
    Regex::Scan scan(*regex_, text);
    for (std::size_t begin = 0, end = 0; scan.next(begin, end);) replace(begin, end);
  } else {
    for (std::size_t hit; (hit = text.find(literal_, done)) != std::string_view::npos;) replace(hit, hit + literal_.size());
  }
  keep_until(text.size());
  return out;
}

}  // namespace prl::text::detail
