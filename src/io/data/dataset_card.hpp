#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace prl::io {

/// One entry of `configs:` in the front matter of a data set's README.md.
struct CardConfig {
  /// Files of one split, as patterns.
  struct Split {
    std::string name;
    std::vector<std::string> patterns;
  };
  std::string name;
  bool is_default = false;
  std::string data_dir;       ///< empty: the whole repository
  std::vector<Split> splits;  ///< empty: found by the names of files
};

/// Of a README.md that is read for its front matter.
constexpr std::size_t kMaxCardBytes = 16 << 20;

/// Reads the YAML between the first two lines of "---". No front matter, or none that has configs, gives an empty list.
/// Error{kCorrupt} names `subject` and the line or key; nesting, size and aliases are limited.
/// Source    "Manual configuration" of huggingface.co/docs/datasets/repository_structure.
std::vector<CardConfig> read_dataset_card(std::string_view readme, std::string_view subject);

}  // namespace prl::io
