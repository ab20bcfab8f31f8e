#pragma once

#include <boost/json/object.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::env {

/// Behind the id of an environment whose tasks are made up: in metrics, logs and names of folders.
constexpr std::string_view kSynthetic = "-synthetic";

/// One part of a published data set.
struct DataPart {
  std::string dataset;  ///< hub id, folder or file
  std::optional<std::string> subset = {};
  std::string split = "train";
};
/// Parts that together are the rows wanted; several copies of the same questions, the best known first.
using DataCopies = std::vector<std::vector<DataPart>>;

/// Rows of a file in any format that io::RowTable reads. Error{kNotFound}, {kCorrupt} naming file and row.
std::vector<boost::json::object> read_task_rows(const std::filesystem::path& file);

/// Rows of published data sets, looked for in the local cache of Hugging Face's clients and, where there is none, on the hub. The
/// hub is not asked again once it could not be reached. One object serves the splits of one environment.
class TaskData {
 public:
  explicit TaskData(std::string environment);

  /// The first copy that the cache (or a folder) has; else the first copy, downloaded. nullopt, with a reason in problem(), if there is
  /// none. Error{kCorrupt} for files that are there and broken.
  std::optional<std::vector<boost::json::object>> find(const DataCopies& copies);
  /// Why nothing was found, and how to fetch it; empty if everything was.
  const std::string& problem() const noexcept { return problem_; }

 private:
  std::optional<std::vector<boost::json::object>> read(const std::vector<DataPart>& parts, bool asks_hub);

  std::string environment_;
  std::string problem_;
  bool can_ask_hub_ = true;
};

/// The rows of one named data set; empty for an absent `eval` split. Error{kNotFound} saying how to fetch it.
struct NamedRows {
  std::vector<boost::json::object> train;
  std::vector<boost::json::object> eval;
};
NamedRows read_named(const std::string& environment, const std::string& dataset, const std::optional<std::string>& subset,
                     const std::string& split, const std::string& eval_split);

}  // namespace prl::env
