#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/data/dataset_card.hpp"

namespace prl::io {

/// Which part of a data set is wanted.
struct DatasetPart {
  std::optional<std::string> subset;  ///< a config of the card or, without a card, a folder; none: the default one
  std::string split = "train";
};

/// Data files of a part among all files of a repository or folder, sorted, by Hugging Face's rules: the card's configs first, else
/// "data/<split>-00000-of-00001.*", else folders and then files named after a split (train, validation, test and their
/// synonyms), else everything is train. Where files of several formats match, the most frequent format is taken.
/// Errors    Error{kNotFound} that lists the subsets or splits there are; Error{kNotImplemented} for patterns that are URLs.
/// Source    "Structure your repository" of huggingface.co/docs/datasets.
std::vector<std::string> select_data_files(const std::vector<std::string>& files, const std::vector<CardConfig>& card,
                                           const DatasetPart& part, std::string_view subject);

/// A split as users write it: a name, and perhaps a range of its rows: "train[:1000]", "train[-100:]", "train[10%:20%]".
struct SplitRange {
  std::string name;
  /// Row numbers [first, last) of a split that has `count` rows.
  std::pair<std::int64_t, std::int64_t> rows(std::int64_t count) const;

  struct Bound {
    std::int64_t value = 0;  ///< rows from the start, or from the end if negative; or hundredths
    bool is_percent = false;
  };
  std::optional<Bound> from, to;
};
/// Error{kInvalidArgument} naming the text.
SplitRange parse_split(std::string_view text);

/// Whether a path matches a pattern: '*' and '?' within a name, "**" across folders, [a-z] sets.
bool matches_glob(std::string_view pattern, std::string_view path);

}  // namespace prl::io
