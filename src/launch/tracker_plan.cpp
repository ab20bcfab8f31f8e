#include <boost/json/array.hpp>

#include "launch/run_folder.hpp"
#include "launch/trackers.hpp"

namespace prl::launch {
namespace json = boost::json;
namespace {

void put(json::object& out, const char* key, const std::optional<std::string>& value) {
  if (value) out[key] = *value;
}

json::object extras_of(const std::optional<config::LogExtrasConfig>& extras) {
  json::object out;
  if (!extras) return {{"samples", false}, {"distributions", false}};
  out["samples"] = extras->samples;
  out["distributions"] = extras->distributions;
  out["interval"] = extras->interval;
  if (extras->sample_ratio) out["sample_ratio"] = *extras->sample_ratio;
  return out;
}

json::object wandb_of(const config::WandbConfig& wandb) {
  json::object out{{"project", wandb.project}, {"offline", wandb.offline}};
  put(out, "entity", wandb.entity);
  put(out, "name", wandb.name);
  put(out, "group", wandb.group);
  put(out, "id", wandb.id);
  if (wandb.tags) out["tags"] = json::array(wandb.tags->begin(), wandb.tags->end());
  out["log_extras"] = extras_of(wandb.log_extras);
  return out;
}

json::object prime_of(const config::PrimeMonitorConfig& prime) {
  json::object out{{"base_url", prime.base_url}, {"api_key_var", prime.api_key_var}, {"log_extras", extras_of(prime.log_extras)}};
  put(out, "run_name", prime.run_name);
  return out;
}

class PlanMaker {
 public:
  PlanMaker(const std::filesystem::path& output_dir, const std::filesystem::path& metrics, const char* command) {
    plan_.run_folder = std::filesystem::absolute(output_dir).lexically_normal();
    if (!plan_.run_folder.has_filename()) plan_.run_folder = plan_.run_folder.parent_path();
    plan_.settings = {{"run_folder", plan_.run_folder.string()},
                      {"name", plan_.run_folder.filename().string()},
                      {"metrics", metrics.string()},
                      {"state", "trackers"},
                      {"config", std::string("configs/") + command + ".json"}};
  }
  void add(const char* kind, json::object settings) {
    plan_.kinds.emplace_back(kind);
    plan_.settings[kind] = std::move(settings);
  }
  void wandb(const std::optional<config::WandbConfig>& wandb) {
    if (wandb) add("wandb", wandb_of(*wandb));
  }
  void prime(const std::optional<config::PrimeMonitorConfig>& prime) {
    if (prime) add("prime", prime_of(*prime));
  }
  template <typename Config>
  void local(const Config& config) {
    if (config.tensorboard) add("tensorboard", {{"path", config.tensorboard->path.string()}});
    if (config.mlflow) {
      json::object mlflow{{"experiment", config.mlflow->experiment}};
      put(mlflow, "tracking_uri", config.mlflow->tracking_uri);
      put(mlflow, "name", config.mlflow->name);
      add("mlflow", std::move(mlflow));
    }
    if (config.trackio) {
      json::object trackio{{"project", config.trackio->project}};
      put(trackio, "name", config.trackio->name);
      put(trackio, "space_id", config.trackio->space_id);
      add("trackio", std::move(trackio));
    }
  }
  /// Rows of this role alone. Another role that has started by itself with the same folder keeps its own runs of trackers.
  void only(const char* role) {
    plan_.settings["role"] = role;
    plan_.settings["state"] = std::string("trackers/") + role;
  }
  TrackerPlan take() { return std::move(plan_); }

 private:
  TrackerPlan plan_;
};

}  // namespace

TrackerPlan tracker_plan(const config::RlConfig& config) {
  PlanMaker maker(config.output_dir, config.trainer.file_monitor.path, "rl");
  // One run for all roles; its tables are of the orchestrator's rollouts.
  maker.wandb(config.orchestrator.wandb ? config.orchestrator.wandb : config.trainer.wandb);
  maker.local(config);
  maker.prime(config.orchestrator.prime_monitor);
  return maker.take();
}

TrackerPlan tracker_plan(const config::SftConfig& config) {
  PlanMaker maker(config.output_dir, config.file_monitor.path, "sft");
  maker.wandb(config.wandb);
  maker.local(config);
  return maker.take();
}

namespace {

/// Two processes share no run: each has its own, named after the role.
std::optional<config::WandbConfig> named_after(std::optional<config::WandbConfig> wandb, const char* role) {
  if (wandb && wandb->name) *wandb->name += std::string("-") + role;
  return wandb;
}

}  // namespace

TrackerPlan tracker_plan(const config::TrainerConfig& config) {
  PlanMaker maker(config.output_dir, config.file_monitor.path, "trainer");
  if (config.max_concurrent_runs > 1) return maker.take();  // each run has its own, of its folder
  maker.only(kTrainerRows);
  maker.wandb(named_after(config.wandb, kTrainerRows));
  return maker.take();
}

TrackerPlan tracker_plan(const config::OrchestratorConfig& config) {
  PlanMaker maker(config.output_dir, config.file_monitor.path, "orchestrator");
  maker.only(kOrchestratorRows);
  maker.wandb(named_after(config.wandb, kOrchestratorRows));
  maker.prime(config.prime_monitor);
  return maker.take();
}

}  // namespace prl::launch
