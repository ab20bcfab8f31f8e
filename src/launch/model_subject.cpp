#include "launch/model_subject.hpp"

#include <fmt/format.h>
#include <boost/json/parse.hpp>

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "config/text_format.hpp"
#include "env/chat_pool.hpp"
#include "env/openai_chat_client.hpp"
#include "env/token_chat_client.hpp"
#include "launch/engine_client.hpp"
#include "launch/engine_host.hpp"
#include "launch/http_options.hpp"
#include "launch/prompt_images.hpp"
#include "net/report.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

json::object extra_fields(const config::EvalSamplingConfig& sampling) {
  return json::parse(config::to_compact_json(sampling.extra_body)).as_object();
}

class LocalSubject final : public ModelSubject {
 public:
  explicit LocalSubject(const SubjectOptions& options) {
    config::InferenceConfig inference = options.engine.value_or(config::EvalEngineConfig{});
    inference.model.name = options.model;
    // A template that writes tool calls or reasoning tells how the model's are read.
    inference.model.enable_auto_tool_choice = true;
    if (!inference.model.reasoning_parser) inference.model.reasoning_parser = "auto";
    host_ = std::make_unique<EngineHost>(inference, make_runtime(inference.compute), 3);  // base_ as well
    if (!host_->text().renderer) fail(ErrorCode::kInvalidArgument, "{} has no chat template", options.model);
    base_ = host_->engine().weights();
    chat_ = std::make_shared<env::TokenChatClientFactory>(
        host_->text().renderer, make_engine_client(host_->engine(), host_->text().tokenizer), prompt_images_of(*host_));
  }
  ~LocalSubject() override { host_->engine().shutdown(); }
  std::shared_ptr<env::ChatClientFactory> chat(const config::EvalSamplingConfig&) override { return chat_; }
  wire::SamplingParams sampling(const config::EvalSamplingConfig& sampling) const override { return local_sampling(sampling); }
  void load(const fs::path& folder, std::int64_t step) override {
    host_->engine().update_weights(host_->load(folder, PolicyVersion{step}, base_), std::chrono::minutes(10));
  }
  bool reload_base() override {
    host_->engine().update_weights(base_, std::chrono::minutes(10));
    return true;
  }
  std::optional<std::int64_t> policy_version() override { return host_->engine().weights()->version.value; }
  std::string base_url() const override { return "in-process"; }

 private:
  std::unique_ptr<EngineHost> host_;
  nn::WeightsPtr base_;
  std::shared_ptr<env::ChatClientFactory> chat_;
};

class ServerSubject final : public ModelSubject {
 public:
  ServerSubject(SubjectOptions options, net::IoRuntime& io)
      : io_(&io), options_(std::move(options)), client_(std::make_shared<net::HttpClient>(io.executor(), http_options(options_.client))) {}

  std::shared_ptr<env::ChatClientFactory> chat(const config::EvalSamplingConfig& sampling) override {
    std::vector<std::shared_ptr<env::ChatClientFactory>> servers;
    for (const std::string& url : options_.client.base_url) {
      const std::string host = net::Url::parse(url).host;
      env::OpenAIChatOptions chat;
      chat.base_url = url;
      chat.model = options_.model;
      chat.reasoning_field = options_.reasoning_field;
      chat.check_model = !options_.client.skip_model_check;
      chat.extra_body = request_fields(sampling, host == "openai.com" || host.ends_with(".openai.com"));
      servers.push_back(std::make_shared<env::OpenAIChatClientFactory>(client_, std::move(chat)));
    }
    return env::make_chat_pool(std::move(servers));
  }
  wire::SamplingParams sampling(const config::EvalSamplingConfig& sampling) const override {
    // All that is set goes into the request's body as it is; the temperature is kept for the records.
    wire::SamplingParams params;
    if (sampling.temperature) params.temperature = static_cast<float>(*sampling.temperature);
    return params;
  }
  void load(const fs::path& folder, std::int64_t) override {
    for (const std::string& root : admin_roots(options_.client))
      post(root + "/update_weights", json::object{{"weight_dir", fs::absolute(folder).string()}, {"force", true}});
  }
  bool reload_base() override {
    bool is_back = true;
    for (const std::string& root : admin_roots(options_.client)) {
      try {
        post(root + "/reload_weights", json::object{});
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kNotFound) throw;
        is_back = false;
      }
    }
    return is_back;
  }
  std::optional<std::int64_t> policy_version() override {
    std::optional<std::int64_t> version;
    for (const std::string& root : admin_roots(options_.client)) {
      const auto found = version_of(root);
      if (version && found && *version != *found)
        log::warning("the servers of client.base_url run different weights: policy versions {} and {}", *version, *found);
      if (found) version = std::max(version.value_or(*found), *found);
    }
    return version;
  }
  std::string base_url() const override { return fmt::format("{}", fmt::join(options_.client.base_url, ", ")); }

 private:
  void post(const std::string& url, json::value body) {
    constexpr auto kLimit = std::chrono::minutes(12);
    Waiting::Options waiting{.who = "this process", .what = url + " to answer", .limit = kLimit, .detail = {}, .now = {}};
    auto reporting = net::while_reporting<json::value>(client_->post_json(url, std::move(body), kLimit), std::move(waiting));
    io_->run_blocking(std::move(reporting), kLimit + std::chrono::minutes(1), url);
  }
  /// Servers of others have no such route, or tell another version.
  std::optional<std::int64_t> version_of(const std::string& root) {
    net::HttpCall call;
    call.url = root + "/version";
    call.timeout = std::chrono::seconds(10);
    call.max_retries = 0;
    try {
      const net::HttpReply reply = io_->run_blocking(client_->call(std::move(call)), std::chrono::seconds(20), root + "/version");
      const json::value body = reply.is_ok() ? reply.json() : json::value();
      const json::value* version = body.is_object() ? body.get_object().if_contains("policy_version") : nullptr;
      if (version != nullptr && version->is_int64()) return version->get_int64();
    } catch (const Error& error) {
      log::debug("{}/version: {}", root, error.what());
    }
    return std::nullopt;
  }
  net::IoRuntime* io_;
  SubjectOptions options_;
  std::shared_ptr<net::HttpClient> client_;
};

}  // namespace

std::unique_ptr<ModelSubject> make_subject(SubjectOptions options, net::IoRuntime& io) {
  if (options.engine || (!options.is_server_named && is_local_model(options.model))) return std::make_unique<LocalSubject>(options);
  return std::make_unique<ServerSubject>(std::move(options), io);
}

std::optional<std::int64_t> checked_policy_version(ModelSubject& subject) {
  const auto version = subject.policy_version();
  if (version && *version != 0)
    log::warning(
        "{} runs weights of policy version {}, not those it was started with, and the results are of these: POST /reload_weights "
        "puts the first ones back",
        subject.base_url(), *version);
  return version;
}

json::object request_fields(const config::EvalSamplingConfig& sampling, bool is_openai) {
  json::object fields;
  if (sampling.temperature) fields["temperature"] = *sampling.temperature;
  if (sampling.repetition_penalty) fields["repetition_penalty"] = *sampling.repetition_penalty;
  if (sampling.top_p) fields["top_p"] = *sampling.top_p;
  if (sampling.top_k) fields["top_k"] = *sampling.top_k;
  if (sampling.min_p) fields["min_p"] = *sampling.min_p;
  if (sampling.max_completion_tokens) fields[is_openai ? "max_completion_tokens" : "max_tokens"] = *sampling.max_completion_tokens;
  if (sampling.min_tokens) fields["min_tokens"] = *sampling.min_tokens;
  if (sampling.reasoning_effort) fields["reasoning_effort"] = std::string(config::enum_name(*sampling.reasoning_effort));
  for (const auto& member : extra_fields(sampling)) fields[member.key()] = member.value();
  return fields;
}

wire::SamplingParams local_sampling(const config::EvalSamplingConfig& sampling) {
  wire::SamplingParams params = sampling_params(sampling);
  check_local_sampling(params);
  params.extra_json.clear();
  return params;
}

}  // namespace prl::launch
