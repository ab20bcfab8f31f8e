#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/orchestrator_config.hpp"
#include "env/generate_client.hpp"
#include "launch/model_setup.hpp"
#include "net/asio.hpp"
#include "orchestrator/orchestrator.hpp"

namespace prl::launch {

/// What the Python workers of all environments of an orchestrator are forked from; null: those of each environment from something of its
/// own.
using SharedTemplates = std::shared_ptr<env::python::WorkerTemplates>;
/// Options of the orchestrator; `vocab_size` is the policy tokenizer's, for the filters.
orchestrator::OrchestratorOptions orchestrator_options(const config::OrchestratorConfig& config, std::int64_t vocab_size,
                                                       std::int64_t resume_step, const SharedTemplates& templates = nullptr);
/// Environments that `config` names, with their sampling.
std::vector<orchestrator::TrainEnv> train_environments(const config::OrchestratorConfig& config,
                                                       const SharedTemplates& templates = nullptr);
/// How the policy reads and writes text, and where its tokenizer is.
TextOptions policy_text_options(const config::OrchestratorConfig& config);
std::string policy_text_name(const config::OrchestratorConfig& config);
/// Error{kInvalidArgument} if there is no chat template.
TextSetup load_policy_text(const config::OrchestratorConfig& config);

/// What differs between an orchestrator beside the other roles and one in a process of its own.
struct OrchestratorTransports {
  std::shared_ptr<env::GenerateClient> generate;  ///< to the policy
  std::shared_ptr<rollouts::SampleSender> samples;
  std::shared_ptr<orchestrator::PolicySource> policy;
  std::shared_ptr<orchestrator::PressureSource> pressure;  ///< null where nothing is known of the engine's load
  std::shared_ptr<orchestrator::PressureSource> load;      ///< the same for metrics
  std::optional<net::asio::any_io_executor> io;            ///< of requests to a teacher; needed if there is one
  SharedTemplates templates = nullptr;
};
/// Environments, clients and transports of an orchestrator; `monitor` is borrowed.
orchestrator::OrchestratorServices orchestrator_services(const config::OrchestratorConfig& config, const TextSetup& text,
                                                         OrchestratorTransports transports, monitor::Monitor* monitor);

/// <folder>/checkpoints of a run, where both roles save their parts.
std::filesystem::path checkpoints_folder(const config::OrchestratorConfig& config);
/// The step to resume from, found in the checkpoints of both roles; 0 for a fresh start.
std::int64_t orchestrator_resume_step(const config::OrchestratorConfig& config);

}  // namespace prl::launch
