#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "eval/outcome.hpp"

namespace prl::eval {

/// Appends finished rollouts: results.jsonl with one row each (spec 6.2; the fields of verifiers), and traces.jsonl with one
/// episode each in the shape of verifiers' v1 records. What is written together is flushed together.
class ResultsWriter {
 public:
  struct Options {
    std::filesystem::path results_file;  ///< empty: none
    std::filesystem::path traces_file;   ///< empty: none
    bool append = false;                 ///< keep what is there; otherwise the files begin anew
    bool is_synthetic = false;           ///< rows of training data: without rollout_idx, completion_len and is_truncated
    std::string run_id;                  ///< of the traces
    std::string model;                   ///< of the traces
  };
  ResultsWriter() = default;
  /// Makes the folders. Error{kIo} naming the file.
  explicit ResultsWriter(Options options);
  /// The episodes of a group and their places in it, in one write. Error{kIo} when the disk is full.
  void write(std::span<const env::Episode> group, std::span<const std::int64_t> rollout_indices);

 private:
  boost::json::object result_row(const env::Episode& episode, std::int64_t rollout_idx) const;

  Options options_;
  std::ofstream results_;
  std::ofstream traces_;
};

/// The rows of results.jsonl that count for a resumed evaluation: examples in [first, end), rollouts below
/// `rollouts_per_example`, and, if `whole_groups`, only examples with all their rollouts. Other rows, repetitions and a last line
/// that was cut off are removed from the file and from traces.jsonl. An empty map if there is no file.
Outcomes take_over_results(const std::filesystem::path& results_file, const std::filesystem::path& traces_file, std::int64_t first,
                           std::int64_t end, std::int64_t rollouts_per_example, bool whole_groups);

/// Rows of a results file in their order; a last line that was cut off is left out. Error{kCorrupt} naming a line that is no
/// JSON, {kNotFound}.
std::vector<boost::json::object> read_result_rows(const std::filesystem::path& path);

}  // namespace prl::eval
