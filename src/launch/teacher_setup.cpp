#include "launch/teacher_setup.hpp"

#include <utility>
#include <vector>

#include "base/log.hpp"
#include "env/chat_pool.hpp"
#include "env/openai_chat_client.hpp"
#include "env/prompt_scorer.hpp"
#include "env/rendered_chat_client.hpp"
#include "launch/http_options.hpp"

namespace prl::launch {
namespace {

/// More attempts of one request than a client makes by itself: a rollout that is lost for a busy teacher was played in vain.
constexpr int kRequestRetries = 5;

std::shared_ptr<env::ChatClientFactory> teacher_chat(const config::ModelEndpointConfig& teacher,
                                                     const std::shared_ptr<net::HttpClient>& client) {
  std::vector<std::shared_ptr<env::ChatClientFactory>> services;
  for (const std::string& url : teacher.client.base_url) {
    env::OpenAIChatOptions options;
    options.base_url = url;
    options.model = teacher.model.name;
    options.check_model = !teacher.client.skip_model_check;
    services.push_back(std::make_shared<env::OpenAIChatClientFactory>(client, std::move(options)));
  }
  return env::make_chat_pool(std::move(services));
}

}  // namespace

void add_teacher(orchestrator::OrchestratorServices& services, const config::OrchestratorConfig& config, const PolicyText& policy,
                 net::asio::any_io_executor executor) {
  if (!config.teacher) return;
  const config::ModelEndpointConfig& teacher = *config.teacher;
  net::HttpClient::Options http = http_options(teacher.client);
  http.max_retries = kRequestRetries;
  auto client = std::make_shared<net::HttpClient>(std::move(executor), std::move(http));
  if (config.training_mode == config::TrainingMode::kSft) {
    services.eval_chat = services.chat;
    services.chat = std::make_shared<env::RenderedChatClientFactory>(policy.renderer, teacher_chat(teacher, client));
    log::info("training_mode sft: {} at {} writes the rollouts", teacher.model.name, services.chat->describe());
    return;
  }
  services.teacher = env::make_http_prompt_scorer(client, {.base_urls = teacher.client.base_url,
                                                           .model = teacher.model.name,
                                                           .check_model = !teacher.client.skip_model_check,
                                                           .tokenizer = policy.tokenizer});
  log::info("training_mode {}: {} at {} scores the rollouts", config::enum_name(config.training_mode), teacher.model.name,
            services.teacher->describe());
}

}  // namespace prl::launch
