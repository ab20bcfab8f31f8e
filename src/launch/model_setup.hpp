#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "config/env_config.hpp"
#include "config/model_config.hpp"
#include "config/shared_config.hpp"
#include "device/device.hpp"
#include "env/registry.hpp"
#include "nn/model_config.hpp"
#include "tensor/dtype.hpp"
#include "text/chat_template.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"
#include "wire/generate.hpp"

namespace prl::launch {

/// Folder of a model as users name it: a folder, or a hub id that is in the local cache or is downloaded into it, by the
/// environment variables of Hugging Face's clients (io/hub/hub_model.hpp). The one place where `model.name` becomes a folder.
std::filesystem::path model_folder(const std::string& name);
/// The same where only the tokenizer and its chat template are wanted; weights are not downloaded.
std::filesystem::path text_folder(const std::string& name);
/// Whether a name of which no server was given is meant to be loaded here: a folder or "organisation/name". Names of API models
/// ("gpt-4.1-mini") are neither.
bool is_local_model(const std::string& name);

/// Where a role computes. "auto" is the first GPU if this build and machine have one, else the CPU.
DeviceKind device_kind(const config::ComputeConfig& compute);
/// A runtime of that device. Error{kUnavailable} if "cuda" is asked for and missing, saying what is missing.
std::shared_ptr<DeviceRuntime> make_runtime(const config::ComputeConfig& compute);
/// Measured floating-point operations per second of products of `dtype`, the base of MFU. Uses memory of its own for a moment, so that
/// a role's peak counts the role alone.
double measured_peak_flops(const config::ComputeConfig& compute, DType dtype);
/// bfloat16 where the device multiplies it in hardware, else float32, unless the configuration says which.
DType compute_dtype(config::ComputeDType wanted, DeviceKind device);
/// Of inference.model.quantization, which is one that is built.
nn::EightBits eight_bits_of(const std::optional<std::string>& quantization);
/// That of adapters of a model that computes in `base`: the same, or float32. Error{kInvalidArgument} naming `key` for another.
DType adapter_dtype(config::ComputeDType wanted, DType base, std::string_view key);

/// How one model reads and writes text.
struct TextSetup {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;  ///< null if the folder has none
  std::shared_ptr<const text::Renderer> renderer;           ///< null without a template
  text::RendererOptions renderer_options = {};              ///< what it was made with
};
struct TextOptions {
  std::string renderer = "auto";                           ///< of a RendererConfig
  std::optional<std::string> thinking_retention = {};      ///< of a RendererConfig
  config::Value template_kwargs = config::Value::table();  ///< of a RendererConfig
  std::string tool_parser;                                 ///< "" for none; "auto": by the markers that the chat template writes
  std::string reasoning_parser;              ///< "" for none; "auto": if the chat template knows reasoning; any other name: <think> marks
  std::optional<std::string> chat_template;  ///< Jinja text or a file that holds it; the folder's own if not set
};
/// "auto" means the model's own chat template ("default") for local folders, which is exact for every family. A date that the renderer
/// would take from the clock is in renderer_options, so that all renderers made with them have the same.
TextSetup load_text(const std::filesystem::path& folder, const TextOptions& options);

env::EnvSpec env_spec(const config::EnvConfig& config);
env::EnvSpec env_spec(const config::EvalEnvConfig& config);
/// With where a run keeps its logs, the least level of its environments' records, how many rollouts it has at once, and what its
/// environments fork Python workers from (null: each has its own).
env::EnvSpec in_run(env::EnvSpec spec, const std::filesystem::path& logs, std::int64_t concurrency, config::LogLevel log_level,
                    std::shared_ptr<env::python::WorkerTemplates> templates = nullptr);
/// Where environments of a kind ("train", "eval") log: envs/KIND of the attempt.
std::filesystem::path env_logs(const std::filesystem::path& output_dir, const char* kind);
/// With the fields of extra_body: those that our sampler knows are set, others go into extra_json. Error{kInvalidArgument} naming a field
/// of the wrong type.
wire::SamplingParams sampling_params(const config::TrainSamplingConfig& config);
wire::SamplingParams sampling_params(const config::EvalSamplingConfig& config);
/// Error{kInvalidArgument} naming the first field of extra_json, which a model in this process does not know; reasoning_effort, which has
/// no effect on one, is a warning.
void check_local_sampling(const wire::SamplingParams& sampling);

/// Sets variables of this process; before it has threads.
void apply_env_vars(const std::map<std::string, std::string>& variables);
/// Logging of a process from its configuration. `color` is for children whose output the launcher relays.
void setup_logging(const config::LogConfig& config, const std::filesystem::path& file);

}  // namespace prl::launch
