#include "config/args.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "config/merge.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

constexpr std::string_view kPrefix = "PRIME_";
/// Variables with the prefix that belong to other parts of the system.
constexpr std::array<std::string_view, 4> kForeignVariables = {"PRIME_API_KEY", "PRIME_DP_COORDINATOR_STARTUP_TIMEOUT", "PRIME_RL_REF",
                                                               "PRIME_TEAM_ID"};
constexpr std::size_t kMaxKeyDepth = 16;

void mark_loose(Value& value, const Origin& origin) {
  value.set_origin(origin);
  value.set_loose(true);
  if (value.is_list())
    for (Value& item : value.items()) item.set_loose(true);
}

/// One word of text. Lists and objects in JSON are strict inside, everything else stays text until its type is known.
Value from_text(const std::string& text, const Origin& origin) {
  const char first = text.empty() ? '\0' : text.front();
  const char last = text.empty() ? '\0' : text.back();
  if ((first == '[' && last == ']') || (first == '{' && last == '}')) {
    try {
      Value value = parse_json(text, origin.describe());
      value.set_origin(origin);
      return value;
    } catch (const Error&) {
      // Not JSON: a string that only looks like it, such as a regular expression or a template.
    }
  }
  Value value(text);
  mark_loose(value, origin);
  return value;
}

/// Sets one key as a layer of its own, so that `--ckpt` after `--ckpt.interval 5` keeps the interval.
void set_key(Value& tree, const std::string& key, Value value) {
  Value layer = Value::table();
  set_path(layer, key, std::move(value));
  merge(tree, layer);
}

bool is_valid_key(std::string_view key) {
  if (key.empty() || key.front() == '.' || key.back() == '.' || key.find("..") != std::string_view::npos) return false;
  return static_cast<std::size_t>(std::count(key.begin(), key.end(), '.')) < kMaxKeyDepth;
}

class ArgParser {
 public:
  ArgParser(const std::vector<std::string>& words, const std::vector<std::string_view>& positionals, Report& report)
      : words_(words), positionals_(positionals), report_(report) {}

  ParsedArgs parse() {
    while (pos_ < words_.size()) {
      const std::string& word = words_[pos_++];
      if (word == "-h" || word == "--help") {
        parsed_.wants_help = true;
        if (pos_ < words_.size() && !words_[pos_].starts_with("@")) parsed_.help_topic = words_[pos_++];
      } else if (word == "@") {
        parse_root_file();
      } else if (word.starts_with("@")) {
        complain(fmt::format("`{}` needs a space after the @: write `@ {}`", word, word.substr(1)));
      } else if (word.starts_with("--") && word.size() > 2) {
        parse_flag(word);
      } else {
        parse_positional(word);
      }
    }
    return std::move(parsed_);
  }

 private:
  void complain(std::string message) { report_.add({}, std::move(message)); }

  void parse_root_file() {
    if (pos_ == words_.size() || words_[pos_].starts_with("--") || words_[pos_] == "@")
      return complain("@ must be followed by the path of a configuration file, with a space between: `@ rl.toml`");
    parsed_.root_files.push_back(words_[pos_++]);
  }

  void parse_positional(const std::string& word) {
    if (word.size() > 2 && word.front() == '-' && std::isalpha(static_cast<unsigned char>(word[1])) != 0) return refuse_single_dash(word);
    if (num_positionals_ == positionals_.size()) return complain(unexpected(word));
    if (positionals_[num_positionals_].ends_with("...")) return parse_rest(word);
    Value value = from_text(word, Origin{Origin::Kind::kFlag, "argument " + word, 0});
    set_key(parsed_.flags, std::string(positionals_[num_positionals_++]), std::move(value));
  }

  void parse_rest(const std::string& word) {
    const std::string_view name = positionals_[num_positionals_];
    rest_.push_back(from_text(word, Origin{Origin::Kind::kFlag, "argument " + word, 0}));
    Value items = Value(rest_);
    mark_loose(items, Origin{Origin::Kind::kFlag, "argument " + word, 0});
    set_key(parsed_.flags, std::string(name.substr(0, name.size() - 3)), std::move(items));
  }

  /// The word's own value is not a second problem.
  void refuse_single_dash(const std::string& word) {
    complain(fmt::format("`{0}`: options begin with two dashes: `-{0}`", word));
    while (pos_ < words_.size() && !ends_values(words_[pos_]) && !words_[pos_].starts_with("-")) ++pos_;
  }

  static std::string unexpected(const std::string& word) {
    if (word.ends_with(".toml") || word.ends_with(".json"))
      return fmt::format("`{0}` is read as a configuration after an @, with a space between: `@ {0}`", word);
    if (word.ends_with(".yaml") || word.ends_with(".yml"))
      return fmt::format("`{}`: configurations are TOML or JSON files, given as `@ file.toml`", word);
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos && equals > 0) {
      std::string key = word.substr(0, equals);
      if (is_valid_key(key))
        return fmt::format("`{}`: keys are written with two dashes: `{} {}`", word, to_flag(key), word.substr(equals + 1));
    }
    return fmt::format("unexpected argument `{}`; keys are written --key value, files @ file", word);
  }

  void parse_flag(const std::string& word) {
    const std::size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    std::string key = flag.substr(2);
    std::replace(key.begin(), key.end(), '-', '_');
    const bool is_negated = key.starts_with("no_");
    if (is_negated) key.erase(0, 3);
    if (!is_valid_key(key)) return complain(fmt::format("`{}` is not the name of a key", word));
    const Origin origin{Origin::Kind::kFlag, flag, 0};
    if (equals != std::string::npos) {
      if (is_negated) return complain(fmt::format("`{}` takes no value", flag));
      return set_key(parsed_.flags, key, from_text(word.substr(equals + 1), origin));
    }
    if (!is_negated && pos_ < words_.size() && words_[pos_].starts_with("@")) return parse_section_file(key, flag);
    std::vector<std::string> values;
    while (!is_negated && pos_ < words_.size() && !ends_values(words_[pos_])) values.push_back(words_[pos_++]);
    set_key(parsed_.flags, key, from_words(values, is_negated, origin));
  }

  static bool ends_values(const std::string& word) {
    return (word.starts_with("--") && word.size() > 2) || word.starts_with("@") || word == "-h";
  }

  static Value from_words(const std::vector<std::string>& values, bool is_negated, const Origin& origin) {
    if (values.size() == 1) return from_text(values.front(), origin);
    Value value(!is_negated);
    if (!values.empty()) {
      Value::List items;
      for (const std::string& text : values) items.push_back(from_text(text, origin));
      value = Value(std::move(items));
    }
    mark_loose(value, origin);
    return value;
  }

  void parse_section_file(const std::string& key, const std::string& flag) {
    std::string path = words_[pos_++].substr(1);
    if (path.empty()) {
      if (pos_ == words_.size() || words_[pos_].starts_with("--"))
        return complain(fmt::format("`{} @` must be followed by the path of a configuration file", flag));
      path = words_[pos_++];
    }
    parsed_.section_files.emplace_back(key, path);
  }

  const std::vector<std::string>& words_;
  const std::vector<std::string_view>& positionals_;
  Report& report_;
  std::size_t pos_ = 0;
  std::size_t num_positionals_ = 0;
  Value::List rest_;  ///< words of a positional that takes all that follow
  ParsedArgs parsed_;
};

}  // namespace

ParsedArgs parse_args(const std::vector<std::string>& words, const std::vector<std::string_view>& positionals, Report& report) {
  return ArgParser(words, positionals, report).parse();
}

Value parse_environment(const std::map<std::string, std::string>& environment, const std::vector<std::string>& root_keys, Report& report) {
  Value tree = Value::table();
  for (const auto& [name, text] : environment) {
    if (!name.starts_with(kPrefix)) continue;
    if (std::find(kForeignVariables.begin(), kForeignVariables.end(), name) != kForeignVariables.end()) continue;
    std::string key;
    if (name == "PRIME_LOG_LEVEL") {
      key = "log.level";
    } else if (name == "PRIME_VF_LOG_LEVEL") {
      key = "log.vf_level";
    } else {
      for (std::size_t i = kPrefix.size(); i < name.size(); ++i) {
        if (name.compare(i, 2, "__") == 0) {
          key += '.';
          ++i;
        } else {
          key += static_cast<char>(std::tolower(static_cast<unsigned char>(name[i])));
        }
      }
    }
    const std::string root = key.substr(0, key.find('.'));
    if (!is_valid_key(key) || std::find(root_keys.begin(), root_keys.end(), root) == root_keys.end()) {
      if (key.find("log.") != 0) report.warnings.push_back(fmt::format("variable {} names no key of this command and is ignored", name));
      continue;
    }
    set_key(tree, key, from_text(text, Origin{Origin::Kind::kEnvironment, name, 0}));
  }
  return tree;
}

}  // namespace prl::config
