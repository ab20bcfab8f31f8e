#include "launch/orchestrator_role.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "base/log.hpp"
#include "env/python/worker_templates.hpp"
#include "launch/bench_transports.hpp"
#include "launch/fleet_pressure.hpp"
#include "launch/http_options.hpp"
#include "launch/metric_services.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/policy_sources.hpp"
#include "launch/role_children.hpp"
#include "launch/routing.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_folders.hpp"
#include "launch/run_identity.hpp"
#include "launch/supervisor.hpp"
#include "launch/trainer_role.hpp"
#include "launch/transports.hpp"
#include "monitor/metrics_file.hpp"
#include "net/io_runtime.hpp"
#include "net/service.hpp"
#include "orchestrator/metrics.hpp"
#include "router/fleet.hpp"
#include "router/routed_generate_client.hpp"
#include "router/weight_updater.hpp"
#include "weights/collective_channel.hpp"

namespace prl::launch {
namespace {

/// Gives the servers that this run has claimed to other runs, however it ends.
class ServersReleased {
 public:
  ServersReleased(net::IoRuntime& io, std::shared_ptr<router::WeightUpdater> updater) : io_(&io), updater_(std::move(updater)) {}
  ServersReleased(const ServersReleased&) = delete;
  ServersReleased& operator=(const ServersReleased&) = delete;
  ~ServersReleased() {
    constexpr std::chrono::seconds kLimit{3};
    try {
      auto releasing = updater_->release(net::Clock::now() + kLimit);
      io_->run_blocking(std::move(releasing), kLimit + std::chrono::seconds(2), "the engines to be released");
    } catch (const std::exception& error) {
      log::debug("{}", error.what());
    }
  }

 private:
  net::IoRuntime* io_;
  std::shared_ptr<router::WeightUpdater> updater_;
};

/// What the launcher says of a restart, and what a process before this one has left.
std::optional<orchestrator::OrchestratorOptions::Recovery> find_recovery(const config::OrchestratorConfig& config,
                                                                         std::int64_t& resume_step) {
  const char* folder = std::getenv(kRecoveryVariable);
  if (folder == nullptr) return std::nullopt;
  orchestrator::OrchestratorOptions::Recovery recovery;
  recovery.folder = folder;
  if (const char* restarts = std::getenv(kRestartsVariable)) recovery.num_restarts = std::atoll(restarts);
  recovery.is_recovered = recovery.num_restarts > 0;
  if (!recovery.is_recovered) return recovery;
  const std::optional<std::int64_t> step = orchestrator::newest_recovery(recovery.folder);
  recovery.has_state = step.has_value();
  resume_step = step.value_or(resume_step);
  const std::filesystem::path rows = config.output_dir / config.file_monitor.path;
  recovery.recorded_step = monitor::last_row_of(rows, kOrchestratorRows).value_or(-1);
  recovery.evaluated_step = monitor::last_row_of(rows, orchestrator::kOnlineEvalRows).value_or(-1);
  recovery.validated_step = monitor::last_row_of(rows, orchestrator::kValidationRows).value_or(-1);
  log::warning("started again, for the {}. time: goes on {}", recovery.num_restarts,
               step ? fmt::format("with batch {}", *step + 1) : fmt::format("from where the run began, step {}", resume_step));
  return recovery;
}

/// Empty for a policy that is the whole model.
std::string adapter_name(const config::OrchestratorConfig& config) {
  const auto& lora = config.student.model.lora;
  return lora && lora->name ? *lora->name : std::string();
}

/// What the engines hear of the run's share of them; empty of a run that has them to itself.
std::function<std::string()> share_of(const config::OrchestratorConfig& config) {
  const std::string adapter = adapter_name(config);
  if (!config.run || adapter.empty()) return {};
  return [adapter, folder = config.output_dir, own = *config.run] {
    std::optional<double> asked;
    try {
      asked = read_control(folder).weight;
    } catch (const Error& error) {
      log::debug("the share of the run stays: {}", error.what());
    }
    return boost::json::serialize(
        boost::json::object{{"name", adapter}, {"weight", asked.value_or(own.weight)}, {"max_tokens_in_flight", own.max_tokens_in_flight}});
  };
}

/// What the trainer publishes, and the engines that take it.
std::shared_ptr<HttpPolicySource> published_policy(const config::OrchestratorConfig& config, std::shared_ptr<router::Fleet> engines,
                                                   std::shared_ptr<router::WeightUpdater> updater) {
  return std::make_shared<HttpPolicySource>(
      make_weight_channel(config.weight_broadcast, config.output_dir, {}, WeightEnd::kOrchestrator), std::move(engines), std::move(updater),
      HttpPolicySource::Options{
          .proof_file = config.output_dir / kProofFile, .store = weight_store(config.weight_broadcast), .adapter = adapter_name(config)});
}

/// The engines of a run: `all` get requests, `updated` weights, which may be others.
void add_engines(const config::OrchestratorConfig& config, const std::vector<std::string>& admin, router::Fleet& all,
                 router::Fleet& updated) {
  for (const std::string& url : config.student.client.base_url) all.add(url);
  for (const std::string& url : config.prefill.base_url) all.add(url, router::EngineRole::kPrefill);
  if (&updated == &all) return;
  for (const std::string& root : admin) updated.add(root);
  for (const std::string& url : config.prefill.base_url) updated.add(url);
}

}  // namespace

int run_orchestrator_role(const config::OrchestratorConfig& config, std::stop_token outer_stop) {
  std::stop_source stop_source;
  const std::stop_callback forward(std::move(outer_stop), [&] { stop_source.request_stop(); });
  const std::stop_token stop = stop_source.get_token();
  // One run of several: `prl runs` and whoever removes the folder end it.
  std::optional<RunControlWatch> watch;
  if (config.run)
    watch.emplace(config.output_dir, [&](const std::string& reason) {
      log::warning("stopping: {}", reason);
      stop_source.request_stop();
    });
  const TextSetup text = load_policy_text(config);
  std::int64_t resume_step = orchestrator_resume_step(config);
  auto recovery = find_recovery(config, resume_step);

  net::raise_fd_limit(65536);
  net::IoRuntime io(1, "orchestrator");
  const char* key = std::getenv(config.student.client.api_key_var.c_str());
  auto client = std::make_shared<net::HttpClient>(io.executor(), http_options(config.student.client));

  const char* admin_key = std::getenv("PRL_ADMIN_API_KEY");
  // Engines that take weights at another address than requests are looked after apart from them.
  const std::vector<std::string> admin = admin_roots(config.student.client);
  std::vector<std::string> roots;
  for (const std::string& url : config.student.client.base_url) roots.push_back(net::server_root(url));
  auto engines = std::make_shared<router::Fleet>(
      io.executor(), client,
      router::FleetOptions{.router = router_options(config.router), .max_uncached_tokens = config.prefill.non_cached_tokens});
  auto updated = roots == admin ? engines : std::make_shared<router::Fleet>(io.executor(), client);
  auto updater = std::make_shared<router::WeightUpdater>(updated, client,
                                                         router::WeightUpdaterOptions{.api_key = admin_key ? admin_key
                                                                                                 : key     ? key
                                                                                                           : "",
                                                                                      .claim = run_claim(config.output_dir),
                                                                                      .share = share_of(config)});
  const ServersReleased at_the_end(io, updater);
  add_engines(config, admin, *engines, *updated);

  OrchestratorTransports transports;
  const std::string adapter = adapter_name(config);
  transports.generate = router::make_routed_generate_client(engines, client, {.model = config.student.model.name, .adapter = adapter});
  const std::string store = config.bench ? "" : weight_store(config.weight_broadcast);
  if (config.bench) {
    transports.samples = make_dropping_sender(/*num_ranks=*/1);
    transports.policy = make_standing_policy(PolicyVersion{resume_step});
  } else {
    transports.samples = make_sample_sender(config.rollout_transport, config.output_dir, /*num_ranks=*/1, resume_step + 1);
    transports.policy = published_policy(config, updated, updater);
  }
  transports.pressure = make_fleet_pressure(engines, client);
  transports.load = make_fleet_pressure(engines, client);
  transports.io = io.executor();
  transports.templates = std::make_shared<env::python::WorkerTemplates>();
  monitor::MetricSet declared;
  declared.declare(orchestrator::metric_infos());
  auto monitor = make_monitor(std::move(declared), kOrchestratorRows, config.output_dir, config.file_monitor, config.bench.has_value());
  add_heartbeat(*monitor, config.heartbeat);
  const OrchestratorBench bench(*monitor, config.bench);
  orchestrator::OrchestratorOptions options = orchestrator_options(config, text.tokenizer->vocab_size(), resume_step, transports.templates);
  options.recovery = std::move(recovery);
  orchestrator::OrchestratorServices services = orchestrator_services(config, text, std::move(transports), monitor.get());
  services.engine_metrics = [engines](monitor::Metrics& metrics) {
    const router::FleetCounts counts = engines->counts();
    metrics["engines/lost"] = static_cast<double>(counts.num_lost);
    metrics["engines/replayed_requests"] = static_cast<double>(counts.num_replayed);
    const std::vector<router::EngineView> views = engines->engines();
    metrics["engines/ready"] =
        static_cast<double>(std::ranges::count_if(views, [](const router::EngineView& view) { return view.problem.empty(); }));
  };
  orchestrator::Orchestrator role(std::move(options), std::move(services));
  const orchestrator::OrchestratorReport report = role.run(stop);
  if (!store.empty()) weights::release_weights(store);
  if (!report.was_stopped) bench.write();
  log::info("orchestrator {} after step {}: {} episodes, largest staleness {}", report.was_stopped ? "stopped" : "finished",
            report.progress.step, report.episodes.num_started, report.max_staleness);
  const router::FleetCounts counts = engines->counts();
  if (counts.num_lost > 0) log::info("engines were lost {} times, which made {} requests begin anew", counts.num_lost, counts.num_replayed);
  return 0;
}

}  // namespace prl::launch
