#include "io/data/dataset_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "base/error.hpp"
#include "io/data/row_table.hpp"

namespace prl::io {
namespace {

struct SplitWords {
  std::string_view split;
  std::vector<std::string_view> words;
};
const std::vector<SplitWords>& split_words() {
  static const std::vector<SplitWords> kWords{{"train", {"train", "training"}},
                                              {"validation", {"validation", "valid", "dev", "val"}},
                                              {"test", {"test", "testing", "eval", "evaluation"}}};
  return kWords;
}
/// metadata.json stands beside the results of `prl synthesize` and `prl eval`.
constexpr std::string_view kIgnored[] = {"README.md",         "config.json",    "dataset_info.json", "dataset_infos.json",
                                         "dataset_dict.json", "dummy_data.zip", "state.json",        "metadata.json"};

bool is_separator(char c) { return std::string_view("-._ 0123456789").find(c) != std::string_view::npos; }

/// Whether `word` stands in a name between separators; at the end of a folder's name nothing need follow it.
bool names_word(std::string_view name, std::string_view word, bool is_folder) {
  for (std::size_t at = name.find(word); at != std::string_view::npos; at = name.find(word, at + 1)) {
    const std::size_t end = at + word.size();
    const bool begins = at == 0 || is_separator(name[at - 1]);
    const bool ends = end == name.size() ? is_folder : is_separator(name[end]);
    if (begins && ends) return true;
  }
  return false;
}

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

bool is_hidden(std::string_view path) {
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    if (path[at] == '.' || path.substr(at).starts_with("__")) return true;
    at = end + 1;
  }
  return false;
}

/// "train" of "data/train-00000-of-00004.parquet" or "data/train-00000-of-00004-0123abcd.parquet".
std::optional<std::string> sharded_split(std::string_view path) {
  constexpr std::string_view kFolder = "data/";
  if (!path.starts_with(kFolder) || path.find('/', kFolder.size()) != std::string_view::npos) return std::nullopt;
  const std::string_view name = path.substr(kFolder.size());
  constexpr std::string_view kShape = "-ddddd-of-ddddd";
  for (std::size_t at = name.find('-'); at != std::string_view::npos; at = name.find('-', at + 1)) {
    const std::string_view part = name.substr(at, kShape.size());
    bool fits = at > 0 && part.size() == kShape.size();
    for (std::size_t i = 0; fits && i < kShape.size(); ++i)
      fits = kShape[i] == 'd' ? part[i] >= '0' && part[i] <= '9' : part[i] == kShape[i];
    if (fits) return std::string(name.substr(0, at));
  }
  return std::nullopt;
}

using Splits = std::map<std::string, std::vector<std::string>>;

/// Splits by the names of files and folders.
Splits infer_splits(const std::vector<std::string>& files) {
  Splits splits;
  for (const std::string& path : files)
    if (const auto split = sharded_split(path)) splits[*split].push_back(path);
  if (!splits.empty()) return splits;
  for (const bool by_folder : {true, false}) {
    for (const SplitWords& entry : split_words()) {
      for (const std::string& path : files) {
        bool is_match = false;
        for (const std::string_view word : entry.words) {
          if (!by_folder) {
            is_match = is_match || names_word(file_name(path), word, false);
            continue;
          }
          for (std::size_t at = 0, end = path.find('/'); end != std::string::npos; at = end + 1, end = path.find('/', at))
            is_match = is_match || names_word(std::string_view(path).substr(at, end - at), word, true);
        }
        if (is_match) splits[std::string(entry.split)].push_back(path);
      }
    }
    if (!splits.empty()) return splits;
  }
  if (!files.empty()) splits["train"] = files;
  return splits;
}

std::vector<std::string> under(const std::vector<std::string>& files, std::string folder) {
  while (folder.starts_with("./")) folder.erase(0, 2);
  while (folder.ends_with('/')) folder.pop_back();
  if (folder.empty() || folder == ".") return files;
  std::vector<std::string> inside;
  for (const std::string& path : files)
    if (path.starts_with(folder + "/")) inside.push_back(path);
  return inside;
}

/// Of several formats the most frequent one; the first in the order of names where they are equal.
std::vector<std::string> of_one_format(const std::vector<std::string>& files) {
  std::map<std::string_view, std::size_t> counts;
  for (const std::string& path : files) ++counts[data_format(path)];
  const auto most = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<std::string> kept;
  for (const std::string& path : files)
    if (most != counts.end() && data_format(path) == most->first) kept.push_back(path);
  return kept;
}

template <typename Names>
std::string list_of(const Names& names) {
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

std::vector<std::string> names_of(const Splits& splits) {
  std::vector<std::string> names;
  for (const auto& [name, files] : splits) names.push_back(name);
  return names;
}

Splits splits_of_config(const CardConfig& config, const std::vector<std::string>& files, std::string_view subject) {
  // Inference sees paths below data_dir, so that "data/" and hidden parents above it do not matter.
  const std::vector<std::string> inside = under(files, config.data_dir);
  if (config.splits.empty()) {
    if (config.data_dir.empty()) return infer_splits(inside);
    std::string prefix = config.data_dir;
    while (prefix.starts_with("./")) prefix.erase(0, 2);
    while (prefix.ends_with('/')) prefix.pop_back();
    std::vector<std::string> relative;
    for (const std::string& path : inside) relative.push_back(path.substr(prefix.size() + 1));
    Splits splits = infer_splits(relative);
    for (auto& [name, paths] : splits)
      for (std::string& path : paths) path = prefix + "/" + path;
    return splits;
  }
  Splits splits;
  for (const CardConfig::Split& split : config.splits) {
    for (std::string pattern : split.patterns) {
      if (pattern.find("://") != std::string::npos)
        fail(ErrorCode::kNotImplemented, "{}: subset '{}' takes its files from {}; this build reads files of the data set itself", subject,
             config.name, pattern);
      while (pattern.starts_with("./")) pattern.erase(0, 2);
      if (!config.data_dir.empty()) pattern = config.data_dir + "/" + pattern;
      for (const std::string& path : inside)
        if (matches_glob(pattern, path)) splits[split.name].push_back(path);
    }
    splits[split.name];
  }
  return splits;
}

}  // namespace

SplitRange parse_split(std::string_view text) {
  const auto bad = [&] {
    fail(ErrorCode::kInvalidArgument, "split '{}': wanted a name, and perhaps a range of rows such as [:1000], [-100:] or [10%:20%]", text);
  };
  SplitRange range;
  const std::size_t open = text.find('[');
  range.name = std::string(text.substr(0, open));
  if (range.name.empty()) bad();
  if (open == std::string_view::npos) return range;
  const std::string_view inside = text.substr(open + 1);
  const std::size_t colon = inside.find(':');
  if (!inside.ends_with(']') || colon == std::string_view::npos) bad();
  const auto bound = [&](std::string_view part) -> std::optional<SplitRange::Bound> {
    if (part.empty()) return std::nullopt;
    SplitRange::Bound b;
    b.is_percent = part.ends_with('%');
    if (b.is_percent) part.remove_suffix(1);
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), b.value);
    if (error != std::errc() || end != part.data() + part.size() || (b.is_percent && std::abs(b.value) > 100)) bad();
    return b;
  };
  range.from = bound(inside.substr(0, colon));
  range.to = bound(inside.substr(colon + 1, inside.size() - colon - 2));
  return range;
}

std::pair<std::int64_t, std::int64_t> SplitRange::rows(std::int64_t count) const {
  const auto place = [&](const std::optional<Bound>& bound, std::int64_t fallback) {
    if (!bound) return fallback;
    const std::int64_t row =
        bound->is_percent ? std::llround(static_cast<double>(bound->value) * static_cast<double>(count) / 100.0) : bound->value;
    return std::clamp<std::int64_t>(row < 0 ? count + row : row, 0, count);
  };
  const std::int64_t first = place(from, 0), last = place(to, count);
  return {first, std::max(first, last)};
}

bool matches_glob(std::string_view pattern, std::string_view path) {
  // can[j]: the pattern so far matches the first j characters of the path.
  std::vector<char> can(path.size() + 1, 0), next;
  can[0] = 1;
  for (std::size_t i = 0; i < pattern.size();) {
    next.assign(path.size() + 1, 0);
    if (pattern[i] == '*') {
      const bool crosses = i + 1 < pattern.size() && pattern[i + 1] == '*';
      const std::size_t after = i + (crosses ? 2 : 1);
      bool on = false;
      for (std::size_t j = 0; j <= path.size(); ++j) {
        on = on || can[j] != 0;
        next[j] = on;
        if (j < path.size() && path[j] == '/' && !crosses) on = false;
      }
      // "**/" also stands for no folder at all.
      if (crosses && after < pattern.size() && pattern[after] == '/') {
        std::vector<char> slash(path.size() + 1, 0);
        for (std::size_t j = 0; j <= path.size(); ++j) {
          if (can[j] != 0 && (j == 0 || path[j - 1] == '/')) slash[j] = 1;
          if (j > 0 && next[j - 1] != 0 && path[j - 1] == '/') slash[j] = 1;
        }
        next = std::move(slash);
        i = after + 1;
      } else {
        i = after;
      }
    } else if (pattern[i] == '[' && pattern.find(']', i + 2) != std::string_view::npos) {
      const std::size_t close = pattern.find(']', i + 2);
      std::string_view set = pattern.substr(i + 1, close - i - 1);
      const bool is_negated = set.front() == '!' || set.front() == '^';
      if (is_negated) set.remove_prefix(1);
      for (std::size_t j = 0; j < path.size(); ++j) {
        if (can[j] == 0 || path[j] == '/') continue;
        bool is_in = false;
        for (std::size_t k = 0; k < set.size(); ++k) {
          if (k + 2 < set.size() && set[k + 1] == '-') {
            is_in = is_in || (path[j] >= set[k] && path[j] <= set[k + 2]);
            k += 2;
          } else {
            is_in = is_in || path[j] == set[k];
          }
        }
        if (is_in != is_negated) next[j + 1] = 1;
      }
      i = close + 1;
    } else {
      for (std::size_t j = 0; j < path.size(); ++j)
        if (can[j] != 0 && (pattern[i] == '?' ? path[j] != '/' : path[j] == pattern[i])) next[j + 1] = 1;
      ++i;
    }
    can.swap(next);
  }
  return can[path.size()] != 0;
}

std::vector<std::string> select_data_files(const std::vector<std::string>& all_files, const std::vector<CardConfig>& card,
                                           const DatasetPart& part, std::string_view subject) {
  std::vector<std::string> files;
  for (const std::string& path : all_files) {
    const bool is_ignored = std::find(std::begin(kIgnored), std::end(kIgnored), file_name(path)) != std::end(kIgnored);
    if (is_data_file(path) && !is_ignored && !is_hidden(path)) files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    std::vector<std::string> first(all_files.begin(),
                                   all_files.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(all_files.size(), 6)));
    fail(ErrorCode::kNotFound, "{} holds no data file that this build reads (.parquet, .jsonl, .json, .csv, .tsv), but {}", subject,
         list_of(first));
  }

  Splits splits;
  if (!card.empty()) {
    std::vector<std::string> names;
    const CardConfig* chosen = nullptr;
    for (const CardConfig& config : card) {
      names.push_back(config.name);
      const bool is_it = part.subset ? config.name == *part.subset : config.is_default || config.name == "default" || card.size() == 1;
      if (is_it && (chosen == nullptr || config.is_default)) chosen = &config;
    }
    if (chosen == nullptr && part.subset)
      fail(ErrorCode::kNotFound, "{} has no subset '{}'; it has {}", subject, *part.subset, list_of(names));
    if (chosen == nullptr) fail(ErrorCode::kNotFound, "{} has several subsets and no default; name one of {}", subject, list_of(names));
    splits = splits_of_config(*chosen, files, subject);
  } else if (part.subset && *part.subset != "default") {
    CardConfig folder;
    folder.name = folder.data_dir = *part.subset;
    splits = splits_of_config(folder, files, subject);
    if (splits.empty()) {
      std::set<std::string> folders;
      for (const std::string& path : files)
        if (const std::size_t slash = path.find('/'); slash != std::string::npos) folders.insert(path.substr(0, slash));
      fail(ErrorCode::kNotFound, "{} has no subset '{}'; its folders with data are {}", subject, *part.subset, list_of(folders));
    }
  } else {
    splits = infer_splits(files);
  }
  const auto split = splits.find(part.split);
  if (split == splits.end() || split->second.empty())
    fail(ErrorCode::kNotFound, "{}{} has no split '{}'; it has {}", subject, part.subset ? fmt::format(", subset '{}',", *part.subset) : "",
         part.split, list_of(names_of(splits)));
  std::vector<std::string> chosen = of_one_format(split->second);
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

}  // namespace prl::io
