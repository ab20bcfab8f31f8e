#include "launch/eval_role.hpp"

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "env/python/worker_templates.hpp"
#include "env/registry.hpp"
#include "launch/eval_metadata.hpp"
#include "launch/eval_run.hpp"
#include "launch/model_setup.hpp"
#include "launch/output_folder.hpp"
#include "launch/results_folder.hpp"
#include "launch/run_folder.hpp"
#include "monitor/metrics_file.hpp"
#include "monitor/sinks.hpp"
#include "nn/peft.hpp"
#include "orchestrator/metrics.hpp"
#include "weights/weight_channel.hpp"

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

/// A training run whose steps are evaluated while it writes them.
struct FollowedRun {
  fs::path folder;
  std::int64_t first_step = 1;
  std::int64_t resumed_from = 0;  ///< earlier steps may be missing
  std::optional<std::int64_t> last_step;
  milliseconds timeout{0};
  std::vector<std::int64_t> intervals;  ///< of each environment
  bool takes_every_step = false;        ///< the oldest of those that are left each time, else the newest
  bool removes_evaluated = false;

  /// The environments that are played at a step.
  std::vector<std::size_t> due_at(std::int64_t step) const {
    std::vector<std::size_t> due;
    for (std::size_t i = 0; i < intervals.size(); ++i)
      if (step % intervals[i] == 0 || (last_step && step >= *last_step)) due.push_back(i);
    return due;
  }
};

/// Whether all of a step's weights are there: broadcasts get a STABLE at the end, checkpoints their name.
bool holds_weights(const fs::path& step) {
  if (fs::exists(step / "manifest.json") && !fs::exists(step / "STABLE")) return false;
  return fs::exists(step / "model.safetensors") || fs::exists(step / "model.safetensors.index.json") || fs::exists(step / nn::kPeftConfig);
}

/// The next step after `step` at which something is played and whose weights are there.
std::optional<std::int64_t> next_due_after(const FollowedRun& run, std::int64_t step) {
  std::vector<std::int64_t> due;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run.folder, error))
    if (const std::int64_t found = parse_step_dir(entry.path().filename().string());
        found > step && !run.due_at(found).empty() && holds_weights(entry.path()))
      due.push_back(found);
  if (due.empty()) return std::nullopt;
  return run.takes_every_step ? std::ranges::min(due) : std::ranges::max(due);
}

/// What `prl evals` adds to an evaluation.
struct Extras {
  std::optional<FollowedRun> followed = {};
  std::optional<config::EvalEngineConfig> engine = {};
  fs::path metrics_file = "metrics.jsonl";
};

/// All evaluations of one `prl eval` or `prl evals`.
class Evaluation {
 public:
  Evaluation(const config::EvalConfig& config, bool is_server_named, std::stop_token stop, Extras extras = {})
      : config_(config),
        is_server_named_(is_server_named),
        stop_(std::move(stop)),
        checkpoints_(checkpoints_of(config)),
        engine_(std::move(extras.engine)),
        followed_(std::move(extras.followed)) {
    // What needs no model fails before one is loaded.
    const std::int64_t concurrency = config.max_concurrent.value_or(eval::kDefaultConcurrent);
    const auto templates = std::make_shared<env::python::WorkerTemplates>();
    for (const config::EvalEnvConfig& entry : config.env)
      environments_.push_back(
          env::make_environment(in_run(env_spec(entry), env_logs(config.output_dir, "eval"), concurrency, config.log.vf_level, templates)));
    for (const env::EnvironmentPtr& environment : environments_) environment->prepare();
    if (config.resume_path) {
      check_resumable(*config.resume_path, config.env.front(), facts(0));
      locks_.push_back(claim_results_folder(*config.resume_path, true, "resume_path", ""));
    }
    monitor::MetricSet declared;
    declared.declare(orchestrator::metric_infos());
    monitor_ = std::make_unique<monitor::Monitor>(std::move(declared), kEvalRows);
    fs::create_directories(config.output_dir);
    if (!is_folder_prepared(config.output_dir)) OutputFolder(config.output_dir).claim(followed_ ? "evals" : "eval");
    monitor_->add_sink(monitor::make_jsonl_sink(config.output_dir / extras.metrics_file));
  }

  int run() {
    subject_ = make_subject({.model = config_.model.name,
                             .client = config_.client,
                             .reasoning_field = config_.reasoning_field,
                             .is_server_named = is_server_named_,
                             .engine = engine_},
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
  /// Whether other weights than those of the model's name are evaluated.
  bool has_steps() const { return !checkpoints_.empty() || followed_.has_value(); }
  std::vector<std::size_t> all_environments() const {
    std::vector<std::size_t> all(environments_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    return all;
  }

  void evaluate_all() {
    if (config_.eval_base) {
      if (has_steps() && !subject_->reload_base())
        log::warning("{} has no /reload_weights: its present weights count as the base model", subject_->base_url());
      evaluate(0, all_environments());
    }
    if (followed_) return follow(*followed_);
    for (const auto& [step, folder] : checkpoints_) {
      if (stop_.stop_requested()) break;
      loaded_step_ = step;
      subject_->load(folder, step);
      evaluate(step, all_environments());
    }
  }

  void follow(const FollowedRun& run) {
    constexpr milliseconds kPoll{500};
    std::int64_t handled = run.first_step - 1;
    auto waiting_since = std::chrono::steady_clock::now(), said = waiting_since;
    log::info("following {}{}", run.folder.string(), run.last_step ? fmt::format(" until step {}", *run.last_step) : "");
    while (!stop_.stop_requested() && (!run.last_step || handled < *run.last_step)) {
      const auto now = std::chrono::steady_clock::now();
      if (const std::optional<std::int64_t> step = next_due_after(run, handled)) {
        if (run.takes_every_step) tell_passed_over(run, handled, *step);
        handled = *step;
        evaluate_step(run, *step);
        waiting_since = said = std::chrono::steady_clock::now();
        continue;
      }
      if (now - waiting_since > run.timeout)
        fail(ErrorCode::kDeadline, "{} got no weights after step {} for {:.0f} s (online.timeout)", run.folder.string(), handled,
             std::chrono::duration<double>(run.timeout).count());
      if (now - said > to_ms(config_.log.interval)) {
        said = now;
        log::info("waiting for weights after step {} in {} ({:.0f} s)", handled, run.folder.string(),
                  std::chrono::duration<double>(now - waiting_since).count());
      }
      std::unique_lock lock(wait_mutex_);
      wait_.wait_for(lock, stop_, kPoll, [] { return false; });
    }
  }

  /// Of a run that keeps only so many steps for evaluations.
  static void tell_passed_over(const FollowedRun& run, std::int64_t handled, std::int64_t next) {
    std::vector<std::int64_t> missed;
    for (std::int64_t step = std::max(handled, run.resumed_from) + 1; step < next; ++step)
      if (!run.due_at(step).empty()) missed.push_back(step);
    if (!missed.empty())
      log::warning("steps {} are not evaluated: training was faster, and their weights are not kept any more", list_of_steps(missed));
  }

  void evaluate_step(const FollowedRun& run, std::int64_t step) {
    const fs::path folder = run.folder / fmt::format("step_{}", step);
    loaded_step_ = step;
    try {
      subject_->load(folder, step);
    } catch (const Error& error) {
      if (holds_weights(folder)) throw;
      log::warning("step {} is left out: the run has removed {} meanwhile ({})", step, folder.string(), error.what());
      return;
    }
    const bool is_done = evaluate(step, run.due_at(step));
    if (is_done && run.removes_evaluated) weights::remove_broadcasts_until(run.folder, step);
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
    if (has_steps()) folder /= fmt::format("step_{}", step);
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

  /// False if one of the environments was not finished.
  bool evaluate(std::int64_t step, const std::vector<std::size_t>& of) {
    const auto limiter = std::make_shared<eval::Limiter>(config_.max_concurrent.value_or(eval::kDefaultConcurrent));
    std::vector<PlannedEval> plans;
    std::vector<fs::path> folders;
    std::vector<EvalFacts> all_facts;
    const auto version = has_steps() ? subject_->policy_version() : checked_policy_version(*subject_);
    for (const std::size_t env_idx : of) {
      folders.push_back(folder_for(env_idx, step));
      all_facts.push_back(facts(env_idx));
      all_facts.back().base_url = subject_->base_url();
      all_facts.back().ckpt_step = step;
      all_facts.back().policy_version = version;
      write_metadata(folders.back(), all_facts.back(), nullptr);
      plans.push_back(plan(env_idx, step, folders.back(), limiter));
    }
    monitor::Metrics metrics;  // one row for all environments
    const auto on_done = [&](std::size_t i, const FinishedEval& done) {
      const std::string prefix = has_steps() ? fmt::format("[step {}] ", step) : "", &name = environments_[of[i]]->name();
      if (!done.result) {
        if (stop_.stop_requested())
          log::warning("{}the evaluation of {} is not finished; continue it with --resume-path {}", prefix, name, folders[i].string());
        else
          log::error("{}the evaluation of {} ended: {}", prefix, name, done.error);
        return;
      }
      write_metadata(folders[i], all_facts[i], &*done.result);
      orchestrator::put_eval_metrics(metrics, *done.result, step);
      metrics["progress/ckpt_step"] = static_cast<double>(step);
      log::success("{}{}", prefix, eval::console_line(*done.result));
      if (done.result->error_mean > 0)
        log::warning("{}{:.1f}% of the rollouts of {} failed and count as reward 0", prefix, done.result->error_mean * 100, name);
      log::info("results in {}", folders[i].string());
    };
    bool are_all_done = true;
    for (const FinishedEval& done : run_together(io_, std::move(plans), stop_, on_done)) {
      if (done.result ? done.result->error_mean >= 1.0 : !stop_.stop_requested()) ++num_failed_;
      are_all_done = are_all_done && done.result;
    }
    // A row says that the step needs no evaluation any more, where a later start looks for one.
    const bool is_left_over = !are_all_done && stop_.stop_requested() && followed_ && followed_->takes_every_step;
    if (!metrics.empty() && !is_left_over) monitor_->log(step, metrics);
    monitor_->sync();
    if (const auto after = stop_.stop_requested() ? version : subject_->policy_version(); version && after && *after != *version)
      log::warning("{} got other weights during the evaluation: policy version {} before, {} after it", subject_->base_url(), *version,
                   *after);
    return are_all_done;
  }

  const config::EvalConfig& config_;
  bool is_server_named_;
  std::stop_token stop_;
  std::vector<std::pair<std::int64_t, fs::path>> checkpoints_;
  std::optional<config::EvalEngineConfig> engine_;
  std::optional<FollowedRun> followed_;
  std::mutex wait_mutex_;
  std::condition_variable_any wait_;  ///< ended early by `stop_` alone
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

config::EvalConfig eval_config_of(const config::EvalsConfig& config) {
  config::EvalConfig out;
  out.env = config.eval.env;
  out.model.name = config.model;
  static_cast<config::ClientConfig&>(out.client) = config.client;
  out.sampling = config.eval.sampling;
  out.num_examples = config.eval.num_examples;
  out.group_size = config.eval.group_size;
  out.eval_base = !config.online || (config.eval.eval_base_model && !config.online->resume_step);
  out.output_dir = config.output_dir;
  out.log = config.log;
  return out;
}

namespace {

FollowedRun followed_run(const config::EvalsConfig& config) {
  const config::EvalsOnlineConfig& online = *config.online;
  const bool skips = !online.resume_step || config.eval.skip_eval_on_resume;
  FollowedRun followed{.folder = *online.broadcasts_dir,
                       .first_step = online.resume_step.value_or(0) + (skips ? 1 : 0),
                       .resumed_from = online.resume_step.value_or(0),
                       .last_step = online.max_steps,
                       .timeout = to_ms(online.timeout),
                       .intervals = {},
                       .takes_every_step = online.every_step,
                       .removes_evaluated = online.remove_evaluated};
  if (!fs::is_directory(fs::absolute(followed.folder).parent_path()))
    fail(ErrorCode::kNotFound, "online.broadcasts_dir: {} is in no folder that exists", followed.folder.string());
  for (const config::EvalEnvConfig& entry : config.eval.env) followed.intervals.push_back(entry.interval.value_or(config.eval.interval));
  return followed;
}

}  // namespace

int run_evals_role(const config::EvalsConfig& config, bool is_server_named, std::stop_token stop) {
  net::raise_fd_limit(65536);
  config::EvalConfig of_eval = eval_config_of(config);
  Extras extras{.engine = config.inference, .metrics_file = config.file_monitor.path};
  if (config.online) extras.followed = followed_run(config);
  if (config.online && config.online->every_step) {
    const auto last_row = monitor::last_row_of(config.output_dir / config.file_monitor.path, kEvalRows);
    std::int64_t& first_step = extras.followed->first_step;
    // Where weights are removed once they are evaluated, those from before a resume were left.
    first_step = std::max(config.online->remove_evaluated ? 1 : first_step, last_row.value_or(0) + 1);
    of_eval.eval_base = of_eval.eval_base && !last_row;
  }
  return Evaluation(of_eval, is_server_named, std::move(stop), std::move(extras)).run();
}

}  // namespace prl::launch
