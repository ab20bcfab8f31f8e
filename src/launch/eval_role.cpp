#include "launch/eval_role.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "env/registry.hpp"
#include "launch/eval_metadata.hpp"
#include "launch/eval_run.hpp"
#include "launch/model_setup.hpp"
#include "launch/output_folder.hpp"
#include "launch/results_folder.hpp"
#include "launch/run_folder.hpp"
#include "monitor/sinks.hpp"
#include "orchestrator/metrics.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
using std::chrono::milliseconds;
namespace {

/// (step, folder) to evaluate after the base model, newest first; every step that is asked for must exist.
std::vector<std::pair<std::int64_t, fs::path>> checkpoints_of(const config::EvalConfig& config) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  if (!config.weights_dir) return found;
  if (!fs::is_directory(*config.weights_dir)) fail(ErrorCode::kNotFound, "weights_dir {} is no folder", config.weights_dir->string());
  for (const auto& entry : fs::directory_iterator(*config.weights_dir))
    if (const std::int64_t step = parse_step_dir(entry.path().filename().string()); step >= 0) found.emplace_back(step, entry.path());
  std::sort(found.rbegin(), found.rend());
  if (!config.steps) {
    if (found.empty()) fail(ErrorCode::kNotFound, "weights_dir {} holds no folder step_N", config.weights_dir->string());
    return found;
  }
  std::vector<std::pair<std::int64_t, fs::path>> wanted;
  for (const int step : *config.steps) {
    const auto it = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == step; });
    if (it == found.end()) fail(ErrorCode::kNotFound, "steps: {} has no step_{}", config.weights_dir->string(), step);
    wanted.push_back(*it);
  }
  std::sort(wanted.rbegin(), wanted.rend());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
}

/// All evaluations of one `prl eval`.
class Evaluation {
 public:
  Evaluation(const config::EvalConfig& config, bool is_server_named, std::stop_token stop)
      : config_(config), is_server_named_(is_server_named), stop_(std::move(stop)), checkpoints_(checkpoints_of(config)) {
    // What needs no model fails before one is loaded.
    const std::int64_t concurrency = config.max_concurrent.value_or(eval::kDefaultConcurrent);
    for (const config::EvalEnvConfig& entry : config.env)
      environments_.push_back(
          env::make_environment(in_run(env_spec(entry), env_logs(config.output_dir, "eval"), concurrency, config.log.vf_level)));
    for (const env::EnvironmentPtr& environment : environments_) environment->prepare();
    if (config.resume_path) {
      check_resumable(*config.resume_path, config.env.front(), facts(0));
      locks_.push_back(claim_results_folder(*config.resume_path, true, "resume_path", ""));
    }
    monitor::MetricSet declared;
    declared.declare(orchestrator::metric_infos());
    monitor_ = std::make_unique<monitor::Monitor>(std::move(declared), kEvalRows);
    fs::create_directories(config.output_dir);
    OutputFolder(config.output_dir).claim("eval");
    monitor_->add_sink(monitor::make_jsonl_sink(config.output_dir / "metrics.jsonl"));
  }

  int run() {
    subject_ = make_subject({.model = config_.model.name,
                             .client = config_.client,
                             .reasoning_field = config_.reasoning_field,
                             .is_server_named = is_server_named_},
                            io_);
    if (!wait_until_ready(io_, *subject_, config_.sampling, to_ms(config_.client.wait_for_ready_timeout), stop_)) return 0;
    std::exception_ptr failure;
    try {
      evaluate_all();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    put_back();
    if (failure) std::rethrow_exception(failure);
    monitor_->finish();
    return num_failed_ == 0 ? 0 : 1;
  }

 private:
  void evaluate_all() {
    if (config_.eval_base) {
      if (!checkpoints_.empty() && !subject_->reload_base())
        log::warning("{} has no /reload_weights: its present weights count as the base model", subject_->base_url());
      evaluate(0);
    }
    for (const auto& [step, folder] : checkpoints_) {
      if (stop_.stop_requested()) break;
      loaded_step_ = step;
      subject_->load(folder, step);
      evaluate(step);
    }
  }

  /// However the evaluation ended: whoever asks the server next must not get the last checkpoint under the model's name.
  void put_back() {
    if (!loaded_step_) return;
    try {
      if (subject_->reload_base())
        log::info("the first weights are back in {}", subject_->base_url());
      else
        log::warning("{} has no /reload_weights: it keeps the weights of step {}", subject_->base_url(), *loaded_step_);
    } catch (const Error& error) {
      log::error(
          "the first weights could not be put back into {}, which may keep those of step {} (POST /reload_weights, or start it "
          "anew): {}",
          subject_->base_url(), *loaded_step_, error.what());
      ++num_failed_;
    }
  }

  EvalFacts facts(std::size_t env_idx) const {
    const config::EvalEnvConfig& entry = config_.env[env_idx];
    EvalFacts facts;
    facts.env_id = entry.id;
    facts.env_args = env_spec(entry).args;
    facts.model = config_.model.name;
    facts.num_examples = entry.num_examples.value_or(config_.num_examples);
    facts.rollouts_per_example = entry.group_size.value_or(config_.group_size);
    facts.sampling = request_fields(entry.sampling.value_or(config_.sampling), false);
    facts.state_columns = entry.state_columns;
    return facts;
  }

  fs::path folder_for(std::size_t env_idx, std::int64_t step) {
    if (config_.resume_path) return *config_.resume_path;
    const std::string& name = environments_[env_idx]->name();
    if (!config_.save.disk || !config_.save.disk->path)
      return config_.output_dir / "evals" / results_folder_name(name, config_.model.name) /
             new_run_id(fmt::format("{} {} {}", name, config_.model.name, step));
    fs::path folder = *config_.save.disk->path;
    if (!checkpoints_.empty()) folder /= fmt::format("step_{}", step);
    if (environments_.size() > 1) folder /= name;
    const std::string way_out = fmt::format(", or go on with --resume-path {}", folder.string());
    locks_.push_back(claim_results_folder(folder, false, "save.disk.path", way_out.c_str()));
    return folder;
  }

  PlannedEval plan(std::size_t env_idx, std::int64_t step, const fs::path& folder, const std::shared_ptr<eval::Limiter>& limiter) {
    const config::EvalEnvConfig& entry = config_.env[env_idx];
    const config::EvalSamplingConfig& sampling = entry.sampling ? *entry.sampling : config_.sampling;
    PlannedEval plan;
    plan.chat = subject_->chat(sampling);
    eval::EvalTask& task = plan.task;
    task.environment = environments_[env_idx];
    task.num_examples = entry.num_examples.value_or(config_.num_examples);
    task.rollouts_per_example = entry.group_size.value_or(config_.group_size);
    task.skip_first = entry.skip_first;
    task.sampling = subject_->sampling(sampling);
    task.seed = static_cast<std::uint64_t>(sampling.seed.value_or(config_.seed));
    task.max_concurrent = config_.max_concurrent.value_or(eval::kDefaultConcurrent);
    task.limiter = limiter;
    if (entry.timeout) task.rollout_timeout = to_ms(*entry.timeout);
    task.retry = {.max_attempts = entry.max_retries + 1,
                  .wait_multiplier = to_ms(config_.retry.wait_multiplier),
                  .wait_min = to_ms(config_.retry.wait_min),
                  .wait_max = to_ms(config_.retry.wait_max),
                  .reraise = config_.retry.reraise};
    task.per_rollout = config_.per_rollout;
    task.keep_episodes = false;
    task.label = fmt::format("v{}", step);
    task.model = config_.model.name;
    task.headers_from_state = config_.client.extra_headers_from_state;
    task.results_file = folder / "results.jsonl";
    task.traces_file = folder / "traces.jsonl";
    task.resume = config_.resume_path.has_value();
    task.log_interval = to_ms(config_.log.interval);
    return plan;
  }

  void evaluate(std::int64_t step) {
    const auto limiter = std::make_shared<eval::Limiter>(config_.max_concurrent.value_or(eval::kDefaultConcurrent));
    std::vector<PlannedEval> plans;
    std::vector<fs::path> folders;
    std::vector<EvalFacts> all_facts;
    const auto version = checkpoints_.empty() ? checked_policy_version(*subject_) : subject_->policy_version();
    for (std::size_t i = 0; i < environments_.size(); ++i) {
      folders.push_back(folder_for(i, step));
      all_facts.push_back(facts(i));
      all_facts[i].base_url = subject_->base_url();
      all_facts[i].ckpt_step = step;
      all_facts[i].policy_version = version;
      write_metadata(folders[i], all_facts[i], nullptr);
      plans.push_back(plan(i, step, folders[i], limiter));
    }
    monitor::Metrics metrics;  // one row for all environments
    const auto on_done = [&](std::size_t i, const FinishedEval& done) {
      const std::string prefix = checkpoints_.empty() ? "" : fmt::format("[step {}] ", step);
      if (!done.result) {
        if (stop_.stop_requested())
          log::warning("{}the evaluation of {} is not finished; continue it with --resume-path {}", prefix, environments_[i]->name(),
                       folders[i].string());
        else
          log::error("{}the evaluation of {} ended: {}", prefix, environments_[i]->name(), done.error);
        return;
      }
      write_metadata(folders[i], all_facts[i], &*done.result);
      orchestrator::put_eval_metrics(metrics, *done.result, step);
      metrics["progress/ckpt_step"] = static_cast<double>(step);
      log::success("{}{}", prefix, eval::console_line(*done.result));
      if (done.result->error_mean > 0)
        log::warning("{}{:.1f}% of the rollouts of {} failed and count as reward 0", prefix, done.result->error_mean * 100,
                     environments_[i]->name());
      log::info("results in {}", folders[i].string());
    };
    for (const FinishedEval& done : run_together(io_, std::move(plans), stop_, on_done))
      if (done.result ? done.result->error_mean >= 1.0 : !stop_.stop_requested()) ++num_failed_;
    if (!metrics.empty()) monitor_->log(step, metrics);
    if (const auto after = stop_.stop_requested() ? version : subject_->policy_version(); version && after && *after != *version)
      log::warning("{} got other weights during the evaluation: policy version {} before, {} after it", subject_->base_url(), *version,
                   *after);
  }

  const config::EvalConfig& config_;
  bool is_server_named_;
  std::stop_token stop_;
  std::vector<std::pair<std::int64_t, fs::path>> checkpoints_;
  std::vector<env::EnvironmentPtr> environments_;
  std::vector<std::unique_ptr<RunLock>> locks_;  ///< of the folders of results
  std::unique_ptr<monitor::Monitor> monitor_;
  net::IoRuntime io_{1, "eval"};
  std::unique_ptr<ModelSubject> subject_;
  std::optional<std::int64_t> loaded_step_;  ///< that was put into the model, or was about to be
  int num_failed_ = 0;
};

}  // namespace

int run_eval_role(const config::EvalConfig& config, bool is_server_named, std::stop_token stop) {
  net::raise_fd_limit(65536);
  return Evaluation(config, is_server_named, std::move(stop)).run();
}

}  // namespace prl::launch
