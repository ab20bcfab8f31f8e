#pragma once

#include <array>
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

/// How rollouts and weights travel between the roles, and how a role finds an inference server.
namespace prl::config {

/// Rollouts in the memory of one process.
struct LocalRollouts {
  static constexpr std::string_view kType = "local";
  int capacity = 2;
  template <class V>
  void visit(V& v) {
    v.field("capacity", capacity, "Batches that may wait", {.unit = "batches", .min = 1});
  }
};

struct FilesystemRollouts {
  static constexpr std::string_view kType = "filesystem";
  template <class V>
  void visit(V&) {}
};

struct ZmqRollouts {
  static constexpr std::string_view kType = "zmq";
  std::string host = "localhost";
  int port = 5555;
  int hwm = 10;
  template <class V>
  void visit(V& v) {
    v.field("host", host, "Host of the orchestrator");
    v.field("port", port, "Port of the samples; the next one is used too", {.min = 1, .max = 65534});
    v.field("hwm", hwm, "Messages that may wait", {.unit = "messages", .min = 1});
  }
};

using RolloutTransport = std::variant<LocalRollouts, FilesystemRollouts, ZmqRollouts>;

/// Trainer and engine share the weights of one process.
struct LocalBroadcast {
  static constexpr std::string_view kType = "local";
  template <class V>
  void visit(V&) {}
};

/// safetensors under <output_dir>/broadcasts/step_N with a STABLE marker.
struct FilesystemBroadcast {
  static constexpr std::string_view kType = "filesystem";
  bool save_sharded = true;
  std::string save_format = "safetensors";
  bool adapter_only = false;
  template <class V>
  void visit(V& v) {
    v.field("save_sharded", save_sharded, "Split the weights into files of at most 5 GB with an index",
            {.status = inert("weights of more than 5 GB are always split")});
    v.field("save_format", save_format, "Format of the weights: safetensors", {.status = inert("safetensors is the only format")});
    v.field("adapter_only", adapter_only, "Send only the LoRA adapter",
            {.status = inert("of a run that trains an adapter only the adapter is ever sent")});
  }
};

/// From the trainer's memory to each engine's over a group of both, without
/// files.
struct NcclBroadcast {
  static constexpr std::string_view kType = "nccl";
  std::string host = "localhost";
  int port = 29501;
  int timeout = 1200;
  bool quantize_in_weight_transfer = false;
  int inference_world_size = 1;
  std::optional<int> num_senders;
  template <class V>
  void visit(V& v) {
    v.field("host", host, "Host of the first trainer rank, as engines reach it");
    v.field("port", port, "Port at which engines ask it for weights", {.min = 1, .max = 65535});
    v.field("timeout", timeout, "Longest wait for an engine in one transfer", {.unit = "seconds", .min = 1});
    v.field("quantize_in_weight_transfer", quantize_in_weight_transfer, "Send 8-bit weights", {.status = not_built("weights of 8 bits")});
    v.field("inference_world_size", inference_world_size, "Number of inference devices",
            {.unit = "devices", .min = 1, .status = inert("engines ask for weights themselves, however many there are")});
    v.field(
        "num_senders", num_senders,
        "Trainer ranks that send a part of the weights each; all if engines reach host over a network, the first alone if it is localhost",
        {.unit = "ranks", .min = 1});
  }
};

struct NixlBroadcast {
  static constexpr std::string_view kType = "nixl";
  static constexpr Status kStatus = not_built("weight updates over NIXL", "use filesystem, or local in one process");
  std::string host = "localhost";
  int port = 8001;
  int timeout = 1200;
  std::string session_id = "default";
  template <class V>
  void visit(V& v) {
    v.field("host", host, "Host of the metadata server");
    v.field("port", port, "Port of the metadata server", {.min = 1, .max = 65535});
    v.field("timeout", timeout, "Longest wait for the others", {.unit = "seconds", .min = 1});
    v.field("session_id", session_id, "Name of the session");
  }
};

using WeightBroadcast = std::variant<FilesystemBroadcast, LocalBroadcast, NcclBroadcast, NixlBroadcast>;

/// Values of client.extra_headers_from_state.
inline constexpr std::array<std::string_view, 4> kRolloutStateFields{"trajectory_id", "example_id", "rollout_idx", "task"};

/// How a router in front of several engines spreads requests, under the names of vllm-router.
enum class RouterPolicy { kConsistentHash, kRoundRobin, kRandom, kCacheAware, kPowerOfTwo };
std::span<const EnumEntry> enum_entries(RouterPolicy);

/// How requests are spread over several engines: keys and defaults of vllm-router.
struct RoutingConfig {
  RouterPolicy policy = RouterPolicy::kConsistentHash;
  double cache_threshold = 0.3;
  std::int64_t balance_abs_threshold = 64;
  double balance_rel_threshold = 1.5;
  std::int64_t max_tree_size = 1 << 26;
  double eviction_interval_secs = 120;
  template <class V>
  void visit(V& v) {
    v.field("policy", policy,
            "Which engine gets a request: by its session, each in turn, at random, the less busy of two, or by its prompt (cache_aware)");
    v.field("cache_threshold", cache_threshold, "cache_aware: least part of a prompt that must have been sent to an engine before",
            {.min = 0, .max = 1});
    v.field("balance_abs_threshold", balance_abs_threshold,
            "cache_aware: where engines differ by more requests than this, and by balance_rel_threshold, the least busy gets the next",
            {.unit = "requests", .min = 0});
    v.field("balance_rel_threshold", balance_rel_threshold, "cache_aware: the busiest engine's requests, relative to the least busy one's",
            {.min = 1});
    v.field("max_tree_size", max_tree_size, "cache_aware: text of prompts that is remembered for each engine; takes up to twice the memory",
            {.unit = "bytes", .min = 64});
    v.field("eviction_interval_secs", eviction_interval_secs, "cache_aware: how often what is too much is forgotten",
            {.unit = "seconds", .min = 0, .status = inert("it is forgotten at once")});
  }
};

/// Engines that compute prompts for others.
struct PrefillConfig {
  std::vector<std::string> base_url;
  int non_cached_tokens = 16;
  template <class V>
  void visit(V& v) {
    v.field("base_url", base_url, "Addresses of engines that compute long prompts for the others; they take weight updates, too");
    v.field("non_cached_tokens", non_cached_tokens,
            "Tokens of a prompt outside an engine's prefix cache that it computes itself; with more, one of base_url does",
            {.unit = "tokens", .min = 0});
  }
};

/// An OpenAI-compatible server and how to reach it.
struct ClientConfig {
  std::vector<std::string> base_url = {"http://localhost:8000/v1"};
  std::string api_key_var = "VLLM_API_KEY";
  double timeout = 1200;
  double wait_for_ready_timeout = 1800;
  std::map<std::string, std::string> headers;
  std::map<std::string, std::string> headers_from_env;
  std::map<std::string, std::string> extra_headers_from_state;
  bool skip_model_check = false;
  std::optional<std::vector<std::string>> admin_base_url;
  template <class V>
  void visit(V& v) {
    v.field("base_url", base_url, "Addresses of servers, each ending in /v1; requests are spread over them");
    v.field("api_key_var", api_key_var, "Environment variable that holds the API key");
    v.field("timeout", timeout, "Longest wait for one reply", {.unit = "seconds", .min = 0, .is_open_min = true});
    v.field("wait_for_ready_timeout", wait_for_ready_timeout, "Longest wait for the server to come up", {.unit = "seconds", .min = 0});
    v.field("headers", headers, "Headers sent with every request");
    v.field("headers_from_env", headers_from_env, "Headers whose values are read from environment variables");
    v.field("extra_headers_from_state", extra_headers_from_state,
            "Headers whose values are read from the rollout's state: trajectory_id, example_id, rollout_idx or task");
    v.field("skip_model_check", skip_model_check, "Do not ask /v1/models whether the model is served");
    v.field("admin_base_url", admin_base_url, "Addresses for weight updates, if they are others");
  }
};

}  // namespace prl::config
