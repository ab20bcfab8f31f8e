#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/schema.hpp"
#include "config/shared_config.hpp"
#include "config/transport_config.hpp"

namespace prl::config {

struct ServerConfig {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::optional<std::string> api_key;
  std::optional<std::string> admin_api_key;
  std::vector<std::string> cors_origins;
  std::vector<std::string> allowed_hosts;
  std::int64_t max_body_bytes = 64 << 20;
  std::int64_t max_held_body_bytes = 256 << 20;
  int max_connections = 4096;
  int max_queued_requests = 1024;
  double request_timeout = 3600;
  double liveness_timeout_seconds = 30;
  bool strict = false;
  template <class V>
  void visit(V& v) {
    v.field("host", host, "Address to listen on; 0.0.0.0 for all");
    v.field("port", port, "Port to listen on, 0 for any free one", {.min = 0, .max = 65535});
    v.field("api_key", api_key, "Key that requests must show; none if not set");
    v.field("admin_api_key", admin_api_key, "Key of the routes that change weights or state; api_key if not set");
    v.field("cors_origins", cors_origins, "Origins of web pages that may use the server, as https://host:port; * for all");
    v.field("allowed_hosts", allowed_hosts,
            "Names by which a server on a loopback address may be called besides localhost, where no key is set; * for any");
    v.field("max_body_bytes", max_body_bytes, "Largest request body", {.unit = "bytes", .min = 1024});
    v.field("max_held_body_bytes", max_held_body_bytes, "Most bytes of request bodies held at one time; more are answered 503",
            {.unit = "bytes", .min = 1024});
    v.field("max_connections", max_connections, "Most open connections", {.min = 1});
    v.field("max_queued_requests", max_queued_requests, "Requests that may wait; more are answered 429", {.min = 1});
    v.field("request_timeout", request_timeout, "Longest time of one request", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("liveness_timeout_seconds", liveness_timeout_seconds, "Time without an engine step after which the server calls itself dead",
            {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("strict", strict, "Refuse requests with members that have no effect; without it X-Prl-Ignored names them");
  }
};

struct InferenceModelConfig {
  std::string name = "Qwen/Qwen3-0.6B";
  std::optional<std::string> served_name;
  ComputeDType dtype = ComputeDType::kAuto;
  std::optional<int> max_model_len;
  bool trust_remote_code = false;
  bool enforce_eager = false;
  std::optional<std::string> chat_template;
  bool enable_auto_tool_choice = false;
  std::optional<std::string> tool_call_parser = "auto";
  std::optional<std::string> reasoning_parser;
  std::string generation_config = "auto";
  Value rope_scaling;
  std::optional<std::string> quantization;
  std::optional<LatentAttention> latent_attention;
  template <class V>
  void visit(V& v) {
    v.field("name", name, "Folder of a Hugging Face model (config.json, safetensors, tokenizer.json), or its id on the hub");
    v.field("served_name", served_name, "Name that clients use; the model's name if not set");
    v.field("dtype", dtype,
            "Type of weights and products; auto is bfloat16 where the device has it, else float32; float16 computes in float32");
    v.field("max_model_len", max_model_len, "Longest prompt plus completion; the model's own limit if not set",
            {.unit = "tokens", .min = 1});
    v.field("trust_remote_code", trust_remote_code, "Run Python code of the model folder",
            {.status = inert("no code of a model folder is ever run")});
    v.field("enforce_eager", enforce_eager, "Do not record CUDA graphs");
    v.field("chat_template", chat_template, "Jinja text, or the path of a file that holds it");
    v.field("enable_auto_tool_choice", enable_auto_tool_choice, "Let the model decide to call tools");
    v.field("tool_call_parser", tool_call_parser,
            "How tool calls are read: auto, hermes, qwen3_coder, glm45, minimax_m2, deepseek_v3, kimi_k2, ...; None for not at all");
    v.field("reasoning_parser", reasoning_parser, "How reasoning is split off: auto, qwen3, deepseek_r1, think, ...; None for not at all");
    v.field("generation_config", generation_config,
            "Sampling defaults of chat and completions: auto (the model's generation_config.json), vllm (none), "
            "or a folder that holds the file");
    v.field("rope_scaling", rope_scaling,
            "Table in place of rope_scaling in config.json, for longer texts: rope_type (yarn, linear, llama3, longrope, default) and its "
            "keys");
    v.field("quantization", quantization,
            "fp8: weights of 8 bits, with a factor for each row; w8a8_fp8: inputs of products too. Exact beside a trainer with the same");
    v.field("latent_attention", latent_attention,
            "Of models with latent attention: what the cache holds, latents, which take little of it, or heads; latents if not set");
  }
};

struct ParallelConfig {
  int tp = 1;
  int dp = 1;
  std::optional<int> dp_local;
  std::optional<std::string> dp_address;
  int dp_rpc_port = 13345;
  int dp_start_rank = 0;
  bool headless = false;
  template <class V>
  void visit(V& v) {
    v.field("tp", tp, "Devices of one engine, which share each layer, with the bits of one: for models that one GPU does not hold",
            {.unit = "devices", .min = 1, .max = 8});
    v.field("dp", dp, "Copies of the model, each an engine in a process of its own; a router is in front of those of `prl inference`",
            {.min = 1, .max = 1024});
    v.field("dp_local", dp_local, "Copies of the model on this node; all of them if not set", {.min = 1, .max = 1024});
    v.field("dp_address", dp_address,
            "Address of the node whose router is in front of the copies of all nodes; needed where there are several");
    v.field("dp_rpc_port", dp_rpc_port, "Port at dp_address where the nodes tell their engines", {.min = 1, .max = 65535});
    v.field("dp_start_rank", dp_start_rank, "First copy of this node", {.min = 0, .max = 1023});
    v.field("headless", headless, "Run engines without a router, for the one at dp_address");
  }
};

/// Key-value cache.
struct KvConfig {
  std::optional<int> block_size;
  std::optional<int> num_blocks;
  template <class V>
  void visit(V& v) {
    v.field("block_size", block_size, "Tokens per block; 16, on a GPU 32, if not set", {.unit = "tokens", .min = 1, .max = 256});
    v.field("num_blocks", num_blocks, "Blocks; from the memory that is free if not set", {.unit = "blocks", .min = 1});
  }
};

enum class DraftMethod { kNgram, kDraftModel, kMtp };
std::span<const EnumEntry> enum_entries(DraftMethod);

/// Speculative decoding: drafts are what followed the last tokens where they occurred before, or what a smaller model draws, or the model's
/// own head for multi-token prediction.
struct SpeculativeConfig {
  std::optional<DraftMethod> method;
  int num_tokens = 0;
  int max_ngram = 4;
  int min_ngram = 2;
  bool from_completions = true;
  std::int64_t max_stored_tokens = std::int64_t{1} << 20;
  std::optional<std::string> draft_model;
  bool adaptive = true;
  template <class V>
  void visit(V& v) {
    v.field("method", method,
            "ngram looks drafts up, draft_model and mtp (the model's own head) draw them; not set: draft_model if named, else ngram");
    v.field("num_tokens", num_tokens, "Most draft tokens of a sequence in one step; 0 for none. No token or log-probability depends on it",
            {.unit = "tokens", .min = 0, .max = 15});
    v.field("max_ngram", max_ngram, "Longest run of last tokens that is looked up", {.unit = "tokens", .min = 1, .max = 32});
    v.field("min_ngram", min_ngram, "Shortest run of last tokens that is looked up", {.unit = "tokens", .min = 1, .max = 32});
    v.field("from_completions", from_completions,
            "Also look in other completions of the same prompt, those of a group and of former epochs; not only in the text itself");
    v.field("max_stored_tokens", max_stored_tokens, "Most tokens of completions that are kept for it, about 100 bytes each",
            {.unit = "tokens", .min = 0, .max = std::int64_t{1} << 40});
    v.field("draft_model", draft_model,
            "Smaller model of the same vocabulary that draws the drafts: a folder or hub id. It stays as it is");
    v.field("adaptive", adaptive,
            "Of draft_model and mtp: fewer drafts, or none, where they cost more time than they save; else always num_tokens");
  }
};

/// Key-value blocks in host memory.
struct KvOffloadCpuConfig {
  std::int64_t num_bytes = std::int64_t{4} << 30;
  template <class V>
  void visit(V& v) {
    v.field("num_bytes", num_bytes, "Host memory of each engine for blocks that its devices have no room for, page-locked on GPUs",
            {.unit = "bytes", .min = 1});
  }
};
/// Key-value blocks in files.
struct KvOffloadDiskConfig {
  std::optional<std::filesystem::path> path;
  std::int64_t num_bytes = std::int64_t{16} << 30;
  double read_timeout = 0.05;
  template <class V>
  void visit(V& v) {
    v.field("path", path, "Folder of the files, one for each device of each engine, which are removed at the end");
    v.field("num_bytes", num_bytes, "Size of the files of each engine together", {.unit = "bytes", .min = 1});
    v.field("read_timeout", read_timeout, "Longest time that a step waits for blocks from files; those that are late are computed again",
            {.unit = "seconds", .min = 0, .max = 60, .is_open_min = true});
  }
};
struct NativeKvOffloadConfig {
  static constexpr std::string_view kType = "native";
  KvOffloadCpuConfig cpu;
  std::optional<KvOffloadDiskConfig> disk;
  template <class V>
  void visit(V& v) {
    v.field("cpu", cpu, "In host memory");
    v.field("disk", disk, "In files, when host memory has no room for them; none if not set");
  }
};
struct MooncakeKvOffloadConfig {
  static constexpr std::string_view kType = "mooncake";
  static constexpr Status kStatus = not_built("key-value blocks in a Mooncake store", "use native, which keeps them in host memory");
  std::optional<KvOffloadCpuConfig> cpu;
  std::optional<KvOffloadDiskConfig> disk;
  std::string device_name;
  template <class V>
  void visit(V& v) {
    v.field("cpu", cpu, "In host memory");
    v.field("disk", disk, "In files");
    v.field("device_name", device_name, "Network device of the store");
  }
};
using KvOffloadConfig = std::variant<NativeKvOffloadConfig, MooncakeKvOffloadConfig>;

/// Key-value blocks that engines send each other.
struct KvTransferConfig {
  int port = 5600;
  std::optional<std::string> api_key;
  std::int64_t num_bytes = std::int64_t{4} << 30;
  double timeout = 30;
  template <class V>
  void visit(V& v) {
    v.field("port", port, "Port where the first engine of a machine gives blocks to others, the next have those that follow; 0 for any",
            {.min = 0, .max = 65535});
    v.field("api_key", api_key, "What engines show each other; server.admin_api_key or api_key if not set, on one machine a made-up one");
    v.field("num_bytes", num_bytes, "Host memory of each engine for blocks on their way, page-locked on GPUs; kv_cache_offload.cpu if more",
            {.unit = "bytes", .min = 1});
    v.field("timeout", timeout, "Longest time that a request waits for blocks; the rest of its prompt is computed where it decodes",
            {.unit = "seconds", .min = 0, .max = 3600, .is_open_min = true});
  }
};

struct VllmRouterConfig : RoutingConfig {
  static constexpr std::string_view kType = "vllm-router";
};
struct LlmDRouterConfig {
  static constexpr std::string_view kType = "llm-d";
  static constexpr Status kStatus =
      not_built("a router of llm-d", "leave router out, or use vllm-router, which is the router of this program");
  Value scorers = Value::table();
  Value prefill_scorer_overrides = Value::table();
  Value decode_scorer_overrides = Value::table();
  int non_cached_tokens = 16;
  int decode_sidecar_port = 8300;
  template <class V>
  void visit(V& v) {
    v.field("scorers", scorers, "Weights of the scorers");
    v.field("prefill_scorer_overrides", prefill_scorer_overrides, "Weights for prefill engines");
    v.field("decode_scorer_overrides", decode_scorer_overrides, "Weights for decode engines");
    v.field("non_cached_tokens", non_cached_tokens, "Tokens outside the cache that make a prefill", {.unit = "tokens", .min = 0});
    v.field("decode_sidecar_port", decode_sidecar_port, "Port of the sidecar", {.min = 1, .max = 65535});
  }
};
using RouterConfig = std::variant<VllmRouterConfig, LlmDRouterConfig>;

struct InferenceSingleNode {
  static constexpr std::string_view kType = "single_node";
  int gpus_per_node = 8;
  template <class V>
  void visit(V& v) {
    v.field("gpus_per_node", gpus_per_node, "GPUs of the node",
            {.unit = "GPUs", .min = 1, .status = inert("parallel.dp says how many engines there are, one per GPU")});
  }
};
struct InferenceMultiNode {
  static constexpr std::string_view kType = "multi_node";
  int num_nodes = 2;
  int gpus_per_node = 8;
  template <class V>
  void visit(V& v) {
    v.field("num_nodes", num_nodes, "Nodes, each with one `prl launch inference`", {.unit = "nodes", .min = 1, .max = 1024});
    v.field("gpus_per_node", gpus_per_node, "GPUs of each node, an engine on each; on CPUs one process each",
            {.unit = "GPUs", .min = 1, .max = 1024});
  }
};
struct InferenceDisaggregated {
  static constexpr std::string_view kType = "disaggregated";
  int gpus_per_node = 8;
  int prefill_nodes_per_replica = 1;
  int decode_nodes_per_replica = 1;
  int num_prefill_replicas = 1;
  int num_decode_replicas = 1;
  int prefill_port = 8100;
  int decode_port = 8200;
  int non_cached_tokens = 16;
  std::map<std::string, std::string> prefill_env_vars;
  std::map<std::string, std::string> decode_env_vars;
  Value prefill_vllm_overrides = Value::table();
  Value decode_vllm_overrides = Value::table();
  template <class V>
  void visit(V& v) {
    v.field("gpus_per_node", gpus_per_node, "GPUs of each node, an engine on each; `prl inference` on one machine has one engine per node",
            {.unit = "GPUs", .min = 1, .max = 1024});
    v.field("prefill_nodes_per_replica", prefill_nodes_per_replica, "Nodes of a prefill replica", {.unit = "nodes", .min = 1, .max = 1024});
    v.field("decode_nodes_per_replica", decode_nodes_per_replica, "Nodes of a decode replica", {.unit = "nodes", .min = 1, .max = 1024});
    v.field("num_prefill_replicas", num_prefill_replicas, "Prefill replicas", {.min = 1, .max = 1024});
    v.field("num_decode_replicas", num_decode_replicas, "Decode replicas", {.min = 1, .max = 1024});
    v.field("prefill_port", prefill_port, "Port of the first prefill engine of a machine; the others' follow", {.min = 1, .max = 65535});
    v.field("decode_port", decode_port, "Port of the first decode engine of a machine; the others' follow", {.min = 1, .max = 65535});
    v.field("non_cached_tokens", non_cached_tokens,
            "Tokens of a prompt outside a decode engine's prefix cache that it computes itself; with more, a prefill engine does",
            {.unit = "tokens", .min = 0});
    v.field("prefill_env_vars", prefill_env_vars, "Environment variables of prefill engines");
    v.field("decode_env_vars", decode_env_vars, "Environment variables of decode engines");
    v.field("prefill_vllm_overrides", prefill_vllm_overrides, "Engine settings of prefill engines, under vLLM's names");
    v.field("decode_vllm_overrides", decode_vllm_overrides, "Engine settings of decode engines, under vLLM's names");
  }
};
/// Engines of a deployment with one engine for each node.
inline int num_prefill_nodes(const InferenceDisaggregated& d) { return d.num_prefill_replicas * d.prefill_nodes_per_replica; }
inline int num_decode_nodes(const InferenceDisaggregated& d) { return d.num_decode_replicas * d.decode_nodes_per_replica; }
inline int num_nodes_of(const InferenceDisaggregated& d) { return num_prefill_nodes(d) + num_decode_nodes(d); }
/// What differs between the engines of a kind, as flags of `prl inference`: {"--kv.num-blocks", "64"}. Members that are no such setting or
/// have no text are left out, and named in `unknown` if that is given.
std::vector<std::pair<std::string, std::string>> engine_flags_of(const Value& vllm_overrides, std::vector<std::string>* unknown = nullptr);
using InferenceDeployment = std::variant<InferenceSingleNode, InferenceMultiNode, InferenceDisaggregated>;

/// `prl inference`, and the section [inference] of `prl rl`.
struct InferenceConfig {
  ServerConfig server;
  InferenceModelConfig model;
  ParallelConfig parallel;
  KvConfig kv;
  ComputeConfig compute;
  int max_num_seqs = 256;
  int max_num_batched_tokens = 2048;
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = true;
  double gpu_memory_utilization = 0.9;
  std::int64_t seed = 0;
  bool deterministic = false;
  WeightBroadcast weight_broadcast;
  std::filesystem::path output_dir = "outputs";
  LogConfig log;
  bool enable_fp32_lm_head = true;
  bool enable_fp32_router_logits = true;
  bool enable_lora = false;
  int max_loras = 8;
  int max_cpu_loras = 100;
  std::optional<int> max_lora_rank;
  ComputeDType lora_dtype = ComputeDType::kAuto;
  std::map<std::string, std::string> lora_modules;
  int api_server_count = 1;
  bool enable_expert_parallel = false;
  bool enable_return_routed_experts = false;
  bool use_deep_gemm = false;
  bool use_pd_kv_transfer = false;
  KvTransferConfig kv_transfer;
  std::optional<KvOffloadConfig> kv_cache_offload;
  SpeculativeConfig speculative;
  std::optional<RouterConfig> router;
  int backend_port = 8100;
  InferenceDeployment deployment;
  std::optional<SlurmConfig> slurm;
  std::map<std::string, std::string> env_vars;
  Value vllm = Value::table();
  bool dry_run = false;
  static constexpr StatusBelow kStatusBelow[] = {{"log.interval", inert("a server logs no progress")},
                                                 {"log.vf_level", inert("no environment runs here")},
                                                 {"log.step_interval", inert("a server logs no steps")},
                                                 {"weight_broadcast", inert("new weights come with POST /update_weights")}};
  template <class V>
  void visit(V& v) {
    v.field("server", server, "HTTP server");
    v.field("model", model, "The served model");
    v.field("parallel", parallel, "Devices and copies");
    v.field("kv", kv, "Key-value cache");
    v.field("compute", compute, "Device and precision");
    v.field("max_num_seqs", max_num_seqs, "Most requests that run at once", {.unit = "requests", .min = 1});
    v.field("max_num_batched_tokens", max_num_batched_tokens, "Most tokens of one engine step", {.unit = "tokens", .min = 1});
    v.field("enable_prefix_caching", enable_prefix_caching, "Reuse the cache of equal prompt beginnings");
    v.field("enable_chunked_prefill", enable_chunked_prefill, "Split long prompts over several steps");
    v.field("gpu_memory_utilization", gpu_memory_utilization, "Part of a GPU that an engine without a trainer beside it may take",
            {.min = 0, .max = 1, .is_open_min = true});
    v.field("seed", seed, "Seed of requests that set none", {.min = 0});
    v.field("deterministic", deterministic, "Fixed order everywhere: the same seed gives the same bits",
            {.status = inert("the same seed gives the same bits with and without it: sums have a fixed order")});
    v.field("weight_broadcast", weight_broadcast, "How new weights arrive");
    v.field("output_dir", output_dir, "Folder of logs and resolved configurations");
    v.field("log", log, "Logging");
    v.field("enable_fp32_lm_head", enable_fp32_lm_head, "Sum the LM head in float32",
            {.status = inert("the LM head always sums in float32")});
    v.field("enable_fp32_router_logits", enable_fp32_router_logits, "Compute routers in float32",
            {.status = inert("a router computes in float32 whatever the type of the model")});
    v.field("enable_lora", enable_lora, "Serve LoRA adapters, which requests name as model");
    v.field("max_loras", max_loras, "Most adapters of one batch, and on the device", {.min = 1});
    v.field("max_cpu_loras", max_cpu_loras, "Most adapters in host memory; one that left it is read again when a request names it",
            {.min = 1});
    v.field("max_lora_rank", max_lora_rank, "Largest rank of an adapter; rounded up to 8, 16, 32, 64, 128, 256, 320 or 512; unset, 16",
            {.min = 1, .max = 512});
    v.field("lora_dtype", lora_dtype, "Type that adapters compute in: float32, or auto, that of the model");
    v.field("lora_modules", lora_modules, "Adapters that are loaded at the start: name and folder");
    v.field("api_server_count", api_server_count, "Processes that answer HTTP; each has an engine, so it is parallel.dp if that is larger",
            {.min = 0, .max = 1024, .status = passed_on("parallel.dp")});
    v.field("enable_expert_parallel", enable_expert_parallel, "Give each device some of the experts, whole",
            {.status = inert("parallel.tp devices have a part of every expert each, and read as much of the weights")});
    v.field("enable_return_routed_experts", enable_return_routed_experts,
            "Of mixtures of experts: /inference/v1/generate tells which experts the tokens had in each layer");
    v.field("use_deep_gemm", use_deep_gemm, "8-bit products with block scales", {.status = not_built("8-bit products")});
    v.field("use_pd_kv_transfer", use_pd_kv_transfer,
            "Give key-value blocks of prompts to other engines and take theirs; deployment.type disaggregated sets it");
    v.field("kv_transfer", kv_transfer, "How blocks go from engine to engine, with use_pd_kv_transfer");
    v.field("kv_cache_offload", kv_cache_offload, "Keep key-value blocks that leave the device's cache in host memory");
    v.field("speculative", speculative, "Several tokens of a sequence in one step, by guessing them; speculative_config in vLLM's form");
    v.field("router", router, "Router in front of several engines; there is one wherever there are several, set or not");
    v.field("backend_port", backend_port, "Port of the first engine behind the router of `prl inference`; the others' follow",
            {.min = 1, .max = 65535});
    v.field("deployment", deployment, "Nodes");
    v.field("slurm", slurm, "Submit as a batch job instead of running here");
    v.field("env_vars", env_vars, "Environment variables of the process");
    v.field("vllm", vllm, "Engine settings under vLLM's names that have no key of their own",
            {.status = not_built("a setting of vLLM that has no key here")});
    v.field("dry_run", dry_run, "Check, write the resolved configuration and stop");
  }
};

/// The engine that a process of evaluations has for itself. Nobody else asks it: what is about a server has no effect.
struct EvalEngineConfig : InferenceConfig {
  static constexpr Status kNoServer = inert("the engine is in the process of the evaluations, which alone asks it");
  static constexpr Status kOneEngine = inert("one engine evaluates");
  static constexpr Status kNoAdapters = inert("an adapter that is trained is evaluated without it");
  static constexpr StatusBelow kStatusBelow[] = {{"server", kNoServer},
                                                 {"model.served_name", kNoServer},
                                                 {"model.enable_auto_tool_choice", inert("environments decide whether there are tools")},
                                                 {"model.generation_config", inert("eval.sampling says how replies are sampled")},
                                                 {"parallel.tp", built()},
                                                 {"parallel", kOneEngine},
                                                 {"api_server_count", kOneEngine},
                                                 {"backend_port", kOneEngine},
                                                 {"router", kOneEngine},
                                                 {"deployment", kOneEngine},
                                                 {"use_pd_kv_transfer", kOneEngine},
                                                 {"kv_transfer", kOneEngine},
                                                 {"slurm", inert("it is a part of the run's job")},
                                                 {"weight_broadcast", inert("weights are read from files")},
                                                 {"output_dir", inert("the run's output_dir says it")},
                                                 {"log", inert("the run's log says it")},
                                                 {"dry_run", inert("the run's dry_run says it")},
                                                 {"enable_lora", kNoAdapters},
                                                 {"max_loras", kNoAdapters},
                                                 {"max_cpu_loras", kNoAdapters},
                                                 {"max_lora_rank", kNoAdapters},
                                                 {"lora_modules", inert("the trained model alone is evaluated")}};
};

/// Processes with an engine that `config` asks for: each answers HTTP itself.
inline int num_engines(const InferenceConfig& config) { return std::max(config.parallel.dp, config.api_server_count); }
/// How many of them `num_gpus` GPUs have, one at least.
inline int num_engines_on(const InferenceConfig& config, int num_gpus) { return std::max(1, num_gpus / config.parallel.tp); }
/// GPUs of all of them.
inline int num_engine_gpus(const InferenceConfig& config) { return num_engines(config) * config.parallel.tp; }

}  // namespace prl::config
