#include "launch/model_setup.hpp"
#include "launch/log_folder.hpp"
#include "launch/run_spans.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "config/text_format.hpp"
#include "io/hub/hub_model.hpp"
#include "ops/measure.hpp"
#include "text/renderer.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

boost::json::object to_object(const config::Value& value) { return boost::json::parse(config::to_compact_json(value)).as_object(); }

env::python::PythonSettings python_settings(const config::PythonEnvConfig& config) {
  env::python::PythonSettings settings;
  settings.kind = std::string(config::enum_name(config.kind));
  settings.path = config.path.value_or("");
  settings.python = config.python.value_or("");
  settings.address = config.address.value_or("");
  if (config.num_workers.number) settings.num_workers = static_cast<int>(*config.num_workers.number);
  settings.sandbox = config.sandbox == config::SandboxMode::kAuto;
  settings.forks = config.worker_start == config::WorkerStart::kFork;
  settings.pass_env = config.pass_env;
  settings.rollouts = config.limits.rollouts;
  settings.memory_gb = config.limits.memory_gb;
  settings.processes = config.limits.processes;
  settings.files = config.limits.files;
  settings.cpu_seconds = config.limits.cpu_seconds;
  if (!config.agent.members().empty()) settings.env_config["agent"] = to_object(config.agent);
  if (config.judge) {
    const char* key = std::getenv(config.judge->api_key_var.c_str());
    settings.judge =
        env::python::JudgeSettings{.base_url = config.judge->base_url,
                                   .model = config.judge->model.value_or(""),
                                   .api_key = key != nullptr ? key : "",
                                   .max_calls = config.judge->max_calls,
                                   .has_cache = config.judge->cache,
                                   .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.judge->timeout * 1000))};
  }
  return settings;
}

template <typename Env>
env::EnvSpec make_spec(const Env& config) {
  env::EnvSpec spec{.id = config.id, .name = config.name.value_or(""), .args = to_object(config.args), .python = python_settings(config)};
  if (config.data) spec.args["dataset_path"] = *config.data;
  spec.python.extra_env_kwargs = to_object(config.extra_env_kwargs);
  spec.python.state_columns = config.state_columns;
  return spec;
}

}  // namespace

fs::path model_folder(const std::string& name) { return io::find_model(name, io::ModelParts::kAll, io::HubSettings::from_environment()); }

fs::path text_folder(const std::string& name) { return io::find_model(name, io::ModelParts::kText, io::HubSettings::from_environment()); }

bool is_local_model(const std::string& name) {
  if (fs::is_directory(name)) return true;
  return io::is_hub_id(name) && name.find('/') != std::string::npos;
}

DeviceKind device_kind(const config::ComputeConfig& compute) {
  switch (compute.device) {
    case config::DeviceKind::kCpu: return DeviceKind::kCpu;
    case config::DeviceKind::kCuda: return DeviceKind::kCuda;
    case config::DeviceKind::kAuto: break;
  }
  static const bool has_gpu = !list_cuda_devices().devices.empty();
  return has_gpu ? DeviceKind::kCuda : DeviceKind::kCpu;
}

std::shared_ptr<DeviceRuntime> make_runtime(const config::ComputeConfig& compute) {
  if (device_kind(compute) == DeviceKind::kCpu) return make_cpu_runtime();
  try {
    return make_cuda_runtime();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnavailable) throw error.with_context("compute.device = \"cuda\"");
    throw;
  }
}

double measured_peak_flops(const config::ComputeConfig& compute, DType dtype) {
  ops::OpSession session(make_runtime(compute), compute.num_threads);
  // A neighbour that takes the machine for a moment spoils those that come in it: they are apart, and go on until the two best agree.
  constexpr int kMeasurements = 6;
  constexpr double kSeconds = 0.03, kAgreement = 0.97;
  constexpr std::chrono::milliseconds kPause{30};
  double best = 0, second = 0;
  for (int i = 0; i < kMeasurements && (i < 2 || second < kAgreement * best); ++i) {
    if (i > 0) std::this_thread::sleep_for(kPause);
    const double found = ops::measure_flops(session.context(), dtype, kSeconds);
    second = std::max(std::min(found, best), second);
    best = std::max(best, found);
  }
  return best;
}

nn::EightBits eight_bits_of(const std::optional<std::string>& quantization) {
  if (!quantization) return nn::EightBits::kNone;
  return *quantization == config::kFp8Products ? nn::EightBits::kProducts : nn::EightBits::kWeights;
}

DType compute_dtype(config::ComputeDType wanted, DeviceKind device) {
  switch (wanted) {
    case config::ComputeDType::kFloat16:  // of engines: every float16 is a float32
    case config::ComputeDType::kFloat32: return DType::kF32;
    case config::ComputeDType::kBFloat16: return DType::kBF16;
    case config::ComputeDType::kAuto: break;
  }
  if (device == DeviceKind::kCuda) return DType::kBF16;
  const CpuFeatures& cpu = cpu_features();
  return cpu.amx_bf16 || cpu.avx512_bf16 ? DType::kBF16 : DType::kF32;
}

DType adapter_dtype(config::ComputeDType wanted, DType base, std::string_view key) {
  if (wanted == config::ComputeDType::kAuto) return base;
  if (wanted == config::ComputeDType::kFloat32) return DType::kF32;
  if (wanted == config::ComputeDType::kBFloat16 && base == DType::kBF16) return base;
  fail(ErrorCode::kInvalidArgument, "{}: adapters compute in float32 or in the model's own type, which is {}", key,
       base == DType::kBF16 ? "bfloat16" : "float32");
}

namespace {

text::ThinkingRetention thinking_retention(const std::string& name, const std::string& renderer) {
  if (renderer == "default")
    fail(ErrorCode::kInvalidArgument,
         "renderer.thinking_retention: the chat template decides what it keeps; name the renderer of a family, one of {}",
         fmt::join(text::renderer_names(), ", "));
  if (name == "template") return text::ThinkingRetention::kTemplate;
  if (name == "tool_cycle") return text::ThinkingRetention::kToolCycle;
  if (name == "all") return text::ThinkingRetention::kAll;
  fail(ErrorCode::kInvalidArgument, "renderer.thinking_retention = {}, wanted template, tool_cycle or all", name);
}

boost::json::object template_kwargs(const config::Value& given, const std::string& renderer) {
  boost::json::object kwargs = to_object(given);
  const auto known = text::known_template_kwargs(renderer);
  for (const auto& kwarg : kwargs)
    if (known && std::find(known->begin(), known->end(), std::string_view(kwarg.key())) == known->end())
      fail(ErrorCode::kInvalidArgument, "renderer.chat_template_kwargs sets '{}', which the renderer '{}' does not know; it knows: {}",
           std::string_view(kwarg.key()), renderer, fmt::join(*known, ", "));
  text::pin_template_kwargs(renderer, kwargs);
  return kwargs;
}

}  // namespace

TextSetup load_text(const fs::path& folder, const TextOptions& options) {
  TextSetup setup;
  setup.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder));
  if (options.chat_template)
    setup.chat_template =
        std::make_shared<const text::ChatTemplate>(text::ChatTemplate::from_text_or_file(*options.chat_template, *setup.tokenizer));
  else if (text::ChatTemplate::exists(folder))
    setup.chat_template = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder, *setup.tokenizer));
  if (!setup.chat_template && options.renderer == "auto") return setup;
  text::RendererOptions renderer;
  renderer.name = options.renderer == "auto" ? "default" : options.renderer;
  const std::string_view source = setup.chat_template ? std::string_view(setup.chat_template->source()) : std::string_view();
  const auto writes = [&](std::string_view mark) { return source.find(mark) != std::string_view::npos; };
  if (options.thinking_retention) renderer.thinking_retention = thinking_retention(*options.thinking_retention, renderer.name);
  renderer.template_kwargs = template_kwargs(options.template_kwargs, renderer.name);
  renderer.tool_parser = options.tool_parser;
  if (options.tool_parser == "auto") renderer.tool_parser = text::tool_parser_of_template(source);
  renderer.reasoning_parser = options.reasoning_parser;
  if (!renderer.reasoning_parser.empty()) renderer.reasoning_parser = "think";
  if (options.reasoning_parser == "auto") renderer.reasoning_parser = writes("<think>") ? "think" : "";
  setup.renderer = text::make_renderer(renderer, setup.tokenizer, setup.chat_template);
  setup.renderer_options = std::move(renderer);
  return setup;
}

env::EnvSpec env_spec(const config::EnvConfig& config) { return make_spec(config); }
env::EnvSpec env_spec(const config::EvalEnvConfig& config) { return make_spec(config); }

fs::path env_logs(const fs::path& output_dir, const char* kind) { return log_file(output_dir, "envs") / kind; }

env::EnvSpec in_run(env::EnvSpec spec, const fs::path& logs, std::int64_t concurrency, config::LogLevel log_level,
                    std::shared_ptr<env::python::WorkerTemplates> templates) {
  spec.python.log_level = config::enum_name(log_level);
  spec.python.log_folder = logs;
  spec.python.concurrency = concurrency;
  spec.python.templates = std::move(templates);
  return spec;
}

namespace {

double number_of(const boost::json::value& value, std::string_view key) {
  if (!value.is_number()) fail(ErrorCode::kInvalidArgument, "sampling.extra_body.{}: wanted a number", key);
  return value.to_number<double>();
}

/// False if our sampler has no such number.
bool set_number(wire::SamplingParams& params, std::string_view key, const boost::json::value& value) {
  const auto real = [&] { return static_cast<float>(number_of(value, key)); };
  const auto whole = [&] { return static_cast<std::int32_t>(number_of(value, key)); };
  if (key == "temperature")
    params.temperature = real();
  else if (key == "top_p")
    params.top_p = real();
  else if (key == "top_k")
    params.top_k = whole();
  else if (key == "min_p")
    params.min_p = real();
  else if (key == "repetition_penalty")
    params.repetition_penalty = real();
  else if (key == "presence_penalty")
    params.presence_penalty = real();
  else if (key == "frequency_penalty")
    params.frequency_penalty = real();
  else if (key == "min_tokens")
    params.min_tokens = whole();
  else if (key == "max_tokens" || key == "max_completion_tokens")
    params.max_tokens = whole();
  else
    return false;
  return true;
}

void apply_extra_body(wire::SamplingParams& params, const config::Value& extra_body) {
  boost::json::object foreign;
  for (const auto& member : to_object(extra_body)) {
    const std::string_view key = member.key();
    const boost::json::value& value = member.value();
    if (value.is_null() || set_number(params, key, value)) continue;
    if (key == "ignore_eos" && value.is_bool()) {
      params.ignore_eos = value.get_bool();
    } else if (key == "include_stop_str_in_output" && value.is_bool()) {
      params.include_stop_str_in_output = value.get_bool();
    } else if (key == "stop" && value.is_string()) {
      params.stop = {std::string(value.get_string())};
    } else if (key == "stop" && value.is_array()) {
      for (const boost::json::value& text : value.get_array()) {
        if (!text.is_string()) fail(ErrorCode::kInvalidArgument, "sampling.extra_body.stop: wanted texts");
        params.stop.emplace_back(text.get_string());
      }
    } else if (key == "stop" || key == "ignore_eos" || key == "include_stop_str_in_output") {
      fail(ErrorCode::kInvalidArgument, "sampling.extra_body.{} = {}: wanted {}", key, boost::json::serialize(value),
           key == "stop" ? "a text or a list of texts" : "true or false");
    } else {
      foreign[key] = value;
    }
  }
  if (!foreign.empty()) params.extra_json = boost::json::serialize(foreign);
}

}  // namespace

void check_local_sampling(const wire::SamplingParams& sampling) {
  if (sampling.extra_json.empty()) return;
  const boost::json::object extra = boost::json::parse(sampling.extra_json).as_object();
  for (const auto& member : extra) {
    if (member.key() == "reasoning_effort") {
      log::warning("sampling.reasoning_effort has no effect on a model in this process");
      continue;
    }
    fail(ErrorCode::kInvalidArgument,
         "sampling.extra_body.{}: a model in this process takes temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, "
         "frequency_penalty, min_tokens, max_tokens, ignore_eos and stop; serve the model with `prl inference` for more",
         std::string_view(member.key()));
  }
}

wire::SamplingParams sampling_params(const config::TrainSamplingConfig& config) {
  wire::SamplingParams params;
  params.temperature = static_cast<float>(config.temperature);
  params.repetition_penalty = static_cast<float>(config.repetition_penalty);
  if (config.max_completion_tokens) params.max_tokens = *config.max_completion_tokens;
  params.min_tokens = config.min_tokens;
  if (config.seed) params.seed = static_cast<std::uint64_t>(*config.seed);
  apply_extra_body(params, config.extra_body);
  return params;
}

wire::SamplingParams sampling_params(const config::EvalSamplingConfig& config) {
  wire::SamplingParams params;
  if (config.temperature) params.temperature = static_cast<float>(*config.temperature);
  if (config.repetition_penalty) params.repetition_penalty = static_cast<float>(*config.repetition_penalty);
  if (config.top_p) params.top_p = static_cast<float>(*config.top_p);
  if (config.top_k) params.top_k = *config.top_k;
  if (config.min_p) params.min_p = static_cast<float>(*config.min_p);
  if (config.max_completion_tokens) params.max_tokens = *config.max_completion_tokens;
  if (config.min_tokens) params.min_tokens = *config.min_tokens;
  if (config.seed) params.seed = static_cast<std::uint64_t>(*config.seed);
  config::Value extra = config.extra_body;
  if (config.reasoning_effort && extra.find("reasoning_effort") == nullptr)
    extra.set("reasoning_effort", config::enum_name(*config.reasoning_effort));
  apply_extra_body(params, extra);
  return params;
}

void apply_env_vars(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables)
    if (::setenv(name.c_str(), value.c_str(), 1) != 0) fail(ErrorCode::kInvalidArgument, "env_vars.{} is no name of a variable", name);
}

void setup_logging(const config::LogConfig& config, const fs::path& file) {
  log::Options options;
  switch (config.level) {
    case config::LogLevel::kDebug: options.level = log::Level::kDebug; break;
    case config::LogLevel::kInfo: options.level = log::Level::kInfo; break;
    case config::LogLevel::kWarning: options.level = log::Level::kWarning; break;
    case config::LogLevel::kError: options.level = log::Level::kError; break;
  }
  options.json = config.json_logging;
  // A text log has its role in the file's name; lines of JSON are collected from many files.
  if (options.json) options.tag = process_name("");
  options.step_interval = config.step_interval;
  if (config.file) options.file = file;
  try {
    log::setup(options);
  } catch (const Error& error) {
    throw error.with_context("log.file = true");
  }
}

}  // namespace prl::launch
