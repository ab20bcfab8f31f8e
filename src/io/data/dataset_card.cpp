#include "io/data/dataset_card.hpp"

#include <yaml.h>

#include <algorithm>
#include <boost/json.hpp>
#include <memory>

#include "base/error.hpp"

namespace prl::io {
namespace json = boost::json;
namespace {

constexpr int kMaxCardDepth = 32;
constexpr std::size_t kMaxNodes = 1'000'000;

/// YAML to JSON values, all scalars as texts. Anchors and aliases are refused: cards have no use for them, bombs do.
class YamlReader {
 public:
  YamlReader(std::string_view text, std::string_view subject) : subject_(subject) {
    if (yaml_parser_initialize(&parser_) == 0) fail(ErrorCode::kInternal, "libyaml cannot be initialised");
    yaml_parser_set_input_string(&parser_, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  }
  ~YamlReader() {
    drop();
    yaml_parser_delete(&parser_);
  }
  YamlReader(const YamlReader&) = delete;
  YamlReader& operator=(const YamlReader&) = delete;

  json::value read() {
    while (next() != YAML_STREAM_END_EVENT)
      if (event_.type == YAML_DOCUMENT_START_EVENT) return value(0);
    return nullptr;
  }

 private:
  [[noreturn]] void bad(std::string_view what, std::size_t line) const { fail(ErrorCode::kCorrupt, "{}:{}: {}", subject_, line + 1, what); }
  void drop() {
    if (has_event_) yaml_event_delete(&event_);
    has_event_ = false;
  }
  yaml_event_type_t next() {
    drop();
    if (yaml_parser_parse(&parser_, &event_) == 0)
      bad(fmt::format("the front matter is no YAML: {}", parser_.problem != nullptr ? parser_.problem : "damaged"),
          parser_.problem_mark.line + 1);
    has_event_ = true;
    if (++num_nodes_ > kMaxNodes) bad("the front matter has too many entries", event_.start_mark.line + 1);
    return event_.type;
  }
  json::value value(int depth) {
    next();
    return current(depth);
  }
  json::value current(int depth) {
    const std::size_t line = event_.start_mark.line + 1;  // the "---" before it
    if (depth > kMaxCardDepth) bad("the front matter is nested too deeply", line);
    switch (event_.type) {
      case YAML_SCALAR_EVENT: return json::string(reinterpret_cast<const char*>(event_.data.scalar.value), event_.data.scalar.length);
      case YAML_SEQUENCE_START_EVENT: {
        json::array list;
        while (next() != YAML_SEQUENCE_END_EVENT) list.push_back(current(depth + 1));
        return list;
      }
      case YAML_MAPPING_START_EVENT: {
        json::object map;
        while (next() != YAML_MAPPING_END_EVENT) {
          if (event_.type != YAML_SCALAR_EVENT) bad("a key that is no text", line);
          const std::string key(reinterpret_cast<const char*>(event_.data.scalar.value), event_.data.scalar.length);
          map[key] = value(depth + 1);
        }
        return map;
      }
      case YAML_ALIAS_EVENT: bad("aliases are not read", line);
      default: bad("the front matter ends too early", line);
    }
  }

  std::string_view subject_;
  yaml_parser_t parser_{};
  yaml_event_t event_{};
  bool has_event_ = false;
  std::size_t num_nodes_ = 0;
};

/// The lines between the first two of "---"; empty if there are none.
std::string_view front_matter(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  if (!text.starts_with("---\n") && !text.starts_with("---\r\n")) return {};
  const std::size_t begin = text.find('\n') + 1;
  for (std::size_t at = begin; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line == "---") return text.substr(begin, at - begin);
    at = end + 1;
  }
  return {};
}

class CardReader {
 public:
  explicit CardReader(std::string_view subject) : subject_(subject) {}

  CardConfig config(const json::value& value, std::size_t index) const {
    const std::string at = fmt::format("configs[{}]", index);
    if (!value.is_object()) bad(at, "wanted a mapping");
    const json::object& entry = value.get_object();
    CardConfig config;
    config.name = text(entry, "config_name", at);
    if (config.name.empty()) bad(at, "config_name is missing");
    config.is_default = text(entry, "default", at) == "true";
    config.data_dir = text(entry, "data_dir", at);
    const json::value* files = entry.if_contains("data_files");
    if (files == nullptr) return config;
    const std::string where = at + ".data_files";
    if (files->is_string()) {
      config.splits.push_back({"train", patterns(*files, where)});
    } else if (files->is_object()) {
      for (const auto& member : files->get_object()) config.splits.push_back({std::string(member.key()), patterns(member.value(), where)});
    } else if (files->is_array()) {
      for (const json::value& item : files->get_array()) add_item(item, where, config);
    } else {
      bad(where, "wanted a pattern, a list of them, or a list of splits with paths");
    }
    return config;
  }

 private:
  [[noreturn]] void bad(const std::string& key, std::string_view what) const {
    fail(ErrorCode::kCorrupt, "{}: key '{}': {}", subject_, key, what);
  }
  std::string text(const json::object& entry, const char* key, const std::string& at) const {
    const json::value* value = entry.if_contains(key);
    if (value == nullptr) return {};
    if (!value->is_string()) bad(at + "." + key, "wanted a text");
    return std::string(std::string_view(value->get_string()));
  }
  std::vector<std::string> patterns(const json::value& value, const std::string& at) const {
    std::vector<std::string> all;
    if (value.is_string()) {
      all.emplace_back(std::string_view(value.get_string()));
    } else if (value.is_array()) {
      for (const json::value& item : value.get_array()) {
        if (!item.is_string()) bad(at, "a pattern that is no text");
        all.emplace_back(std::string_view(item.get_string()));
      }
    } else {
      bad(at, "wanted a pattern or a list of them");
    }
    return all;
  }
  void add_item(const json::value& item, const std::string& at, CardConfig& config) const {
    if (item.is_string()) {
      if (config.splits.empty()) config.splits.push_back({"train", {}});
      config.splits.front().patterns.emplace_back(std::string_view(item.get_string()));
      return;
    }
    if (!item.is_object()) bad(at, "wanted patterns, or splits with paths");
    const json::value* path = item.get_object().if_contains("path");
    const std::string split = text(item.get_object(), "split", at);
    if (path == nullptr || split.empty()) bad(at, "wanted a split and a path");
    config.splits.push_back({split, patterns(*path, at)});
  }

  std::string subject_;
};

}  // namespace

std::vector<CardConfig> read_dataset_card(std::string_view readme, std::string_view subject) {
  if (readme.size() > kMaxCardBytes) fail(ErrorCode::kCorrupt, "{}: {} bytes, the limit is {}", subject, readme.size(), kMaxCardBytes);
  const std::string_view yaml = front_matter(readme);
  if (yaml.empty()) return {};
  const json::value root = YamlReader(yaml, subject).read();
  std::vector<CardConfig> configs;
  const json::value* list = root.is_object() ? root.get_object().if_contains("configs") : nullptr;
  if (list == nullptr) return configs;
  if (!list->is_array()) fail(ErrorCode::kCorrupt, "{}: key 'configs': wanted a list", subject);
  const CardReader reader(subject);
  for (std::size_t i = 0; i < list->get_array().size(); ++i) configs.push_back(reader.config(list->get_array()[i], i));
  return configs;
}

}  // namespace prl::io
