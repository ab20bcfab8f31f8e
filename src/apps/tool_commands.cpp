#include <chrono>
#include <cstdio>
#include <filesystem>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/output_file.hpp"
#include "config/tool_config.hpp"
#include "env/registry.hpp"
#include "launch/model_setup.hpp"
#include "nn/model_config.hpp"
#include "tools/bench.hpp"
#include "tools/bench_env.hpp"
#include "tools/bench_lora.hpp"
#include "tools/bench_peer.hpp"
#include "tools/chat_backends.hpp"
#include "tools/convert.hpp"
#include "tools/doctor.hpp"
#include "tools/extract_adapter.hpp"
#include "tools/init_model.hpp"
#include "tools/make_data.hpp"
#include "tools/plan.hpp"

namespace prl::apps {
namespace fs = std::filesystem;
using config::Command;

int run_doctor(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::DoctorConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  std::fputs(tools::doctor_report({.json = loaded.config.json, .output_dir = loaded.config.output_dir}).c_str(), stdout);
  return 0;
}

int run_plan(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::PlanConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  std::fputs(tools::plan_report(loaded.config, tools::card_of(loaded.config)).c_str(), stdout);
  return 0;
}

int run_init_model(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::InitModelConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  tools::init_model(loaded.config);
  const nn::ModelConfig made = nn::load_model_config(loaded.config.output_dir);
  log::success("made {}: {} with {} parameters, vocabulary {}", loaded.config.output_dir.string(), made.architecture, made.num_parameters(),
               made.vocab_size);
  return 0;
}

int run_make_data(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::MakeDataConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  refuse_overwrite(loaded.config.output, loaded.config.overwrite);
  const env::EnvironmentPtr environment = env::make_environment(launch::env_spec(loaded.config.env));
  const std::int64_t count =
      tools::make_sft_data(*environment, {.output = loaded.config.output,
                                          .num_examples = loaded.config.num_examples,
                                          .split = loaded.config.eval_split ? env::Split::kEval : env::Split::kTrain});
  log::success("wrote {} conversations of {} to {}", count, environment->name(), loaded.config.output.string());
  return 0;
}

int extract(const config::ConvertConfig& config) {
  if (config.adapter) fail(ErrorCode::kInvalidArgument, "--adapter merges an adapter and --base extracts one: give one of them");
  const bool is_half = config.dtype == config::ComputeDType::kBFloat16 || config.dtype == config::ComputeDType::kFloat16;
  const DType half = config.dtype == config::ComputeDType::kFloat16 ? DType::kF16 : DType::kBF16;
  const tools::ExtractResult result = tools::extract_adapter({.merged = config.input,
                                                              .base = *config.base,
                                                              .output_dir = config.output_dir,
                                                              .rank = config.rank,
                                                              .dtype = is_half ? half : DType::kF32,
                                                              .overwrite = config.overwrite});
  log::success("made {}: an adapter of rank {} for {} modules; {:.3f}% of the difference is left", config.output_dir.string(), config.rank,
               result.num_modules, 100 * result.residual);
  return 0;
}

int run_convert(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ConvertConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::ConvertConfig& config = loaded.config;
  if (config.quantization && *config.quantization != "fp8")
    fail(ErrorCode::kInvalidArgument, "prl convert: quantization is \"{}\", wanted fp8", *config.quantization);
  if (config.quantization && config.base)
    fail(ErrorCode::kInvalidArgument, "prl convert: quantization is of models, and with base an adapter is written; leave one of them out");
  if (config.base) return extract(config);
  tools::ConvertOptions options;
  options.has_eight_bits = config.quantization.has_value();
  options.input = config.input;
  options.output_dir = config.output_dir;
  options.max_shard_bytes = static_cast<std::uint64_t>(config.max_shard_bytes);
  options.overwrite = config.overwrite;
  options.pre_tokenizer = config.pre_tokenizer;
  options.adapter = config.adapter;
  options.takes_any_base = config.any_base;
  switch (config.dtype) {
    case config::ComputeDType::kFloat32: options.dtype = DType::kF32; break;
    case config::ComputeDType::kBFloat16: options.dtype = DType::kBF16; break;
    case config::ComputeDType::kFloat16: options.dtype = DType::kF16; break;
    case config::ComputeDType::kAuto: break;
  }
  const tools::ConvertResult result = tools::convert_model(options);
  log::success("made {}: {} with {} parameters in {}{}", config.output_dir.string(), result.config.architecture,
               result.config.num_parameters(), config.quantization ? "8 bits" : to_string(result.dtype),
               result.has_chat_template ? "" : ", without a chat template");
  return 0;
}

int run_chat(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ChatConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  launch::setup_logging(loaded.config.log, {});
  return tools::run_chat(loaded.config);
}

nn::ModelConfig benched_model(const config::BenchConfig& config) {
  nn::ModelConfig model = config.model ? nn::load_model_config(launch::model_folder(*config.model)) : tools::named_shape(config.shape);
  if (config.num_layers > model.num_layers)
    fail(ErrorCode::kInvalidArgument, "prl bench: num_layers is {}, the shape has {}", config.num_layers, model.num_layers);
  if (config.num_layers > 0) model.num_layers = config.num_layers;
  model.eight_bits = launch::eight_bits_of(config.quantization);
  model.attends_to_latents = model.latent && model.latent->has_attention() && config.latent_attention == config::LatentAttention::kLatents;
  return model;
}

int run_bench(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::BenchConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::BenchConfig& config = loaded.config;
  if (config.output_json) refuse_overwrite(*config.output_json, config.overwrite);
  if (config.suite == config::BenchSuite::kStart || config.suite == config::BenchSuite::kRl) {
    if (config.suite == config::BenchSuite::kStart)
      tools::bench_start(config.shape, config.num_repeats);
    else
      tools::bench_rl(config.shape, static_cast<std::uint64_t>(config.seed));
    return 0;
  }
  if (config.suite == config::BenchSuite::kDashboard) {
    tools::bench_dashboard(config.shape, config.num_pages, config.num_repeats, config.output_json);
    return 0;
  }
  if (config.suite == config::BenchSuite::kEnv) {
    tools::BenchEnvOptions bench;
    const env::EnvSpec spec = launch::in_run(launch::env_spec(config.env), std::filesystem::temp_directory_path() / "prl-bench-logs",
                                             config.max_concurrent, config.log.vf_level);
    bench.environment = env::make_environment(spec);
    bench.num_rollouts = config.num_rollouts;
    bench.num_at_once = config.max_concurrent;
    bench.reply_chars = config.reply_chars;
    bench.latency = std::chrono::milliseconds(static_cast<std::int64_t>(config.latency * 1000));
    const std::string json = tools::bench_environment(bench);
    std::printf("%s\n", json.c_str());
    if (config.output_json) write_file_atomic(*config.output_json, json + "\n");
    return 0;
  }
  tools::BenchOptions options;
  options.model = benched_model(config);
  options.dtype = launch::compute_dtype(config.compute.dtype, launch::device_kind(config.compute));
  options.runtime = launch::make_runtime(config.compute);
  options.num_threads = config.compute.num_threads;
  options.num_sequences = config.num_sequences;
  options.num_devices = config.tp;
  options.prompt_tokens = config.prompt_tokens;
  options.completion_tokens = config.completion_tokens;
  options.train_tokens = config.train_tokens;
  options.sequence_tokens = config.sequence_tokens;
  options.checkpoint_every = config.checkpoint_every;
  options.train_lora_rank = config.train_lora_rank;
  options.num_repeats = config.num_repeats;
  options.draft_tokens = config.speculative_tokens;
  options.has_fresh_texts = config.speculative_fresh;
  options.draft_layers = config.speculative_layers;
  options.draft_gap = static_cast<float>(config.speculative_gap);
  if (options.draft_layers >= options.model.num_layers)
    fail(ErrorCode::kInvalidArgument, "prl bench: speculative_layers is {}, wanted less than the model's {} layers", options.draft_layers,
         options.model.num_layers);
  options.seed = static_cast<std::uint64_t>(config.seed);
  if (config.suite == config::BenchSuite::kLora) {
    const std::string json = tools::bench_lora(options, config.num_adapters, config.lora_rank,
                                               config.lora_attention_only ? tools::LoraTargets::kAttention : tools::LoraTargets::kAll);
    std::printf("%s\n", json.c_str());
    if (config.output_json) write_file_atomic(*config.output_json, json + "\n");
    return 0;
  }
  const auto wants = [&](config::BenchSuite suite) { return config.suite == config::BenchSuite::kAll || config.suite == suite; };
  options.decode = wants(config::BenchSuite::kDecode);
  options.train = wants(config::BenchSuite::kTrain);
  options.prefill = config.suite == config::BenchSuite::kPrefill;
  options.sync = config.suite == config::BenchSuite::kSync;
  if (config.suite == config::BenchSuite::kKernels)
    fail(ErrorCode::kNotImplemented, "prl bench kernels: the kernel benchmarks are the program ops_bench of the bench preset");
  const std::string json = tools::to_json(options, tools::run_bench(options));
  std::printf("%s\n", json.c_str());
  if (config.output_json) write_file_atomic(*config.output_json, json + "\n");
  if (config.peer) {
    if (config.model) fail(ErrorCode::kInvalidArgument, "prl bench --peer compares named shapes; use --shape instead of --model");
    std::fflush(stdout);
    tools::compare_with_peer(std::move(options), config.shape, json);
  }
  return 0;
}

}  // namespace prl::apps
