#include "launch/synthesize_role.hpp"

#include <fmt/core.h>

#include <boost/json/serialize.hpp>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "env/registry.hpp"
#include "launch/eval_metadata.hpp"
#include "launch/eval_run.hpp"
#include "launch/model_setup.hpp"
#include "launch/output_folder.hpp"
#include "launch/results_folder.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
using std::chrono::milliseconds;
namespace {

fs::path folder_for(const config::SynthesizeConfig& config, const std::string& environment) {
  if (!config.save.disk || !config.save.disk->path)
    return config.output_dir / "evals" / results_folder_name(environment, config.model.name) / new_run_id(environment);
  const fs::path folder = *config.save.disk->path;
  return config.env.size() > 1 ? folder / environment : folder;
}

eval::EvalTask task_for(const config::SynthesizeConfig& config, const config::EvalEnvConfig& entry) {
  eval::EvalTask task;
  task.environment = env::make_environment(in_run(env_spec(entry), env_logs(config.output_dir, "synthesize"),
                                                  config.max_concurrent.value_or(eval::kDefaultConcurrent), config.log.vf_level));
  task.environment->prepare();
  task.split = env::Split::kTrain;
  task.num_examples = entry.num_examples.value_or(config.num_examples);
  task.rollouts_per_example = entry.group_size.value_or(config.group_size);
  task.skip_first = entry.skip_first;
  task.seed = static_cast<std::uint64_t>((entry.sampling ? *entry.sampling : config.sampling).seed.value_or(config.seed));
  task.max_concurrent = config.max_concurrent.value_or(eval::kDefaultConcurrent);
  if (entry.timeout) task.rollout_timeout = to_ms(*entry.timeout);
  task.retry = {.max_attempts = config.retry.max_attempts,
                .wait_multiplier = to_ms(config.retry.wait_multiplier),
                .wait_min = to_ms(config.retry.wait_min),
                .wait_max = to_ms(config.retry.wait_max),
                .reraise = false};
  task.drop_failed_groups = true;  // and says so in the end, with a way to play them again
  task.keep_episodes = false;
  task.label = "synthesize";
  task.model = config.model.name;
  task.headers_from_state = config.client.extra_headers_from_state;
  task.is_synthetic = true;
  task.log_interval = to_ms(config.log.interval);
  return task;
}

/// What makes a rollout of an example: the same key, example and place give the same rollout.
std::string synthesis_key(const EvalFacts& facts, std::uint64_t seed) {
  const std::string text = fmt::format("{} {} {} {} {}", facts.env_id, boost::json::serialize(facts.env_args), facts.model,
                                       boost::json::serialize(facts.sampling), seed);
  return fmt::format("{:016x}", hash_bytes(text));
}

/// How an environment ended, and what is missing.
void report(const std::string& env_id, const fs::path& folder, const FinishedEval& done, bool is_stopped) {
  const std::string file = (folder / "results.jsonl").string();
  if (!done.result) {
    const std::string next =
        fmt::format("what is in {} stays; the same command with --save.disk.path {} plays what is missing", file, folder.string());
    if (is_stopped) return log::warning("synthesizing with {} is not finished; {}", env_id, next);
    return log::error("synthesizing with {} ended: {}; {}", env_id, done.error, next);
  }
  const eval::EvalResult& result = *done.result;
  log::success("Synthesized {} rollouts of {} examples of {} in {:.2f}s (reward {:.4f}, {} rollouts were there already): {}",
               result.num_examples * result.rollouts_per_example, result.num_examples, result.env_name, result.seconds, result.avg_reward,
               result.num_resumed_rollouts, file);
  if (result.num_dropped_groups > 0)
    log::error("{} of {} groups of {} failed and are missing: the same command with --save.disk.path {} plays them again",
               result.num_dropped_groups, result.num_wanted_examples, env_id, folder.string());
}

}  // namespace

int run_synthesize_role(const config::SynthesizeConfig& config, bool is_server_named, std::stop_token stop) {
  net::raise_fd_limit(65536);
  std::vector<PlannedEval> plans;
  std::vector<fs::path> folders;
  std::vector<std::unique_ptr<RunLock>> locks;
  const auto limiter = std::make_shared<eval::Limiter>(config.max_concurrent.value_or(eval::kDefaultConcurrent));
  for (const config::EvalEnvConfig& entry : config.env) {
    PlannedEval plan;
    plan.task = task_for(config, entry);
    plan.task.limiter = limiter;
    folders.push_back(folder_for(config, plan.task.environment->name()));
    locks.push_back(claim_results_folder(folders.back(), true, "save.disk.path", ""));
    plan.task.results_file = folders.back() / "results.jsonl";
    plans.push_back(std::move(plan));
  }
  OutputFolder(config.output_dir).claim("synthesize");
  net::IoRuntime io(1, "synthesize");
  const auto subject = make_subject(
      {.model = config.model.name, .client = config.client, .reasoning_field = config.reasoning_field, .is_server_named = is_server_named},
      io);
  if (!wait_until_ready(io, *subject, config.sampling, to_ms(config.client.wait_for_ready_timeout), stop)) return 0;
  const auto version = checked_policy_version(*subject);
  std::vector<EvalFacts> facts;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const config::EvalEnvConfig& entry = config.env[i];
    const config::EvalSamplingConfig& sampling = entry.sampling ? *entry.sampling : config.sampling;
    plans[i].chat = subject->chat(sampling);
    plans[i].task.sampling = subject->sampling(sampling);
    facts.push_back({.env_id = entry.id,
                     .env_args = env_spec(entry).args,
                     .model = config.model.name,
                     .base_url = subject->base_url(),
                     .num_examples = plans[i].task.num_examples,
                     .rollouts_per_example = plans[i].task.rollouts_per_example,
                     .ckpt_step = 0,
                     .policy_version = version,
                     .sampling = request_fields(sampling, false),
                     .state_columns = entry.state_columns});
    plans[i].task.synthesis_key = synthesis_key(facts.back(), *plans[i].task.seed);
    write_metadata(folders[i], facts.back(), nullptr);
  }
  const auto on_done = [&](std::size_t i, const FinishedEval& done) {
    if (done.result) write_metadata(folders[i], facts[i], &*done.result);
    report(config.env[i].id, folders[i], done, stop.stop_requested());
  };
  int num_failed = 0;
  for (const FinishedEval& done : run_together(io, std::move(plans), stop, on_done))
    if (done.result ? done.result->num_dropped_groups > 0 : !stop.stop_requested()) ++num_failed;
  return num_failed == 0 ? 0 : 1;
}

}  // namespace prl::launch
