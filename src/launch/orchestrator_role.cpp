#include "launch/orchestrator_role.hpp"

#include <cstdlib>

#include "base/log.hpp"
#include "env/generate_pool.hpp"
#include "env/http_generate_client.hpp"
#include "launch/http_options.hpp"
#include "launch/metric_services.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/policy_sources.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_identity.hpp"
#include "launch/trainer_role.hpp"
#include "launch/transports.hpp"
#include "net/io_runtime.hpp"
#include "orchestrator/metrics.hpp"

namespace prl::launch {
int run_orchestrator_role(const config::OrchestratorConfig& config, std::stop_token stop) {
  const TextSetup text = load_policy_text(config);
  const std::int64_t resume_step = orchestrator_resume_step(config);

  net::raise_fd_limit(65536);
  net::IoRuntime io(1, "orchestrator");
  const char* key = std::getenv(config.student.client.api_key_var.c_str());
  auto client = std::make_shared<net::HttpClient>(io.executor(), http_options(config.student.client));

  std::vector<std::string> roots;
  for (const std::string& url : config.student.client.base_url) roots.push_back(server_root(url));
  const std::vector<std::string> admin = admin_roots(config.student.client);
  std::vector<std::shared_ptr<env::GenerateClient>> servers;
  for (const std::string& root : roots)
    servers.push_back(env::make_http_generate_client(client, {.base_url = root, .model = config.student.model.name}));
  const char* admin_key = std::getenv("PRL_ADMIN_API_KEY");

  OrchestratorTransports transports;
  transports.generate = env::make_generate_pool(std::move(servers));
  transports.samples = make_sample_sender(config.rollout_transport, config.output_dir, config.num_train_workers, resume_step + 1);
  auto channel = make_weight_channel(config.weight_broadcast, config.output_dir, std::nullopt);
  transports.policy = std::make_shared<HttpPolicySource>(std::move(channel), client,
                                                         HttpPolicySource::Options{.admin_urls = admin,
                                                                                   .api_key = admin_key ? admin_key
                                                                                              : key     ? key
                                                                                                        : "",
                                                                                   .verify_identity = !run_servers().empty(),
                                                                                   .proof_file = config.output_dir / kProofFile});
  transports.io = io.executor();
  monitor::MetricSet declared;
  declared.declare(orchestrator::metric_infos());
  auto monitor = make_monitor(std::move(declared), kOrchestratorRows, config.output_dir, config.file_monitor, config.bench.has_value());
  add_heartbeat(*monitor, config.heartbeat);
  orchestrator::Orchestrator role(orchestrator_options(config, text.tokenizer->vocab_size(), resume_step),
                                  orchestrator_services(config, text, std::move(transports), monitor.get()));
  const orchestrator::OrchestratorReport report = role.run(stop);
  log::info("orchestrator {} after step {}: {} episodes, largest staleness {}", report.was_stopped ? "stopped" : "finished",
            report.progress.step, report.episodes.num_started, report.max_staleness);
  return 0;
}

}  // namespace prl::launch
