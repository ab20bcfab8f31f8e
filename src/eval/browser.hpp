#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace prl::eval {

/// One folder with results.jsonl; from its metadata.json where there is one.
struct ResultsFolder {
  std::filesystem::path path;
  std::string env_name;
  std::string model;
  std::int64_t ckpt_step = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_examples = -1;
  std::int64_t rollouts_per_example = 1;
  double avg_reward = 0;  ///< over the rows
  std::string pass_at_k;  ///< "pass@1 0.500 pass@2 0.750", or empty
  bool is_complete = true;
};

/// Every folder at or below `root` that holds results.jsonl, by path; those whose rows cannot be read are left out with a warning.
/// Error{kNotFound} if `root` does not exist.
std::vector<ResultsFolder> find_results(const std::filesystem::path& root);

enum class RowOrder { kFile, kRewardUp, kRewardDown };
/// Rows with reward in [min_reward, max_reward], in order; rows of one reward stay as in the file.
std::vector<boost::json::object> select_rows(std::vector<boost::json::object> rows, RowOrder order, std::optional<double> min_reward,
                                             std::optional<double> max_reward);

/// A table; every line ends in '\n'.
std::string list_folders(const std::vector<ResultsFolder>& folders);
/// The same, cut to a terminal of `width` columns.
std::string list_rows(const std::vector<boost::json::object>& rows, std::size_t width);
/// One rollout: its messages, tool calls, answer, reward, metrics and error.
std::string show_row(const boost::json::object& row);

/// Browsing by lines typed: a number opens; n and p go to the next and the one before; b goes back; s changes the order of rows;
/// q ends. Knows no terminal: screen() is what to print, feed() takes a line.
class Browser {
 public:
  Browser(std::vector<ResultsFolder> folders, std::size_t width);
  /// Opens the only folder at once if there is just one.
  std::string screen() const;
  /// False when browsing has ended.
  bool feed(const std::string& line);

 private:
  void open_folder(std::size_t index);

  std::vector<ResultsFolder> folders_;
  std::size_t width_;
  std::optional<std::size_t> folder_;
  std::vector<boost::json::object> all_rows_, rows_;
  std::optional<std::size_t> row_;
  RowOrder order_ = RowOrder::kFile;
  std::string notice_;
};

}  // namespace prl::eval
