#include "eval/results_file.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "env/trace_json.hpp"
#include "text/json_python.hpp"

namespace prl::eval {

namespace fs = std::filesystem;
namespace json = boost::json;

namespace {

std::int64_t index_at(const json::object& row, const char* key) {
  const json::value* value = row.if_contains(key);
  return value != nullptr && value->is_int64() ? value->get_int64() : -1;
}

/// Reads JSON lines. A last line without its end that is no JSON was being written when the process died.
std::vector<json::object> read_lines(const fs::path& path) {
  const std::string bytes = read_file(path, std::uint64_t{1} << 36);
  std::vector<json::object> rows;
  std::int64_t line_number = 0;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t found = bytes.find('\n', at);
    const std::size_t end = std::min(found, bytes.size());
    const std::string_view line = std::string_view(bytes).substr(at, end - at);
    at = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      json::value value = text::parse_json(line, text::kJsonDepth, text::LargeNumbers::kKeepText);
      if (!value.is_object()) fail(ErrorCode::kCorrupt, "wanted a JSON object");
      rows.push_back(std::move(value.get_object()));
    } catch (const Error& error) {
      if (found == std::string::npos) {
        log::warning("{}: the last line is cut off and is left out", path.string());
        break;
      }
      fail(ErrorCode::kCorrupt, "{}:{}: {}", path.string(), line_number, error.what());
    }
  }
  return rows;
}

void rewrite(const fs::path& path, const std::vector<json::object>& rows) {
  std::string bytes;
  for (const json::object& row : rows) bytes += text::to_json_text(row) + '\n';
  write_file_atomic(path, bytes);
}

}  // namespace

ResultsWriter::ResultsWriter(Options options) : options_(std::move(options)) {
  if (!options_.results_file.empty()) results_ = AppendFile(options_.results_file, options_.append);
  if (!options_.traces_file.empty()) traces_ = AppendFile(options_.traces_file, options_.append);
}

json::object ResultsWriter::result_row(const env::Episode& episode, std::int64_t rollout_idx) const {
  json::object row = env::to_json(episode);
  row["rollout_idx"] = rollout_idx;
  row["generation_ms"] = episode.timing.generation * 1000;
  row["scoring_ms"] = episode.timing.scoring * 1000;
  row["total_ms"] = episode.timing.total * 1000;
  row["oai_tools"] = text::to_json_text(episode.tool_defs);
  if (options_.is_synthetic)
    for (const char* key : {"rollout_idx", "completion_len", "is_truncated"}) row.erase(key);
  if (!options_.synthesis_key.empty()) row[kSynthesisKey] = options_.synthesis_key;
  return row;
}

void ResultsWriter::write(std::span<const env::Episode> group, std::span<const std::int64_t> rollout_indices) {
  std::string rows, traces;
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (results_.is_open()) rows += text::to_json_text(result_row(group[i], rollout_indices[i])) + '\n';
    if (!traces_.is_open()) continue;
    const env::TraceContext context{options_.run_id, options_.model, rollout_indices[i]};
    traces += text::to_json_text(env::to_trace_json(group[i], context)) + '\n';
  }
  const std::uint64_t before = results_.size();
  if (results_.is_open()) results_.append(rows);
  if (!traces_.is_open()) return;
  try {
    traces_.append(traces);
  } catch (const Error&) {
    if (results_.is_open()) results_.cut(before);
    throw;
  }
}

Outcomes find_synthesized(const fs::path& results_file, const std::string& key, std::int64_t first, std::int64_t end,
                          std::int64_t rollouts_per_example, bool whole_groups) {
  Outcomes outcomes;
  if (!fs::exists(results_file)) return outcomes;
  std::vector<json::object> rows = read_lines(results_file);
  const auto example_of = [&](const json::object& row) {
    const json::value* found = row.if_contains(kSynthesisKey);
    return found != nullptr && text::is_text(*found) && std::string_view(found->get_string()) == key ? index_at(row, "example_id") : -1;
  };
  std::map<std::int64_t, std::int64_t> counts;
  for (const json::object& row : rows) ++counts[example_of(row)];
  // A group that is scored as one cannot be completed: what a crash left of it goes.
  const auto is_torn = [&](const json::object& row) {
    const std::int64_t example = example_of(row);
    return whole_groups && example >= 0 && counts[example] < rollouts_per_example;
  };
  if (std::erase_if(rows, is_torn) > 0) rewrite(results_file, rows);
  std::map<std::int64_t, std::int64_t> num_seen;
  for (const json::object& row : rows) {
    const std::int64_t example = example_of(row);
    if (example < first || example >= end) continue;
    const std::int64_t rollout_idx = num_seen[example]++;
    if (rollout_idx < rollouts_per_example) outcomes.emplace(std::pair{example, rollout_idx}, outcome_of_row(row));
  }
  return outcomes;
}

std::vector<json::object> read_result_rows(const fs::path& path) { return read_lines(path); }

Outcomes take_over_results(const fs::path& results_file, const fs::path& traces_file, std::int64_t first, std::int64_t end,
                           std::int64_t rollouts_per_example, bool whole_groups) {
  Outcomes outcomes;
  if (!fs::exists(results_file)) return outcomes;
  std::vector<json::object> rows = read_lines(results_file);
  std::map<std::int64_t, std::set<std::int64_t>> found;
  for (const json::object& row : rows) {
    const std::int64_t example = index_at(row, "example_id");
    const std::int64_t rollout_idx = index_at(row, "rollout_idx");
    if (example >= first && example < end && rollout_idx >= 0 && rollout_idx < rollouts_per_example) found[example].insert(rollout_idx);
  }
  std::set<std::string> kept_ids;
  std::vector<json::object> kept;
  for (json::object& row : rows) {
    const std::int64_t example = index_at(row, "example_id");
    const std::int64_t rollout_idx = index_at(row, "rollout_idx");
    const auto it = found.find(example);
    if (it == found.end() || !it->second.contains(rollout_idx)) continue;
    if (whole_groups && static_cast<std::int64_t>(it->second.size()) != rollouts_per_example) continue;
    if (!outcomes.emplace(std::pair{example, rollout_idx}, outcome_of_row(row)).second) continue;
    if (const json::value* id = row.if_contains("trajectory_id"); id != nullptr && text::is_text(*id))
      kept_ids.insert(std::string(id->get_string()));
    kept.push_back(std::move(row));
  }
  rewrite(results_file, kept);
  if (!traces_file.empty() && fs::exists(traces_file)) {
    std::vector<json::object> traces = read_lines(traces_file);
    std::erase_if(traces, [&](const json::object& trace) {
      const json::value* id = trace.if_contains("id");
      return id == nullptr || !text::is_text(*id) || !kept_ids.contains(std::string(id->get_string()));
    });
    rewrite(traces_file, traces);
  }
  return outcomes;
}

}  // namespace prl::eval
