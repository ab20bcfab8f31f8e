#pragma once

#include <memory>

#include "config/orchestrator_config.hpp"
#include "env/chat_client.hpp"
#include "net/asio.hpp"
#include "orchestrator/orchestrator.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"

namespace prl::launch {

/// How the policy reads and writes: what a teacher's words or scores are turned into.
struct PolicyText {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::Renderer> renderer;
};

/// Puts the teacher of `config`, if it has one, into the services: under training_mode sft it plays the train rollouts, and the
/// policy (services.chat until then) is left to the evaluations; under opd and rl it scores tokens. `executor` runs the requests.
void add_teacher(orchestrator::OrchestratorServices& services, const config::OrchestratorConfig& config, const PolicyText& policy,
                 net::asio::any_io_executor executor);

}  // namespace prl::launch
