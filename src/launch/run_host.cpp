#include "launch/run_host.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/role_children.hpp"
#include "launch/run_admin.hpp"
#include "launch/run_folders.hpp"
#include "launch/run_identity.hpp"
#include "launch/single_node.hpp"
#include "launch/supervisor.hpp"
#include "orchestrator/progress.hpp"
#include "trainer/checkpoint.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr std::chrono::milliseconds kLookPeriod{500};

/// Starts the orchestrators of the runs in a folder, each once for each time that somebody wants it.
class Orchestrators {
 public:
  Orchestrators(const config::RlConfig& config, const RoleChildren& roles, Supervisor& supervisor)
      : config_(config), roles_(roles), supervisor_(supervisor) {
    // Those that had ended before are not begun again, unless their configuration is another since. One without orch.toml was started by
    // hand, and is nobody's here.
    for (const RunReport& report : read_runs_file(config.output_dir))
      for (const RunFolder& run : find_run_folders(config.output_dir))
        if (run.name == report.name && report.state == "ended" && report.stamp == to_string(run.stamp) && fs::exists(config_of(run)))
          seen_[run.name] = {.wish = wish_of(run), .is_begun = true};
  }

  void look() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look_) return;
    next_look_ = now + kLookPeriod;
    std::set<std::string> there;
    for (const RunFolder& run : find_run_folders(config_.output_dir)) {
      there.insert(run.name);
      try {
        look_at(run);
      } catch (const std::exception& error) {
        if (warned_.insert(run.name + error.what()).second) log::warning("{}: {}", run.name, error.what());
      }
    }
    // A folder that comes back under the name is another run.
    std::erase_if(seen_, [&](const auto& entry) { return !there.contains(entry.first) && !supervisor_.is_running(entry.first); });
  }

 private:
  /// What somebody asks of a run: a configuration in a folder, and whether it is to go on.
  struct Wish {
    std::array<std::int64_t, 2> folder{};
    fs::file_time_type config{};
    bool goes_on = true;
    bool operator==(const Wish&) const = default;
  };
  struct Seen {
    Wish wish;
    bool is_begun = false;
    bool goes_back = false;  ///< after a kill it goes on from its checkpoint
    int num_restarts = 0;    ///< of such kills
  };

  static fs::path config_of(const RunFolder& run) { return run.folder / "configs/orch.toml"; }
  static Wish wish_of(const RunFolder& run) {
    const RunState state = read_control(run.folder).state;
    return {.folder = run.stamp.folder,
            .config = fs::last_write_time(config_of(run)),
            .goes_on = state == RunState::kRun || state == RunState::kPause};
  }

  void look_at(const RunFolder& run) {
    if (!fs::exists(config_of(run))) return;  // somebody started its orchestrator by hand
    if (supervisor_.is_running(run.name)) return;
    const Wish wish = wish_of(run);
    Seen& seen = seen_[run.name];
    if (seen.wish != wish) seen = {.wish = wish};
    if (!wish.goes_on) return;
    if (seen.is_begun) {
      const int most = std::get<config::SingleNodeDeployment>(*config_.deployment).max_orchestrator_restarts;
      if (!seen.goes_back || !supervisor_.was_killed(run.name) || seen.num_restarts >= most) return;
      ++seen.num_restarts;
    }
    seen.is_begun = true;
    begin(run, seen);
  }

  void begin(const RunFolder& run, Seen& seen) {
    ChildSpec child = roles_.orchestrator_of(run);
    // Which a process of another launch has left.
    orchestrator::drop_recovery(run.folder / orchestrator::kRecoveryFolder);
    const config::OrchestratorConfig config = read_run_config(run);
    const std::string units[] = {trainer::kTrainerUnit, orchestrator::kCheckpointUnit};
    const bool has_checkpoint =
        config.ckpt && !io::list_checkpoints(config.ckpt->output_dir.value_or(run.folder) / "checkpoints", units).empty();
    // What an orchestrator had sent over ZeroMQ is gone with it, and the trainer may need it again: both go back to the checkpoint.
    seen.goes_back = std::holds_alternative<config::ZmqRollouts>(config.rollout_transport);
    if (seen.goes_back) {
      child.max_restarts = 0;
      child.env.erase(kRecoveryVariable);
    }
    if (has_checkpoint && !config.ckpt->resume_step) child.argv.insert(child.argv.end(), {"--ckpt.resume-step", "-1"});
    log::info("{} {}", run.name, has_checkpoint ? "goes on from its last checkpoint" : "begins");
    supervisor_.start(std::move(child));
  }

  const config::RlConfig& config_;
  const RoleChildren& roles_;
  Supervisor& supervisor_;
  std::chrono::steady_clock::time_point next_look_{};
  std::map<std::string, Seen> seen_;
  std::set<std::string> warned_;
};

/// The configurations that the launch names; those whose folders are there are runs that go on.
void add_runs(const config::RlConfig& config) {
  for (const fs::path& file : config.runs) {
    const std::string name = file.stem().string();
    if (fs::exists(config.output_dir / (kRunPrefix + name))) continue;
    config::RunsToolConfig add;
    add.action = config::RunsAction::kAdd;
    add.run = name;
    add.config = file;
    add.output_dir = config.output_dir;
    (void)run_admin(add);
  }
}

ChildSpec trainer_of(const config::RlConfig& config, const RoleChildren& roles) {
  ChildSpec child = roles.trainer();
  const auto& node = std::get<config::SingleNodeDeployment>(*config.deployment);
  // Each run goes on from its checkpoint, and orchestrators wait meanwhile: unlike a run of its own, nothing else needs to begin again.
  child.max_restarts = node.max_engine_restarts;
  child.restarts_after_signals_only = true;
  child.ready_mark = "serving up to ";
  return child;
}

}  // namespace

int host_runs(const config::RlConfig& config, std::stop_token stop) {
  require_free_ports(config);
  std::map<std::string, std::string> variables = identity_env(new_run_identity(), own_servers(config));
  const RoleChildren roles(config, std::move(variables));
  model_folder(config.trainer.model.name);
  add_runs(config);
  Supervisor supervisor;
  Orchestrators orchestrators(config, roles, supervisor);
  start_engines(config, roles, supervisor);
  const std::unique_ptr<comm::StoreServer> store = start_trainer(config, trainer_of(config, roles), supervisor);
  supervisor.set_on_look([&] { orchestrators.look(); });
  log::info("runs are the folders {}/{}*; add one with: prl runs add NAME --config FILE --output-dir {}", config.output_dir.string(),
            kRunPrefix, config.output_dir.string());
  const auto failure = supervisor.run(stop);
  if (failure) log::error("rl: {}{}", *failure, stop.stop_requested() ? "" : ". Ending the other roles");
  supervisor.terminate_all(std::chrono::seconds(20));
  if (!failure)
    log::success("rl stopped; runs with checkpoints go on when it is started again; logs in {}", log_folder(config.output_dir).string());
  return failure ? 1 : 0;
}

}  // namespace prl::launch
