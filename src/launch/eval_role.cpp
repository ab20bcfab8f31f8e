#include "launch/eval_role.hpp"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstdlib>
#include <map>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "env/openai_chat_client.hpp"
#include "env/registry.hpp"
#include "env/token_chat_client.hpp"
#include "eval/eval_runner.hpp"
#include "launch/engine_client.hpp"
#include "launch/engine_host.hpp"
#include "net/io_runtime.hpp"
#include "net/stop.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
using std::chrono::milliseconds;
namespace {

constexpr milliseconds kLongest = std::chrono::hours(24);

milliseconds to_ms(double seconds) { return milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

/// The model under evaluation: how to talk to it, and how to put other weights into it.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual std::shared_ptr<env::ChatClientFactory> chat() = 0;
  virtual void load(const fs::path& folder, std::int64_t step) = 0;
  virtual void reload_base() = 0;
  virtual std::string base_url() const = 0;
};

class LocalSubject final : public Subject {
 public:
  explicit LocalSubject(const config::EvalConfig& config) {
    config::InferenceConfig inference;
    inference.model.name = config.model.name;
    host_ = std::make_unique<EngineHost>(inference, make_runtime(inference.compute), nullptr);
    if (!host_->text().renderer) fail(ErrorCode::kInvalidArgument, "{} has no chat template", config.model.name);
    base_ = host_->engine().weights();
    chat_ =
        std::make_shared<env::TokenChatClientFactory>(host_->text().renderer, make_engine_client(host_->engine(), host_->text().tokenizer));
  }
  ~LocalSubject() override { host_->engine().shutdown(); }
  std::shared_ptr<env::ChatClientFactory> chat() override { return chat_; }
  void load(const fs::path& folder, std::int64_t step) override {
    host_->engine().update_weights(host_->load(folder, PolicyVersion{step}, base_), std::chrono::minutes(10));
  }
  void reload_base() override { host_->engine().update_weights(base_, std::chrono::minutes(10)); }
  std::string base_url() const override { return "in-process"; }

 private:
  std::unique_ptr<EngineHost> host_;
  nn::WeightsPtr base_;
  std::shared_ptr<env::ChatClientFactory> chat_;
};

class ServerSubject final : public Subject {
 public:
  ServerSubject(const config::EvalConfig& config, net::IoRuntime& io) : io_(&io), url_(config.client.base_url.front()) {
    net::HttpClient::Options options;
    options.timeout = to_ms(config.client.timeout);
    if (const char* key = std::getenv(config.client.api_key_var.c_str())) options.bearer = key;
    for (const auto& [name, value] : config.client.headers) options.headers.add(name, value);
    client_ = std::make_shared<net::HttpClient>(io.executor(), options);
    env::OpenAIChatOptions chat;
    chat.base_url = url_;
    chat.model = config.model.name;
    chat.reasoning_field = config.reasoning_field;
    chat.check_model = !config.client.skip_model_check;
    chat_ = std::make_shared<env::OpenAIChatClientFactory>(client_, chat);
    root_ = url_.ends_with("/v1") ? url_.substr(0, url_.size() - 3) : url_;
  }
  std::shared_ptr<env::ChatClientFactory> chat() override { return chat_; }
  void load(const fs::path& folder, std::int64_t) override {
    post("/update_weights", boost::json::object{{"weight_dir", fs::absolute(folder).string()}});
  }
  void reload_base() override {
    try {
      post("/reload_weights", boost::json::object{});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;
      log::warning("{} has no /reload_weights: its present weights count as the base model", root_);
    }
  }
  std::string base_url() const override { return url_; }

 private:
  void post(const std::string& path, boost::json::value body) {
    io_->run_blocking(client_->post_json(root_ + path, std::move(body), std::chrono::minutes(12)), std::chrono::minutes(13), root_ + path);
  }
  net::IoRuntime* io_;
  std::string url_, root_;
  std::shared_ptr<net::HttpClient> client_;
  std::shared_ptr<env::ChatClientFactory> chat_;
};

/// (step, folder) to evaluate after the base model, newest first; every step that is asked for must exist.
std::vector<std::pair<std::int64_t, fs::path>> checkpoints_of(const config::EvalConfig& config) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  if (!config.weights_dir) return found;
  if (!fs::is_directory(*config.weights_dir)) fail(ErrorCode::kNotFound, "weights_dir {} is no folder", config.weights_dir->string());
  for (const auto& entry : fs::directory_iterator(*config.weights_dir))
    if (const std::int64_t step = parse_step_dir(entry.path().filename().string()); step >= 0) found.emplace_back(step, entry.path());
  std::sort(found.rbegin(), found.rend());
  if (!config.steps) return found;
  std::vector<std::pair<std::int64_t, fs::path>> wanted;
  for (const int step : *config.steps) {
    const auto it = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == step; });
    if (it == found.end()) fail(ErrorCode::kNotFound, "steps: {} has no step_{}", config.weights_dir->string(), step);
    wanted.push_back(*it);
  }
  std::sort(wanted.rbegin(), wanted.rend());
  return wanted;
}

std::string folder_name(const env::Environment& environment, const std::string& model) {
  std::string flat;
  for (const char c : model) flat += c == '/' ? std::string("--") : std::string(1, c);
  while (flat.starts_with("-")) flat.erase(0, 1);
  return environment.name() + "--" + flat;
}

void write_metadata(const fs::path& folder, const eval::EvalResult& result, const config::EvalEnvConfig& entry,
                    const config::EvalConfig& config, const std::string& base_url, std::int64_t step) {
  boost::json::object metrics;
  for (const auto& [name, value] : result.avg_metrics) metrics[name] = value;
  boost::json::object pass;
  for (const auto& [k, value] : result.pass_at_k) pass[std::to_string(k)] = value;
  const boost::json::object metadata{{"env_id", entry.id},
                                     {"model", config.model.name},
                                     {"base_url", base_url},
                                     {"ckpt_step", step},
                                     {"num_examples", result.num_examples},
                                     {"rollouts_per_example", result.rollouts_per_example},
                                     {"time", result.seconds},
                                     {"avg_reward", result.avg_reward},
                                     {"avg_metrics", metrics},
                                     {"avg_error", result.error_mean},
                                     {"pass_at_k", pass}};
  write_file_atomic(folder / "metadata.json", boost::json::serialize(metadata) + "\n");
}

}  // namespace

int run_eval_role(const config::EvalConfig& config, bool is_server_named, std::stop_token stop) {
  net::raise_fd_limit(65536);
  net::IoRuntime io(1, "eval");
  std::unique_ptr<Subject> subject;
  if (!is_server_named && is_local_model(config.model.name))
    subject = std::make_unique<LocalSubject>(config);
  else
    subject = std::make_unique<ServerSubject>(config, io);
  const auto checkpoints = checkpoints_of(config);
  if (!config.eval_base && checkpoints.empty())
    fail(ErrorCode::kInvalidArgument, "nothing to evaluate: eval_base is off and weights_dir names no checkpoint");
  io.run_blocking(subject->chat()->check_health(net::Clock::now() + std::chrono::minutes(2)), std::chrono::minutes(3), subject->base_url());

  std::int64_t num_failed = 0;
  auto evaluate = [&](std::int64_t step) {
    for (const config::EvalEnvConfig& entry : config.env) {
      if (stop.stop_requested()) return;
      eval::EvalTask task;
      task.environment = env::make_environment(env_spec(entry));
      task.num_examples = entry.num_examples.value_or(config.num_examples);
      task.rollouts_per_example = entry.group_size.value_or(config.group_size);
      task.skip_first = entry.skip_first;
      task.sampling = sampling_params(entry.sampling.value_or(config.sampling));
      task.seed = static_cast<std::uint64_t>(config.seed);
      if (config.max_concurrent) task.max_concurrent = *config.max_concurrent;
      if (entry.timeout) task.rollout_timeout = to_ms(*entry.timeout);
      task.retry = {.max_attempts = config.retry.max_attempts,
                    .wait_multiplier = to_ms(config.retry.wait_multiplier),
                    .wait_min = to_ms(config.retry.wait_min),
                    .wait_max = to_ms(config.retry.wait_max),
                    .reraise = config.retry.reraise};
      task.label = fmt::format("v{}", step);
      const std::uint64_t id = hash_bytes(
          fmt::format("{}{}{}{}", config.model.name, entry.id, step, std::chrono::system_clock::now().time_since_epoch().count()));
      const fs::path folder = config.resume_path.value_or(config.output_dir / "evals" / folder_name(*task.environment, config.model.name) /
                                                          fmt::format("{:08x}", id & 0xffffffffu));
      task.results_file = folder / "results.jsonl";
      task.resume = config.resume_path.has_value();
      std::function<bool()> should_stop = [stop] { return stop.stop_requested(); };
      auto evaluating = net::until_stop<eval::EvalResult>(eval::run_eval(std::move(task), subject->chat()), std::move(should_stop));
      eval::EvalResult result;
      try {
        result = io.run_blocking(std::move(evaluating), kLongest, "the evaluation of " + entry.id);
      } catch (const Error& error) {
        if (!stop.stop_requested() || error.code() != ErrorCode::kCancelled) throw;
        log::warning("the evaluation of {} is not finished; continue it with --save.stream --resume-path {}", entry.id, folder.string());
        return;
      }
      write_metadata(folder, result, entry, config, subject->base_url(), step);
      log::success("{}{}", checkpoints.empty() ? "" : fmt::format("[step {}] ", step), eval::console_line(result));
      log::info("results in {}", folder.string());
      if (result.error_mean >= 1.0) ++num_failed;
    }
  };
  if (config.eval_base) {
    if (!checkpoints.empty()) subject->reload_base();
    evaluate(0);
  }
  for (const auto& [step, folder] : checkpoints) {
    if (stop.stop_requested()) break;
    subject->load(folder, step);
    evaluate(step);
  }
  return num_failed == 0 ? 0 : 1;
}

}  // namespace prl::launch
