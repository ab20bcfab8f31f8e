#include "orchestrator/rollout_log.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <string>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::orchestrator {

namespace json = boost::json;

namespace {

void write_step_file(const std::filesystem::path& output_dir, std::int64_t step, const char* name, const std::string& bytes) {
  const std::filesystem::path folder = output_dir / "rollouts" / fmt::format("step_{}", step);
  std::error_code ec;
  std::filesystem::create_directories(folder, ec);
  if (ec) fail(ErrorCode::kIo, "{}: {}", folder.string(), ec.message());
  write_file_atomic(folder / name, bytes);
}

}  // namespace

void write_train_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const CollectedBatch& batch) {
  std::string bytes;
  for (const ReadyRollout& rollout : batch.rollouts) {
    json::object row = env::to_json(rollout.episode);
    row["advantage"] = static_cast<double>(rollout.advantage);
    row["group_id"] = rollout.group.value;
    row["step"] = step;
    row["num_samples"] = rollout.samples.size();
    json::object policy;
    policy["start"] = rollout.version_start.value;
    policy["end"] = rollout.version_end.value;
    row["policy"] = std::move(policy);
    json::array filters;
    for (const std::string& name : rollout.filters_matched) filters.emplace_back(name);
    row["filters"] = std::move(filters);
    bytes += json::serialize(row);
    bytes += '\n';
  }
  write_step_file(output_dir, step, "train_rollouts.jsonl", bytes);
}

void write_eval_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const std::vector<eval::EvalResult>& results) {
  std::string bytes;
  for (const eval::EvalResult& result : results)
    for (const env::Episode& episode : result.episodes) {
      json::object row = env::to_json(episode);
      row["step"] = step;
      bytes += json::serialize(row);
      bytes += '\n';
    }
  write_step_file(output_dir, step, "eval_rollouts.jsonl", bytes);
}

}  // namespace prl::orchestrator
