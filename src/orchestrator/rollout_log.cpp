#include "orchestrator/rollout_log.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/json_python.hpp"

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

/// ,"name":[...]
template <typename T>
void put_list(std::string& out, const char* name, const std::vector<T>& values) {
  fmt::format_to(std::back_inserter(out), ",\"{}\":[", name);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    if (std::isfinite(static_cast<double>(values[i])))
      fmt::format_to(std::back_inserter(out), "{}", values[i]);
    else
      out += "null";
  }
  out += ']';
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
    bytes += text::to_json_text(row);
    bytes += '\n';
  }
  write_step_file(output_dir, step, "train_rollouts.jsonl", bytes);
}

void write_train_tokens(const std::filesystem::path& output_dir, std::int64_t step, const CollectedBatch& batch) {
  std::string bytes;
  for (std::size_t row = 0; row < batch.rollouts.size(); ++row)
    for (std::size_t i = 0; i < batch.rollouts[row].samples.size(); ++i) {
      const wire::TrainingSample& sample = batch.rollouts[row].samples[i];
      fmt::format_to(std::back_inserter(bytes), "{{\"row\":{},\"sample\":{},\"env_name\":{}", row, i,
                     json::serialize(json::string_view(sample.env_name)));
      put_list(bytes, "token_ids", sample.token_ids);
      put_list(bytes, "loss_mask", sample.mask);
      put_list(bytes, "advantages", sample.advantages);
      put_list(bytes, "inference_logprobs", sample.logprobs);
      // A sample that a resumed run read from a checkpoint of a former version has none.
      if (sample.versions.size() == sample.token_ids.size()) put_list(bytes, "policy_versions", sample.versions);
      if (!sample.ref_logprobs.empty()) put_list(bytes, "ref_logprobs", sample.ref_logprobs);
      bytes += "}\n";
    }
  write_step_file(output_dir, step, "train_tokens.jsonl", bytes);
}

void write_eval_rollouts(const std::filesystem::path& output_dir, std::int64_t step, const std::vector<eval::EvalResult>& results) {
  std::string bytes;
  for (const eval::EvalResult& result : results)
    for (const env::Episode& episode : result.episodes) {
      json::object row = env::to_json(episode);
      row["step"] = step;
      bytes += text::to_json_text(row);
      bytes += '\n';
    }
  write_step_file(output_dir, step, "eval_rollouts.jsonl", bytes);
}

}  // namespace prl::orchestrator
