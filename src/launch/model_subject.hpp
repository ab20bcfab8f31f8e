#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "config/eval_config.hpp"
#include "config/inference_config.hpp"
#include "env/chat_client.hpp"
#include "net/io_runtime.hpp"
#include "wire/generate.hpp"

namespace prl::launch {

/// The model that is evaluated or asked for data: how to talk to it, and how to put other weights into it.
class ModelSubject {
 public:
  virtual ~ModelSubject() = default;
  /// Conversations sampled as `sampling` says; what it leaves open is the server's choice.
  /// Error{kInvalidArgument} naming a field of extra_body that the model cannot take.
  virtual std::shared_ptr<env::ChatClientFactory> chat(const config::EvalSamplingConfig& sampling) = 0;
  /// What the runner puts into each request by itself.
  virtual wire::SamplingParams sampling(const config::EvalSamplingConfig& sampling) const = 0;
  /// Evaluates the weights of `folder` from now on.
  virtual void load(const std::filesystem::path& folder, std::int64_t step) = 0;
  /// Back to the weights that the model was started with; false if its server has no such route.
  virtual bool reload_base() = 0;
  /// Version of the weights in use, 0 for those it was started with; nullopt if its server does not tell.
  virtual std::optional<std::int64_t> policy_version() = 0;
  /// For metadata: addresses, or "in-process".
  virtual std::string base_url() const = 0;
};

struct SubjectOptions {
  std::string model;
  config::EvalClientConfig client;
  std::string reasoning_field;
  bool is_server_named = false;  ///< client.base_url was written by the user: a folder of the model's name is not loaded
  std::optional<config::EvalEngineConfig> engine = {};  ///< of the model in this process; set, no server is asked
};

/// The model folder in this process, if there is an `engine` for it, or if `model` names one and no server is named; else the servers of
/// `client`. `io` must outlive the subject.
std::unique_ptr<ModelSubject> make_subject(SubjectOptions options, net::IoRuntime& io);

/// policy_version() where no weights are to be put in: warns if it is not 0, because results are then not those of the model's name.
std::optional<std::int64_t> checked_policy_version(ModelSubject& subject);

/// Fields of a chat request that `sampling` sets, with extra_body over them. `is_openai`: the limit of tokens goes by the name
/// that OpenAI's own service wants.
boost::json::object request_fields(const config::EvalSamplingConfig& sampling, bool is_openai);
/// The same for a model in this process.
wire::SamplingParams local_sampling(const config::EvalSamplingConfig& sampling);

}  // namespace prl::launch
