#include "env/task_data.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "io/data/find_dataset.hpp"
#include "io/data/row_table.hpp"
#include "io/hub/hub_settings.hpp"
#include "text/json_python.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

void append_rows(std::vector<json::object>& rows, const std::filesystem::path& file) {
  io::RowTable table;
  table.add_file(file);
  for (std::size_t i = 0; i < table.size(); ++i) {
    try {
      json::value row = text::parse_json(table.row(i), text::kJsonDepth, text::LargeNumbers::kKeepText);
      if (!row.is_object()) fail(ErrorCode::kCorrupt, "wanted a JSON object");
      rows.push_back(std::move(row.get_object()));
    } catch (const Error& error) {
      fail(ErrorCode::kCorrupt, "{}: {}", table.where(i), error.what());
    }
  }
}

std::string describe(const DataPart& part) {
  return fmt::format("{} ({}{})", part.dataset, part.subset ? *part.subset + ", " : "", part.split);
}

}  // namespace

std::vector<json::object> read_task_rows(const std::filesystem::path& file) {
  std::vector<json::object> rows;
  append_rows(rows, file);
  return rows;
}

TaskData::TaskData(std::string environment) : environment_(std::move(environment)) {}

std::optional<std::vector<json::object>> TaskData::read(const std::vector<DataPart>& parts, bool asks_hub) {
  io::HubSettings settings = io::HubSettings::from_environment();
  const bool may_ask = !settings.is_offline && can_ask_hub_;
  if (asks_hub && !may_ask) return std::nullopt;
  settings.is_offline = !asks_hub;
  std::vector<json::object> rows;
  for (const DataPart& part : parts) {
    std::vector<std::filesystem::path> files;
    try {
      files = io::find_data_files(part.dataset, {.subset = part.subset, .split = part.split}, settings);
    } catch (const Error& error) {
      // Absent, or out of reach; what is there and broken is the caller's to hear of.
      if (error.code() == ErrorCode::kCorrupt || error.code() == ErrorCode::kIo) throw;
      can_ask_hub_ = can_ask_hub_ && !(asks_hub && error.code() != ErrorCode::kNotFound);
      if (asks_hub || !may_ask) problem_ = error.what();
      return std::nullopt;
    }
    for (const std::filesystem::path& file : files) append_rows(rows, file);
  }
  log::info("{}: {} rows of {}", environment_, rows.size(), describe(parts.front()));
  return rows;
}

std::optional<std::vector<json::object>> TaskData::find(const DataCopies& copies) {
  const std::string before = std::exchange(problem_, {});
  for (const auto& parts : copies)
    if (auto rows = read(parts, false)) {
      problem_ = before;
      return rows;
    }
  if (auto rows = read(copies.front(), true)) {
    problem_ = before;
    return rows;
  }
  std::string others;
  for (std::size_t i = 1; i < copies.size(); ++i) others += (i == 1 ? "; copies that serve as well: " : ", ") + describe(copies[i].front());
  problem_ = fmt::format(
      "environment {}: its data set {} is not here: {}. Where there is a network, `hf download --repo-type dataset {}` puts it into the "
      "cache "
      "of HF_HOME{}; or name local files in args.dataset_path and args.eval_dataset_path",
      environment_, describe(copies.front().front()), problem_.empty() ? "not in the cache, and the hub was out of reach" : problem_,
      copies.front().front().dataset, others);
  return std::nullopt;
}

NamedRows read_named(const std::string& environment, const std::string& dataset, const std::optional<std::string>& subset,
                     const std::string& split, const std::string& eval_split) {
  NamedRows rows;
  TaskData data(environment);
  const auto read = [&](const std::string& name) {
    auto found = data.find({{DataPart{dataset, subset, name}}});
    if (!found) fail(ErrorCode::kNotFound, "{}", data.problem());
    return std::move(*found);
  };
  rows.train = read(split);
  if (!eval_split.empty()) rows.eval = read(eval_split);
  return rows;
}

}  // namespace prl::env
