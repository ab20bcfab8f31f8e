#include "text/detail/tokenizer_json.hpp"

#include <boost/json/array.hpp>
#include <boost/json/value.hpp>

#include <string>

namespace prl::text::detail {
namespace json = boost::json;
namespace {
json::string_view view(std::string_view text) { return {text.data(), text.size()}; }
}  // namespace

json::object added_token(std::int32_t id, std::string_view content, bool special) {
  return json::object{{"id", id},        {"content", view(content)}, {"single_word", false}, {"lstrip", false},
                      {"rstrip", false}, {"normalized", false},      {"special", special}};
}

json::object byte_level(bool add_prefix_space, bool trim_offsets, bool use_regex) {
  return json::object{
      {"type", "ByteLevel"}, {"add_prefix_space", add_prefix_space}, {"trim_offsets", trim_offsets}, {"use_regex", use_regex}};
}

json::object split_then_bytes(std::string_view pattern, bool trim_offsets) {
  const json::object split{
      {"type", "Split"}, {"pattern", json::object{{"Regex", view(pattern)}}}, {"behavior", "Isolated"}, {"invert", false}};
  return json::object{{"type", "Sequence"}, {"pretokenizers", json::array{split, byte_level(false, trim_offsets, false)}}};
}

json::object added_tokens_decoder(const json::array& added) {
  json::object decoder;
  for (const json::value& token : added) {
    json::object entry = token.as_object();
    const std::string key = std::to_string(entry.at("id").as_int64());
    entry.erase("id");
    decoder[key] = entry;
  }
  return decoder;
}

}  // namespace prl::text::detail
