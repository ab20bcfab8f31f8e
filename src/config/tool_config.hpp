#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/env_config.hpp"
#include "config/eval_config.hpp"
#include "config/inference_config.hpp"
#include "config/model_config.hpp"
#include "config/orchestrator_config.hpp"
#include "config/schema.hpp"
#include "config/shared_config.hpp"

/// The small commands: init-model, convert, chat, bench, doctor, env, env-server, and one that is accepted but not built.
namespace prl::config {

enum class ModelFamily {
  kQwen3,
  kQwen3Moe,
  kGlm4Moe,
  kQwen2,
  kLlama,
  kMistral,
  kSmolLm3,
  kMixtral,
  kOlmo2,
  kOlmo3,
  kPhi3,
  kQwen35,
  kGptOss,
  kQwen35Moe,
  kQwen3Next,
  kNemotronH,
  kMiniMaxM2,
  kAfmoe,
  kDeepseekV3,
  kGlm4MoeLite,
  kGemma3
};
std::span<const EnumEntry> enum_entries(ModelFamily);
enum class BenchSuite { kAll, kDecode, kPrefill, kTrain, kSync, kRl, kStart, kKernels, kEnv, kLora, kDashboard };
std::span<const EnumEntry> enum_entries(BenchSuite);

/// `prl init-model DIR`: a Hugging Face folder with random weights, a byte-level tokenizer and a ChatML template.
struct InitModelConfig {
  std::filesystem::path output_dir;
  ModelFamily family = ModelFamily::kQwen3;
  int vocab_size = 512;
  int hidden_size = 128;
  int intermediate_size = 384;
  int num_layers = 4;
  int num_heads = 4;
  int num_kv_heads = 2;
  std::optional<int> head_dim;
  int num_experts = 8;
  int num_experts_per_tok = 2;
  int moe_intermediate_size = 128;
  int max_position_embeddings = 4096;
  std::optional<int> sliding_window;
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = true;
  double initializer_range = 0.02;
  ComputeDType dtype = ComputeDType::kFloat32;
  std::int64_t seed = 42;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("output_dir", output_dir, "Folder to make");
    v.field("family", family, "Architecture");
    v.field("vocab_size", vocab_size, "Size of the vocabulary; the byte-level tokenizer needs 260", {.unit = "tokens", .min = 260});
    v.field("hidden_size", hidden_size, "Width of the residual stream", {.min = 1});
    v.field("intermediate_size", intermediate_size, "Width of the MLPs", {.min = 1});
    v.field("num_layers", num_layers, "Layers", {.unit = "layers", .min = 1});
    v.field("num_heads", num_heads, "Query heads", {.min = 1});
    v.field("num_kv_heads", num_kv_heads,
            "Key-value heads; divides num_heads. Of latent attention as many as num_heads, whatever this says", {.min = 1});
    v.field("head_dim", head_dim, "Width of a head; hidden_size / num_heads if not set", {.min = 2});
    v.field("num_experts", num_experts, "Experts of a layer; the first layer of glm4_moe, afmoe and deepseek_v3 has none", {.min = 1});
    v.field("num_experts_per_tok", num_experts_per_tok, "Experts that a token is sent to, of families with experts", {.min = 1});
    v.field("moe_intermediate_size", moe_intermediate_size,
            "Width of an expert's MLP, and of a shared one; mixtral, gpt_oss and minimax_m2 take intermediate_size", {.min = 1});
    v.field("max_position_embeddings", max_position_embeddings, "Longest context", {.unit = "tokens", .min = 1});
    v.field("sliding_window", sliding_window, "Keys that a query sees at most, of families with windows; all if not set",
            {.unit = "tokens", .min = 1});
    v.field("rope_theta", rope_theta, "Base of the rotary angles", {.min = 1});
    v.field("rms_norm_eps", rms_norm_eps, "Epsilon of the norms", {.min = 0, .is_open_min = true});
    v.field("tie_word_embeddings", tie_word_embeddings, "LM head and embedding share one matrix");
    v.field("initializer_range", initializer_range, "Standard deviation of the weights", {.min = 0, .is_open_min = true});
    v.field("dtype", dtype, "Type of the saved weights; auto is float32");
    v.field("seed", seed, "Seed of the weights", {.min = 0});
    v.field("overwrite", overwrite, "Replace an existing folder");
  }
};

/// `prl make-data FILE`: conversations for `prl sft` from an environment's demonstrations.
struct MakeDataConfig {
  std::filesystem::path output;
  EnvConfig env;
  std::int64_t num_examples = -1;
  bool eval_split = false;
  bool overwrite = false;
  static constexpr StatusBelow kStatusBelow[] = {
      {"env.name", inert("demonstrations are written; no model is asked")},
      {"env.ratio", inert("demonstrations are written; no model is asked")},
      {"env.max_retries", inert("demonstrations are written; no model is asked")},
      {"env.max_total_completion_tokens", inert("demonstrations are written; no model is asked")},
      {"env.timeout", inert("demonstrations are written; no model is asked")},
      {"env.group_size", inert("demonstrations are written; no model is asked")},
      {"env.sampling", inert("demonstrations are written; no model is asked")},
      {"env.agent", inert("demonstrations are written; no model is asked")},
      {"env.algo", inert("demonstrations are written; no model is asked")},
      {"env.curriculum", inert("demonstrations are written; no model is asked")},
      {"env.address", inert("demonstrations are written; no model is asked")},
      {"env.pass_env", inert("demonstrations are written; no model is asked")}};
  template <class V>
  void visit(V& v) {
    v.field("output", output, "JSONL file to write, one {\"messages\": [...]} per line");
    v.field("env", env, "Environment whose demonstrations are written");
    v.field("num_examples", num_examples, "Tasks to write, -1 for all", {.min = -1});
    v.field("eval_split", eval_split, "Use the evaluation tasks instead of the training tasks");
    v.field("overwrite", overwrite, "Replace an existing file");
  }
};

enum class ResultsOrder { kFile, kRewardUp, kRewardDown };
std::span<const EnumEntry> enum_entries(ResultsOrder);

/// `prl results [PATH]`: what `prl eval` and `prl synthesize` wrote, as tables, or one rollout in full; in a terminal, a browser.
struct ResultsConfig {
  std::filesystem::path path = "outputs";
  std::optional<std::int64_t> show;
  ResultsOrder sort = ResultsOrder::kFile;
  std::optional<double> min_reward;
  std::optional<double> max_reward;
  template <class V>
  void visit(V& v) {
    v.field("path", path, "Folder of results, or one above several");
    v.field("show", show, "Print this rollout of the list in full, counted from 1", {.min = 1});
    v.field("sort", sort, "Order of the rollouts");
    v.field("min_reward", min_reward, "Only rollouts with at least this reward");
    v.field("max_reward", max_reward, "Only rollouts with at most this reward");
  }
};

/// `prl dashboard RUN...`: the page of runs, finished or not.
struct DashboardToolConfig {
  std::vector<std::string> runs;
  std::string host = "127.0.0.1";
  int port = 7007;
  template <class V>
  void visit(V& v) {
    v.field("runs", runs, "Output folders of runs, or folders above several");
    v.field("host", host, "Address to listen on; the page asks for no key, so other machines see the runs if it is not a loopback address");
    v.field("port", port, "Port; 0 takes a free one", {.min = 0, .max = 65535});
  }
};

/// `prl router`: one address in front of several engines.
struct RouterToolConfig : RoutingConfig {
  std::vector<std::string> engines;
  std::string host = "127.0.0.1";
  int port = 8000;
  std::optional<std::string> api_key;
  std::optional<std::string> admin_api_key;
  std::string engine_api_key_var = "VLLM_API_KEY";
  std::vector<std::string> cors_origins;
  std::vector<std::string> allowed_hosts;
  std::int64_t max_body_bytes = 64 << 20;
  int max_connections = 4096;
  int max_waiting = 65536;
  double request_timeout = 3600;
  double update_timeout = 720;
  std::filesystem::path output_dir = "outputs";
  LogConfig log;
  bool dry_run = false;
  static constexpr StatusBelow kStatusBelow[] = {{"log.interval", inert("a server logs no progress")},
                                                 {"log.vf_level", inert("no environment runs here")},
                                                 {"log.step_interval", inert("a server logs no steps")}};
  template <class V>
  void visit(V& v) {
    v.field("engines", engines, "Addresses of the engines; more join through POST /engines");
    v.field("host", host, "Address to listen on; 0.0.0.0 for all");
    v.field("port", port, "Port to listen on, 0 for any free one", {.min = 0, .max = 65535});
    v.field("api_key", api_key, "Key that requests must show; none if not set");
    v.field("admin_api_key", admin_api_key, "Key of the routes that change weights or engines; api_key if not set");
    v.field("engine_api_key_var", engine_api_key_var, "Environment variable that holds the engines' key");
    v.field("cors_origins", cors_origins, "Origins of web pages that may use the router, as https://host:port; * for all");
    v.field("allowed_hosts", allowed_hosts,
            "Names by which a router on a loopback address may be called besides localhost, where no key is set; * for any");
    v.field("max_body_bytes", max_body_bytes, "Largest request body", {.unit = "bytes", .min = 1024});
    v.field("max_connections", max_connections, "Most open connections", {.min = 1});
    v.field("max_waiting", max_waiting, "Requests that may wait for an engine; more are answered 429", {.min = 1});
    RoutingConfig::visit(v);
    v.field("request_timeout", request_timeout, "Longest time of one request", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("update_timeout", update_timeout, "Longest time of one weight update", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("output_dir", output_dir, "Folder of logs");
    v.field("log", log, "Logging");
    v.field("dry_run", dry_run, "Check the configuration and stop");
  }
};

/// `prl plot RUN... --metric KEY --out FILE.svg`: curves without a browser.
struct PlotConfig {
  std::vector<std::string> runs;
  std::vector<std::string> metric = {"reward"};
  std::filesystem::path out = "curve.svg";
  double smoothing = 0.0;
  bool log_scale = false;
  std::optional<std::int64_t> from_step;
  std::optional<std::int64_t> to_step;
  int width = 960;
  int height = 420;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("runs", runs, "Output folders of runs, or folders above several");
    v.field("metric", metric,
            "Metrics: keys of metrics.jsonl, with ROLE: in front where roles share one, or the beginning of one (reward, loss)");
    v.field("out", out, "Picture to write, .svg or .png");
    v.field("smoothing", smoothing, "Weight of the past in a running mean", {.min = 0, .max = 0.999});
    v.field("log_scale", log_scale, "Logarithmic axis of the values");
    v.field("from_step", from_step, "First step", {.unit = "steps", .min = 0});
    v.field("to_step", to_step, "Last step", {.unit = "steps", .min = 0});
    v.field("width", width, "Width of the picture", {.unit = "pixels", .min = 200, .max = 10000});
    v.field("height", height, "Height of one chart", {.unit = "pixels", .min = 100, .max = 10000});
    v.field("overwrite", overwrite, "Replace an existing file");
  }
};

/// `prl report RUN`: charts, rollouts, configuration and evaluations of a run in one HTML file without scripts.
struct ReportConfig {
  std::filesystem::path run;
  std::filesystem::path out = "report.html";
  int num_rollouts = 12;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("run", run, "Output folder of a run");
    v.field("out", out, "HTML file to write");
    v.field("num_rollouts", num_rollouts, "Rollouts of the last step that are shown: the best and the worst", {.min = 0, .max = 200});
    v.field("overwrite", overwrite, "Replace an existing file");
  }
};

/// `prl replay RUN`: the trainer of a run once more, on the samples that the run recorded.
struct ReplayConfig {
  std::filesystem::path run;
  std::filesystem::path output_dir;
  std::int64_t from_step = 0;
  std::optional<std::int64_t> last_step;
  std::optional<bool> require_same;
  int num_ranks = 1;
  Value trainer = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("run", run, "Output folder of the run, which recorded its steps (trainer.record)");
    v.field("output_dir", output_dir, "Folder of what the replay writes; beside that of the run, with -replay behind its name, if empty");
    v.field("from_step", from_step, "Begin with the run's checkpoint of this step; 0 is the model", {.unit = "steps", .min = 0});
    v.field("last_step", last_step, "End after this step; the last recorded one if not set", {.unit = "steps", .min = 1});
    v.field("require_same", require_same, "Other weights than the run's are an error; unset: unless keys under trainer decide the weights");
    v.field("num_ranks", num_ranks, "Processes that share the work, on a GPU each; the bits do not depend on it", {.min = 1, .max = 64});
    v.field("trainer", trainer, "Keys of `prl trainer` that are to differ, for example --trainer.loss.type gspo");
  }
};

/// `prl top RUN`: a run in the terminal, drawn again as it goes on.
struct TopConfig {
  std::filesystem::path run;
  std::vector<std::string> metric;
  double interval = 1.0;
  bool once = false;
  template <class V>
  void visit(V& v) {
    v.field("run", run, "Output folder of a run");
    v.field("metric", metric, "Metrics that are shown first, as `prl plot` takes them");
    v.field("interval", interval, "Time between two looks at the files", {.unit = "seconds", .min = 0.1, .max = 3600});
    v.field("once", once, "Print the run as it is now and end, as happens too where the output is no terminal");
  }
};

enum class RunsAction { kList, kAdd, kPause, kResume, kDrain, kStop, kRemove };
std::span<const EnumEntry> enum_entries(RunsAction);

/// `prl runs ACTION RUN`: the runs of a trainer that serves several (docs/runs.md).
struct RunsToolConfig {
  RunsAction action = RunsAction::kList;
  std::string run;
  std::filesystem::path output_dir = "outputs";
  std::optional<std::filesystem::path> config;
  std::optional<double> weight;
  template <class V>
  void visit(V& v) {
    v.field("action", action, "What to do");
    v.field("run", run, "Folder of the run below output_dir; run_ in front may be left out");
    v.field("output_dir", output_dir, "Folder of the trainer, above those of the runs");
    v.field("config", config, "File that becomes configs/orch.toml of a run that is added");
    v.field("weight", weight, "Share of the trainer from now on, with pause, resume and add", {.min = 0.001, .max = 1000});
  }
};

/// `prl convert IN OUT`: a GGUF file or a model folder to a Hugging Face folder.
struct ConvertConfig {
  std::filesystem::path input;
  std::filesystem::path output_dir;
  ComputeDType dtype = ComputeDType::kAuto;
  std::optional<std::string> quantization;
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  std::optional<std::string> pre_tokenizer;
  std::optional<std::filesystem::path> adapter;
  bool any_base = false;
  std::optional<std::filesystem::path> base;
  std::int64_t rank = 16;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("input", input, "GGUF file, or model folder or checkpoint, to read");
    v.field("output_dir", output_dir, "Folder to make");
    v.field("dtype", dtype, "Type of the saved weights; auto keeps the one found, and takes bfloat16 for quantised files");
    v.field("quantization", quantization, "fp8: matrices of attention and MLPs in 8 bits, as a run with quantization fp8 rounds them");
    v.field("max_shard_bytes", max_shard_bytes, "Largest file of weights", {.unit = "bytes", .min = 1024});
    v.field("pre_tokenizer", pre_tokenizer, "How a GGUF file splits text, where it does not say: gpt-2 llama-bpe qwen2 smollm");
    v.field("adapter", adapter, "Folder of a LoRA adapter in PEFT's format, which is merged into the weights");
    v.field("any_base", any_base, "Merge the adapter though it was trained on other weights than those of the input");
    v.field("base", base, "Model folder that the input was made of: writes the LoRA adapter between both in PEFT's format");
    v.field("rank", rank, "Rank of the adapter that is extracted with base", {.min = 1, .max = 512});
    v.field("overwrite", overwrite, "Replace an existing folder");
  }
};

/// `prl chat`: talk to a model folder, or to a server if one is given.
struct ChatConfig {
  EvalModelConfig model;
  std::optional<ClientConfig> client;
  EvalSamplingConfig sampling;
  std::optional<std::string> system_prompt;
  std::optional<std::string> prompt;
  ComputeConfig compute;
  LogConfig log;
  static constexpr StatusBelow kStatusBelow[] = {{"log.file", inert("a conversation has no log file")},
                                                 {"log.vf_level", inert("no environment runs here")},
                                                 {"log.interval", inert("there is no progress to log")},
                                                 {"log.step_interval", inert("there are no steps")},
                                                 {"client.admin_base_url", inert("weights are not changed")}};
  template <class V>
  void visit(V& v) {
    v.field("model", model, "Model folder or hub id, or the name that the server serves");
    v.field("client", client, "Server; the model is loaded here if not set");
    v.field("sampling", sampling, "Sampling");
    v.field("system_prompt", system_prompt, "First message");
    v.field("prompt", prompt, "Answer this one message and stop");
    v.field("compute", compute, "Device and precision");
    v.field("log", log, "Logging");
  }
};

/// `prl bench [SUITE]`: speed of this machine.
struct BenchConfig {
  BenchSuite suite = BenchSuite::kAll;
  std::optional<std::string> model;
  std::string shape = "smollm2-135m";
  int num_layers = 0;
  std::optional<std::string> quantization;
  LatentAttention latent_attention = LatentAttention::kLatents;
  int num_sequences = 32;
  int tp = 1;
  int prompt_tokens = 128;
  int completion_tokens = 128;
  int train_tokens = 4096;
  int sequence_tokens = 512;
  int checkpoint_every = 0;
  int num_repeats = 3;
  int speculative_tokens = 0;
  bool speculative_fresh = false;
  int speculative_layers = 0;
  double speculative_gap = 0;
  bool peer = false;
  EvalEnvConfig env;
  int num_rollouts = 1000;
  int max_concurrent = 128;
  int reply_chars = 500;
  double latency = 0;
  int num_adapters = 64;
  int lora_rank = 16;
  bool lora_attention_only = false;
  int train_lora_rank = 0;
  int num_pages = 10;
  std::optional<std::filesystem::path> output_json;
  bool overwrite = false;
  ComputeConfig compute;
  std::int64_t seed = 42;
  LogConfig log;
  template <class V>
  void visit(V& v) {
    v.field("suite", suite, "What to measure; sync is a weight update in one process, start the time to a server's first token");
    v.field("model", model, "Model folder whose shape is taken; `shape` if not set");
    v.field("shape", shape, "Shape of the random model: smollm2-135m, glm-4.7-flash, qwen3-0.6b to -32b and -30b-a3b");
    v.field("num_layers", num_layers, "Only that many layers of the shape, where all would not fit; 0 for all", {.min = 0});
    v.field("quantization", quantization, "fp8, w8a8_fp8: as inference.model.quantization");
    v.field("latent_attention", latent_attention, "As inference.model.latent_attention");
    v.field("num_sequences", num_sequences, "Sequences decoded at once", {.min = 1});
    v.field("tp", tp, "Of suites decode and prefill: devices that share the layers; measured beside one device",
            {.unit = "devices", .min = 1, .max = 8});
    v.field("prompt_tokens", prompt_tokens, "Length of a prompt", {.unit = "tokens", .min = 1});
    v.field("completion_tokens", completion_tokens, "Tokens generated per sequence", {.unit = "tokens", .min = 1});
    v.field("train_tokens", train_tokens, "Packed tokens of a training step", {.unit = "tokens", .min = 1});
    v.field("sequence_tokens", sequence_tokens, "Length of the sequences packed into a training step", {.unit = "tokens", .min = 2});
    v.field("checkpoint_every", checkpoint_every, "Compute every n-th layer again in the backward pass, 0 for none",
            {.unit = "layers", .min = 0});
    v.field("num_repeats", num_repeats, "Measured repeats, after one to warm up", {.min = 1});
    v.field("speculative_tokens", speculative_tokens,
            "Of suite decode: draft tokens of a sequence in a step; each repeat asks for what the one before was asked for",
            {.unit = "tokens", .min = 0, .max = 15});
    v.field("speculative_fresh", speculative_fresh,
            "With speculative_tokens: ask for new texts, which are looked up in themselves, so that many drafts fail");
    v.field("speculative_layers", speculative_layers,
            "With speculative_tokens: drafts are drawn by the model's first layers, so many; texts are new", {.unit = "layers", .min = 0});
    v.field("speculative_gap", speculative_gap,
            "With speculative_layers: what the other layers add is scaled by it; at 0 all drafts come true, the larger the fewer",
            {.min = 0});
    v.field("peer", peer, "Also run bench/peer.py (PyTorch and transformers; PRL_BENCH_PYTHON names the interpreter) and print the ratios");
    v.field("env", env, "Of suite env: the environment that is played");
    v.field("num_rollouts", num_rollouts, "Of suite env: rollouts, after 20 to warm up", {.unit = "rollouts", .min = 1});
    v.field("max_concurrent", max_concurrent, "Of suite env: rollouts at once", {.unit = "rollouts", .min = 1});
    v.field("reply_chars", reply_chars, "Of suite env: length of the model's replies", {.min = 0});
    v.field("latency", latency, "Of suite env: time until the model's reply", {.unit = "seconds", .min = 0});
    v.field("num_adapters", num_adapters, "Of suite lora: adapters in the engine, which sequences name in turn", {.min = 1, .max = 4096});
    v.field("lora_rank", lora_rank, "Of suite lora: rank of the adapters", {.min = 1, .max = 512});
    v.field("lora_attention_only", lora_attention_only, "Of suite lora: adapters of attention's matrices, without those of the MLP");
    v.field("train_lora_rank", train_lora_rank, "Of suite train: rank of the adapter that is trained, 0 for all weights",
            {.min = 0, .max = 512});
    v.field("num_pages", num_pages, "Of suite dashboard: pages that are open", {.min = 1, .max = 64});
    v.field("output_json", output_json, "Also write the table as JSON");
    v.field("overwrite", overwrite, "Replace an existing output_json");
    v.field("compute", compute, "Device and precision");
    v.field("seed", seed, "Seed of weights and data", {.min = 0});
    v.field("log", log, "Logging");
  }
};

enum class PlanWork { kSft, kRl };
std::span<const EnumEntry> enum_entries(PlanWork);

/// `prl plan [MODEL]`: whether a run fits on so many devices of a kind, and how long a step will take (docs/operators/plan.md).
struct PlanConfig {
  std::string model = "qwen3-0.6b";
  PlanWork work = PlanWork::kSft;
  std::string card = "h100";
  int num_devices = 1;
  int num_infer_devices = 0;
  int gpus_per_node = 8;
  int seq_len = 8192;
  std::optional<int> sequence_tokens;
  std::optional<int> num_rows;
  int batch_size = 128;
  int prompt_tokens = 512;
  int completion_tokens = 2048;
  int max_num_seqs = 256;
  int max_async_level = 1;
  ComputeDType dtype = ComputeDType::kBFloat16;
  GradientReduce reduce = GradientReduce::kExact;
  int dp_replicate = 1;
  bool reshard_after_forward = false;
  int ep = 1;
  int checkpoint_every = 0;
  bool optim_cpu_offload = false;
  bool fsdp_cpu_offload = false;
  std::optional<double> assume_flops;
  std::optional<double> assume_efficiency;
  std::optional<double> assume_bandwidth;
  std::optional<double> assume_node_bandwidth;
  std::optional<double> assume_memory_bandwidth;
  std::optional<double> assume_memory;
  double assume_latency = 20;
  bool json = false;
  template <class V>
  void visit(V& v) {
    v.field("model", model, "Folder or config.json of a Hugging Face model, its hub id, or a size: qwen3-4b, 8b, smollm2-135m");
    v.field("work", work, "sft: rows are there; rl: they are sampled, and new weights go to the engines");
    v.field("card", card, "Kind of device: a100, h100, h200, b200, l40s; local: the one of this machine, measured now");
    v.field("num_devices", num_devices, "Devices that train, one rank each", {.unit = "devices", .min = 1, .max = 65536});
    v.field("num_infer_devices", num_infer_devices, "Of rl: devices that sample, one engine each; 0: those that train sample too",
            {.unit = "devices", .min = 0, .max = 65536});
    v.field("gpus_per_node", gpus_per_node, "Devices that share the fast links of one machine", {.unit = "devices", .min = 1, .max = 1024});
    v.field("seq_len", seq_len, "Tokens of a row (micro-batch)", {.unit = "tokens", .min = 2});
    v.field("sequence_tokens", sequence_tokens, "Mean length of the sequences packed into a row; seq_len if not set",
            {.unit = "tokens", .min = 1});
    v.field("num_rows", num_rows, "Rows of a step over all devices; of sft 8 if not set, of rl as many as the rollouts fill",
            {.unit = "rows", .min = 1});
    v.field("batch_size", batch_size, "Of rl: rollouts of a step", {.unit = "rollouts", .min = 1});
    v.field("prompt_tokens", prompt_tokens, "Of rl: mean length of a prompt", {.unit = "tokens", .min = 1});
    v.field("completion_tokens", completion_tokens, "Of rl: mean length of an answer", {.unit = "tokens", .min = 1});
    v.field("max_num_seqs", max_num_seqs, "Of rl: sequences that an engine decodes at once", {.unit = "sequences", .min = 1});
    v.field("max_async_level", max_async_level, "Of rl: 0: sampling and training take turns; above: they go on side by side", {.min = 0});
    v.field("dtype", dtype, "Type that is computed in");
    v.field("reduce", reduce, "How gradients of rows are added (model.reduce)");
    v.field("dp_replicate", dp_replicate, "Copies of the state among the devices that train (model.dp_replicate)", {.min = 1});
    v.field("checkpoint_every", checkpoint_every, "Compute every n-th layer again in the backward pass (model.ac.freq), 0 for none",
            {.unit = "layers", .min = 0});
    v.field("optim_cpu_offload", optim_cpu_offload, "Optimizer's state in host memory (model.optim_cpu_offload)");
    v.field("reshard_after_forward", reshard_after_forward, "Layers' weights divided among the devices (model.reshard_after_forward)");
    v.field("ep", ep, "Devices that divide the experts of each layer: all that train, or 1 (model.ep)", {.unit = "devices", .min = 1});
    v.field("fsdp_cpu_offload", fsdp_cpu_offload, "Optimizer's state and masters in host memory (model.fsdp_cpu_offload)");
    v.field("assume_flops", assume_flops, "Peak of a device in place of the card's", {.unit = "TFLOP/s", .min = 0, .is_open_min = true});
    v.field("assume_efficiency", assume_efficiency, "Part of the peaks that is reached, in place of what was measured",
            {.min = 0, .max = 1, .is_open_min = true});
    v.field("assume_bandwidth", assume_bandwidth, "What a device sends to others of its machine, in place of the card's",
            {.unit = "GB/s", .min = 0, .is_open_min = true});
    v.field("assume_node_bandwidth", assume_node_bandwidth, "What a device sends to other machines, in place of the card's",
            {.unit = "GB/s", .min = 0, .is_open_min = true});
    v.field("assume_memory_bandwidth", assume_memory_bandwidth, "Peak of a device's memory in place of the card's",
            {.unit = "GB/s", .min = 0, .is_open_min = true});
    v.field("assume_memory", assume_memory, "Memory of a device in place of the card's", {.unit = "GiB", .min = 0, .is_open_min = true});
    v.field("assume_latency", assume_latency, "Of one exchange between devices", {.unit = "microseconds", .min = 0});
    v.field("json", json, "Print JSON");
  }
};

/// `prl doctor`: what this machine has and what that means.
struct DoctorConfig {
  bool json = false;
  std::filesystem::path output_dir = "outputs";
  template <class V>
  void visit(V& v) {
    v.field("json", json, "Print JSON");
    v.field("output_dir", output_dir, "Folder whose disk is checked");
  }
};

enum class EnvAction { kInstall, kUpdate, kList, kShow, kRemove, kInit };
std::span<const EnumEntry> enum_entries(EnvAction);
enum class EnvTemplate { kLegacy, kV1, kNative };
std::span<const EnumEntry> enum_entries(EnvTemplate);

/// `prl env ACTION [ENVIRONMENT]`: Python environments on this machine, each in a virtual environment of its own.
struct EnvCommandConfig {
  EnvAction action = EnvAction::kList;
  std::optional<std::string> target;
  std::optional<std::string> python;
  std::vector<std::string> with;
  EnvTemplate api = EnvTemplate::kLegacy;
  std::optional<std::filesystem::path> index;
  bool offline = false;
  bool overwrite = false;
  template <class V>
  void visit(V& v) {
    v.field("action", action, "What to do");
    v.field("target", target, "install: name, org/name, name==version, folder, wheel, git+URL; update: id or none; init: folder; else id");
    v.field("python", python, "install, update: interpreter of the virtual environment");
    v.field("with", with, "install: more requirements, \"verifiers<=0.3.1\" for instance");
    v.field("api", api, "init: API of the new environment; native makes questions in JSON that math-env plays, without Python");
    v.field("index", index, "install, update: folder of wheels to take packages from, besides the index that pip and uv are set up for");
    v.field("offline", offline, "install, update: no network; from caches and `index` alone");
    v.field("overwrite", overwrite, "install, init: replace what is there");
  }
};

/// `prl env-server`: Python workers that other machines' runs connect to.
struct EnvServerConfig {
  EnvConfig env;
  std::string address = "127.0.0.1:5000";
  int num_workers = 1;
  std::filesystem::path output_dir = "outputs";
  LogConfig log;
  static constexpr StatusBelow kStatusBelow[] = {{"log.vf_level", inert("the run that connects says it")},
                                                 {"env.name", inert("the run that connects names it")},
                                                 {"env.data", inert("the run that connects gives arguments")},
                                                 {"env.args", inert("the run that connects gives arguments")},
                                                 {"env.ratio", inert("the run that connects chooses tasks")},
                                                 {"env.max_retries", inert("the run that connects tries again")},
                                                 {"env.timeout", inert("the run that connects sets deadlines")},
                                                 {"env.group_size", inert("the run that connects plays groups")},
                                                 {"env.sampling", inert("the run that connects samples")},
                                                 {"env.num_workers", inert("`num_workers` of this command")},
                                                 {"env.agent", inert("the run that connects gives arguments")},
                                                 {"log.interval", inert("there is no progress to log")},
                                                 {"log.step_interval", inert("there are no steps")}};
  template <class V>
  void visit(V& v) {
    v.field("env", env, "The environment");
    v.field("address", address, "host:port to listen on; further workers take the ports after it");
    v.field("num_workers", num_workers, "Workers, each for one connection at a time", {.min = 1});
    v.field("output_dir", output_dir, "Folder of logs");
    v.field("log", log, "Logging");
  }
};

/// `prl launch`: the ranks of one node. The words from `sft` or `trainer` on are the command of each rank.
struct LaunchConfig {
  std::optional<int> nproc_per_node;
  std::optional<int> nnodes;
  std::optional<int> node_rank;
  std::optional<std::string> rdzv_endpoint;
  std::string rdzv_id = "run";
  std::optional<std::string> node_host;
  std::optional<std::filesystem::path> log_dir;
  template <class V>
  void visit(V& v) {
    v.field("nproc_per_node", nproc_per_node, "Ranks of this node, one per GPU; deployment.gpus_per_node or 1 if not set",
            {.unit = "ranks", .min = 1, .max = 1024});
    v.field("nnodes", nnodes,
            "Nodes, each with one `prl launch`; from the deployment, PRL_NUM_NODES, SLURM's step or STATEFUL_REPLICAS if not set",
            {.unit = "nodes", .min = 1, .max = 4096});
    v.field("node_rank", node_rank,
            "Which node this is, from 0; PRL_NODE_RANK, SLURM_NODEID or the number at the end of POD_NAME if not set",
            {.min = 0, .max = 4095});
    v.field("rdzv_endpoint", rdzv_endpoint,
            "host:port of node 0 where the nodes meet; PRL_RDZV_ENDPOINT, or a free port of this machine if there is one node");
    v.field("rdzv_id", rdzv_id, "Name of the run; nodes of another run at the same endpoint are refused");
    v.field("node_host", node_host, "Address at which the other nodes reach this one; the one that leads to the endpoint if not set");
    v.field("log_dir", log_dir, "Folder of the ranks' output; <command>/ in the logs of the attempt if not set");
  }
};

struct EvalsOnlineConfig {
  std::optional<std::filesystem::path> broadcasts_dir;
  std::optional<std::int64_t> max_steps;
  std::optional<std::int64_t> resume_step;
  double timeout = 86400;
  bool every_step = false;
  bool remove_evaluated = false;
  template <class V>
  void visit(V& v) {
    v.field("broadcasts_dir", broadcasts_dir, "The run's folder of step_N weights: broadcasts/ of RL, weights/ of checkpoints");
    v.field("max_steps", max_steps, "Last step of the run, which is always evaluated and ends the command", {.unit = "steps", .min = 1});
    v.field("resume_step", resume_step, "Step the run resumed from: no earlier one is evaluated, nor the base model",
            {.unit = "steps", .min = 0});
    v.field("timeout", timeout, "Longest wait for the next step", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("every_step", every_step,
            "Evaluate each step once, the oldest first, and none that the metrics file has a row of; else the newest one each time");
    v.field("remove_evaluated", remove_evaluated, "Remove the weights of a step, and of those before it, when it is evaluated");
  }
};

/// `prl evals`: evaluations once, or while a training run goes on. `prl eval` evaluates saved weights.
struct EvalsConfig {
  static constexpr StatusBelow kStatusBelow[] = {
      {"eval.cancel_inflight_rollouts_on_eval", inert("no rollouts of training are played here")},
      {"log.step_interval", inert("there are no steps")},
      {"weight_broadcast", inert("weights are read from online.broadcasts_dir")}};
  std::string model = "Qwen/Qwen3-0.6B";
  OnlineEvalConfig eval;
  ClientConfig client;
  std::optional<EvalEngineConfig> inference;
  std::optional<EvalsOnlineConfig> online;
  std::optional<WeightBroadcast> weight_broadcast;
  std::filesystem::path output_dir = "outputs";
  LogConfig log;
  FileMonitorConfig file_monitor;
  std::optional<WandbConfig> wandb;
  bool dry_run = false;
  template <class V>
  void visit(V& v) {
    v.field("model", model, "Name that the server serves, or a model folder for this process, if no server is named");
    v.field("eval", eval, "Environments and sampling");
    v.field("client", client, "The server");
    v.field("inference", inference, "Engine in this process for the folder of the model; set, no server is asked");
    v.field("online", online, "Follow a training run");
    v.field("weight_broadcast", weight_broadcast, "How new weights arrive",
            {.status = inert("weights are read from online.broadcasts_dir")});
    v.field("output_dir", output_dir, "Folder of logs and results");
    v.field("log", log, "Logging");
    v.field("file_monitor", file_monitor, "Metrics as JSONL");
    v.field("wandb", wandb, "Weights & Biases",
            {.status = inert("metrics go to a file of output_dir alone; no run is kept for a later upload")});
    v.field("dry_run", dry_run, "Check, write the resolved configuration and stop");
  }
};

}  // namespace prl::config
