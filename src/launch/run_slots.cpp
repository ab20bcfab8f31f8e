#include "launch/run_slots.hpp"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "config/bind.hpp"
#include "config/text_format.hpp"
#include "launch/log_folder.hpp"
#include "launch/metric_services.hpp"
#include "launch/model_setup.hpp"
#include "launch/output_folder.hpp"
#include "launch/ranks.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_folders.hpp"
#include "launch/trackers.hpp"
#include "launch/trainer_role.hpp"
#include "launch/transports.hpp"
#include "orchestrator/progress.hpp"
#include "trainer/metrics.hpp"
#include "trainer/run_set.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kScanPeriod{500};
/// Removing a folder takes its time.
constexpr int kSettleScans = 20;
/// Between two looks for samples when no run has any.
constexpr std::chrono::milliseconds kPoll{20};

constexpr const char* kEnded = "ended";
constexpr const char* kStopped = "stopped";  ///< with the trainer: it goes on when that is started again

/// What became of a folder that is in no slot.
struct Outcome {
  RunStamp stamp;  ///< of the folder and configuration that it is about
  std::string state;
  std::string detail;
};

/// A run in a slot.
struct Active {
  RunFolder folder;
  std::string adapter;
  std::string trained_as;  ///< the configuration as text
  config::RolloutTransport rollout_transport;
  double own_weight = 1;
  RunState state = RunState::kRun;
  RunFolder::Written written = {};  ///< since the folder was last seen
  std::unique_ptr<Trackers> trackers = nullptr;
};

/// What decides how a run is trained; where it goes on from is no part of it.
std::string text_of(config::TrainerConfig own) {
  if (own.ckpt) own.ckpt->resume_step.reset();
  return config::to_compact_json(config::dump(config::ops_of<config::TrainerConfig>(), &own, config::NullStyle::kIfNotDefault));
}

/// A run that has failed or was taken away.
struct Departed {
  RunFolder run;
  RunFolder::Written written;
  std::string why;
  int num_scans = 0;  ///< since
};

/// What all runs of this rank share.
struct SharedParts {
  SharedParts(const RankEnv& given, const config::TrainerConfig& config)
      : env(given),
        compute(rank_compute(env, config.compute)),
        runtime(make_runtime(compute)),
        base(trainer::load_base_model(runtime, policy_options(config, runtime))),
        flops(measured_peak_flops(compute, base.weights->compute) * env.size),
        mesh(make_mesh(env, runtime, std::chrono::seconds(config.dist_timeout_seconds))) {}

  /// This rank's part of a run: what trains. Rank 0 adds where samples come from and weights go to.
  trainer::SharedRun make(std::string name, config::TrainerConfig own) {
    own.compute = compute;
    trainer::GradientStepOptions step = step_options(own, runtime);
    step.num_ranks = env.size;
    step.mesh = &mesh;
    trainer::PolicyOptions options = policy_options(own, runtime);
    share_masters(options, env, step, own.model);
    options.gathers_layers = false;  // what adapters of several runs are trained on is whole at each rank
    trainer::SharedRun run;
    run.name = std::move(name);
    run.policy = std::make_unique<trainer::Policy>(base, std::move(options));
    run.options = rl_run_options(own, std::move(step), flops);
    if (run.options.checkpoint) run.options.checkpoint->may_write = env.is_first();
    run.monitor = env.is_first() ? make_monitor(trainer::trainer_metrics(), kTrainerRows, own.output_dir, own.file_monitor)
                                 : std::make_unique<monitor::Monitor>(trainer::trainer_metrics(), kTrainerRows);
    return run;
  }

  const RankEnv env;
  const config::ComputeConfig compute;
  const std::shared_ptr<DeviceRuntime> runtime;
  const trainer::BaseModel base;
  const double flops;
  comm::Mesh mesh;
};

/// A run for the ranks that follow: its name and its configuration, which names the folder.
std::string describe(const std::string& name, const config::TrainerConfig& own) {
  return name + " " + config::to_compact_json(config::dump(config::ops_of<config::TrainerConfig>(), &own, config::NullStyle::kAlways));
}

trainer::SharedRun make_described(SharedParts& parts, std::string_view description) {
  const std::size_t end = description.find(' ');
  PRL_CHECK(end != std::string_view::npos, "a run without a configuration");
  const std::string name(description.substr(0, end));
  config::TrainerConfig own;
  config::Report report;
  config::bind(config::parse_json(description.substr(end + 1), name), config::ops_of<config::TrainerConfig>(), &own, report);
  if (!report.problems.empty()) throw config::ConfigError("trainer", report.problems);
  return parts.make(name, std::move(own));
}

class RunSlots {
 public:
  RunSlots(const config::TrainerConfig& config, SharedParts& parts)
      : config_(config),
        parts_(parts),
        set_(config.max_concurrent_runs, &parts.mesh.world()),
        adapters_(make_adapter_server(config.weight_broadcast)),
        services_(config.heartbeat, config.metrics_server) {}

  void serve(std::stop_token stop) {
    recall_outcomes();
    log::info("serving up to {} runs at once of the folders {}/{}*", config_.max_concurrent_runs, config_.output_dir.string(), kRunPrefix);
    std::mutex mutex;
    std::condition_variable_any wake;
    Clock::time_point next_scan{};
    while (!stop.stop_requested() && !set_.is_stop_wanted()) {
      if (Clock::now() >= next_scan) {
        scan();
        next_scan = Clock::now() + kScanPeriod;
      }
      if (const auto stepped = set_.step()) {
        if (stepped->end) note_end(stepped->name, *stepped->end);
        continue;
      }
      std::unique_lock lock(mutex);
      wake.wait_for(lock, stop, kPoll, [] { return false; });
    }
    for (const trainer::RunView& run : set_.views()) note_end(run.name, set_.end(run.name), kStopped);
    set_.dismiss();
    write_report();
    retiring_.clear();
  }

 private:
  /// Runs that had ended when the trainer was stopped are not begun again, unless somebody has begun them anew.
  void recall_outcomes() {
    for (const RunReport& run : read_runs_file(config_.output_dir))
      if (!run.stamp.empty())
        for (const RunFolder& found : find_run_folders(config_.output_dir))
          if (found.name == run.name && run.state == kEnded && to_string(found.stamp) == run.stamp)
            outcomes_[run.name] = {found.stamp, run.state, run.detail};
  }

  /// What changed in the folders since the last look.
  void scan() {
    settle_departed();
    const std::vector<RunFolder> found = find_run_folders(config_.output_dir);
    std::erase_if(outcomes_, [&](const auto& one) {
      return std::ranges::none_of(found, [&](const RunFolder& run) { return run.name == one.first && run.stamp == one.second.stamp; });
    });
    std::erase_if(told_to_wait_, [&](const std::string& name) { return std::ranges::find(found, name, &RunFolder::name) == found.end(); });
    std::erase_if(arrivals_, [&](const auto& one) { return std::ranges::find(found, one.first, &RunFolder::name) == found.end(); });
    std::vector<const RunFolder*> waiting;
    for (const RunFolder& run : found) {
      arrivals_.try_emplace(run.name, ++num_arrivals_);
      if (active_.contains(run.name))
        look_after(run);
      else if (!outcomes_.contains(run.name))
        waiting.push_back(&run);
    }
    // Whoever came first is admitted first.
    std::ranges::sort(waiting, {}, [&](const RunFolder* run) { return arrivals_.at(run->name); });
    for (const RunFolder* run : waiting) try_admit(*run);
    write_report();
  }

  /// Of a run in a slot: what its control file asks for, and whether it was begun anew.
  void look_after(const RunFolder& found) {
    Active& active = active_.at(found.name);
    if (found.stamp.folder != active.folder.stamp.folder) return;  // the set sees that its folder is gone
    active.written.first_step = set_.view_of(found.name).step;
    active.written.since = fs::file_time_type::clock::now();
    if (found.stamp != active.folder.stamp && !is_taken_over(found, active)) {
      log::info("{} has another configuration: it goes on from its newest checkpoint with it", found.name);
      set_.end(found.name, /*saves=*/false);
      retire(found.name, false);
      return;  // admitted by a later scan
    }
    RunControlFile control;
    try {
      control = read_control(found.folder);
    } catch (const Error& error) {
      if (warned_.insert(found.name).second) log::warning("{}", error.what());
      return;
    }
    warned_.erase(found.name);
    obey(found.name, control);
    if (control.state == RunState::kStop) note_end(found.name, set_.end(found.name));
  }

  /// What a person asks of a run in a slot, short of ending it.
  void obey(const std::string& name, const RunControlFile& control) {
    Active& active = active_.at(name);
    set_.set_weight(name, control.weight.value_or(active.own_weight));
    set_.set_paused(name, control.state == RunState::kPause);
    if (control.state != active.state) log::info("{}: {}", name, to_string(control.state));
    active.state = control.state;
  }

  /// Whether the orchestrator has only written down the configuration with which the run was admitted before it was started.
  bool is_taken_over(const RunFolder& found, Active& active) const {
    if (found.config == active.folder.config) return false;  // started anew: both go on from the checkpoint that both have
    try {
      if (text_of(trainer_config_of(config_, found, read_run_config(found))) != active.trained_as) return false;
    } catch (const Error&) {
      return false;  // admission says what is wrong
    }
    active.folder.config = found.config;
    active.folder.stamp = found.stamp;
    return true;
  }

  /// Frees the place of a run. Its trackers may need a minute for what they have not handed over yet, and no other run waits for that.
  void retire(const std::string& name, bool has_failed) {
    const auto it = active_.find(name);
    if (it->second.trackers != nullptr)
      retiring_[name] = std::async(std::launch::async, [trackers = std::move(it->second.trackers), has_failed] {
        log::set_thread_role("");
        trackers->finish(has_failed);
      });
    active_.erase(it);
  }

  /// Of a run that is begun anew the former trackers end first: both would write to the same places.
  bool is_retiring(const std::string& name) {
    const auto it = retiring_.find(name);
    if (it == retiring_.end()) return false;
    if (it->second.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return true;
    retiring_.erase(it);
    return false;
  }

  void try_admit(const RunFolder& run) {
    if (is_retiring(run.name)) return;
    try {
      const RunControlFile control = read_control(run.folder);
      if (control.state == RunState::kDrain || control.state == RunState::kStop) return;
      const config::OrchestratorConfig orchestrator = read_run_config(run);
      const config::TrainerConfig own = trainer_config_of(config_, run, orchestrator);
      check_adapter_name(run, *orchestrator.student.model.lora->name);
      check_ports(run, own.rollout_transport);
      std::error_code ignored;
      fs::remove(run.error_file(), ignored);
      if (!set_.has_room()) {
        if (told_to_wait_.insert(run.name).second)
          log::info("{} waits: all {} slots (max_concurrent_runs) are taken", run.name, config_.max_concurrent_runs);
        return;
      }
      admit(run, orchestrator, own, control);
    } catch (const comm::PeerLost&) {
      throw;
    } catch (const Error& error) {
      refuse(run, error.what());
    } catch (const fs::filesystem_error& error) {
      refuse(run, error.what());
    }
  }

  void check_adapter_name(const RunFolder& run, const std::string& adapter) const {
    for (const auto& [name, active] : active_)
      if (active.adapter == adapter)
        fail(ErrorCode::kInvalidArgument, "student.model.lora.name: \"{}\" is the name of the adapter of {} already; {} needs another",
             adapter, name, run.name);
  }

  void check_ports(const RunFolder& run, const config::RolloutTransport& transport) const {
    for (const auto& [name, active] : active_)
      if (share_ports(active.rollout_transport, transport))
        fail(ErrorCode::kInvalidArgument,
             "rollout_transport.port: {} and the next one are those of {} already; {} needs two others on that machine",
             std::get<config::ZmqRollouts>(transport).port, name, run.name);
  }

  void admit(const RunFolder& run, const config::OrchestratorConfig& orchestrator, const config::TrainerConfig& own,
             const RunControlFile& control) {
    log::add_role_file(run.name, log_file(run.folder, "trainer.log"));
    drop_later(run, own);
    trainer::SharedRun shared = parts_.make(run.name, own);
    shared.weight = control.weight.value_or(orchestrator.run ? orchestrator.run->weight : 1.0);
    shared.channel =
        make_run_channel(own, *orchestrator.student.model.lora->name, BroadcastRetention(shared.options.checkpoint), adapters_);
    shared.make_receiver = [transport = own.rollout_transport, folder = own.output_dir](std::int64_t first_step) {
      return make_sample_receiver(transport, folder, first_step);
    };
    shared.is_there = [run] { return run.is_there(); };
    services_.follow(*shared.monitor, run.name);
    const std::int64_t slot = set_.add(std::move(shared), describe(run.name, own));
    active_[run.name] = {.folder = run,
                         .adapter = *orchestrator.student.model.lora->name,
                         .trained_as = text_of(own),
                         .rollout_transport = own.rollout_transport,
                         .own_weight = orchestrator.run ? orchestrator.run->weight : 1.0,
                         .trackers = std::make_unique<Trackers>(tracker_plan(own))};
    told_to_wait_.erase(run.name);
    obey(run.name, control);  // one that is admitted while it is paused takes no step before the next scan
    const std::int64_t step = set_.view_of(run.name).step;
    active_.at(run.name).written = {.first_step = step, .last_step = step, .since = fs::file_time_type::clock::now(), .until = {}};
    log::success("{} is in slot {}, adapter '{}' of rank {}{}", run.name, slot, *orchestrator.student.model.lora->name,
                 own.model.lora->rank, step > 0 ? fmt::format(", after step {}", step) : std::string());
  }

  /// What a trainer that was killed had written after the checkpoint that the run goes on from.
  static void drop_later(const RunFolder& run, const config::TrainerConfig& own) {
    OutputFolder folder(run.folder, own.ckpt && own.ckpt->output_dir ? *own.ckpt->output_dir : fs::path(), own.file_monitor.path);
    folder.claim("rl");
    const std::string units[] = {"trainer", orchestrator::kCheckpointUnit};
    const std::string roles[] = {kTrainerRows};
    std::optional<std::int64_t> step;
    if (const auto resume = resume_options(own.ckpt)) {
      trainer::ResumeOptions whole = *resume;
      whole.units.assign(std::begin(units), std::end(units));
      step = trainer::find_resume_step(folder.checkpoints(), whole);
    }
    const OutputFolder::Dropped dropped = folder.drop_own_after(step.value_or(0), units, roles);
    if (const std::string what = dropped.describe(); !what.empty())
      log::info("{} goes on after step {}: dropped what came later: {}", run.name, step.value_or(0), what);
  }

  /// Of runs that have left: a folder that is being removed goes with what was written to it meanwhile; one that stays gets the reason.
  void settle_departed() {
    std::erase_if(departed_, [](Departed& departed) {
      if (!departed.run.is_there()) {
        departed.run.remove_leftovers(departed.written);
      } else if (departed.num_scans == 1 && !departed.why.empty()) {
        write_error(departed.run, departed.why);
        departed.written.until = fs::file_time_type::clock::now();
      }
      return ++departed.num_scans > kSettleScans;
    });
  }

  void refuse(const RunFolder& run, const std::string& why) {
    if (!run.is_there()) return;
    outcomes_[run.name] = {run.stamp, "refused", why};
    log::error("{} is not served: {}", run.name, why);
    write_error(run, why);
  }

  static void write_error(const RunFolder& run, const std::string& why) {
    try {
      write_file_atomic(run.error_file(), why + "\n");
    } catch (const Error& error) {
      log::warning("{}", error.what());
    }
  }

  void note_end(const std::string& name, const trainer::RunEnd& end, const char* state = kEnded) {
    const auto it = active_.find(name);
    PRL_CHECK(it != active_.end(), "run '{}' has ended and was in no slot", name);
    const RunFolder folder = it->second.folder;
    RunFolder::Written written = it->second.written;
    written.last_step = end.result.last_step + 1;  // the step in hand may have written before it failed
    written.until = fs::file_time_type::clock::now();
    retire(name, end.error.has_value() || end.is_gone);
    if (end.is_gone) {
      departed_.push_back({.run = folder, .written = written, .why = {}, .num_scans = 0});
      log::success("{} was taken away after step {}: its slot is free", name, end.result.last_step);
      return;
    }
    const std::string saved = end.result.last_checkpoint ? fmt::format(", step {} is saved", *end.result.last_checkpoint) : std::string();
    if (end.error) {
      log::error("{} has failed after step {}{}: {}", name, end.result.last_step, saved, end.error->what());
      departed_.push_back({.run = folder, .written = written, .why = end.error->what(), .num_scans = 0});
      outcomes_[name] = {folder.stamp, "failed", end.error->what()};
      return;
    }
    log::success("{} has {} after step {}{}: its slot is free", name, state, end.result.last_step, saved);
    outcomes_[name] = {folder.stamp, state, fmt::format("after step {}{}", end.result.last_step, saved)};
  }

  /// A file that cannot be written costs a list, never a run.
  void write_report() {
    json::array runs;
    for (const trainer::RunView& run : set_.views())
      runs.push_back(json::object{{"name", run.name},
                                  {"state", run.is_paused ? "paused" : "training"},
                                  {"slot", run.slot},
                                  {"step", run.step},
                                  {"tokens", run.total_tokens},
                                  {"weight", run.weight},
                                  {"adapter", active_.at(run.name).adapter}});
    for (const auto& [name, outcome] : outcomes_)
      runs.push_back(
          json::object{{"name", name}, {"state", outcome.state}, {"detail", outcome.detail}, {"stamp", to_string(outcome.stamp)}});
    for (const std::string& name : told_to_wait_) runs.push_back(json::object{{"name", name}, {"state", "waiting"}});
    std::string text =
        json::serialize(json::object{{"max_concurrent_runs", config_.max_concurrent_runs}, {"runs", std::move(runs)}}) + "\n";
    if (text == report_) return;
    try {
      write_file_atomic(config_.output_dir / kRunsFile, text);
      report_ = std::move(text);
    } catch (const Error& error) {
      log::warning("{}", error.what());
    }
  }

  const config::TrainerConfig& config_;
  SharedParts& parts_;
  trainer::RunSet set_;
  const std::shared_ptr<weights::WeightServer> adapters_;  ///< nullptr: engines read files
  const StepServices services_;
  std::map<std::string, Active> active_;
  std::map<std::string, std::future<void>> retiring_;  ///< of runs that have left: their trackers, until these have everything
  std::map<std::string, Outcome> outcomes_;
  std::vector<Departed> departed_;
  std::map<std::string, std::int64_t> arrivals_;  ///< of folders that are there, in the order they were seen
  std::int64_t num_arrivals_ = 0;
  std::set<std::string> told_to_wait_, warned_;
  std::string report_;
};

}  // namespace

int run_trainer_of_runs(const config::TrainerConfig& config, std::stop_token stop) {
  RankEnv env = rank_env();
  if (!env.joins_as.empty())
    fail(ErrorCode::kNotImplemented, "[PRL_JOIN] ranks that train several runs let no rank in: start all of them again");
  use_replicas(env, config.model.dp_replicate);
  check_ranks_per_row(env, config.model.cp);
  fs::create_directories(config.output_dir);
  std::optional<StopWhileMeeting> watch;
  if (env.size > 1) watch.emplace(stop);
  SharedParts parts(env, config);
  watch.reset();
  if (env.is_first()) {
    RunSlots(config, parts).serve(std::move(stop));
    return 0;
  }
  trainer::RunSet set(config.max_concurrent_runs, &parts.mesh.world());
  while (set.follow([&](std::string_view description) { return make_described(parts, description); }, stop.stop_requested())) {
  }
  return 0;
}

}  // namespace prl::launch
