#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/hosts.hpp"
#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace detail {
namespace {

/// scheme://host[:port], as browsers write it: no path, no slash at the end.
bool is_origin(std::string_view text) {
  const std::size_t scheme = text.find("://");
  if (scheme == std::string_view::npos || scheme == 0) return false;
  const std::string_view rest = text.substr(scheme + 3);
  return !rest.empty() && rest.find_first_of("/?#@, ") == std::string_view::npos;
}

/// What may differ between prefill and decode engines, in vLLM's names: nothing that a block's bits or bytes depend on.
constexpr std::pair<std::string_view, std::string_view> kRoleSettings[] = {
    {"max_num_seqs", "--max-num-seqs"},
    {"max_num_batched_tokens", "--max-num-batched-tokens"},
    {"gpu_memory_utilization", "--gpu-memory-utilization"},
    {"num_gpu_blocks_override", "--kv.num-blocks"},
    {"enforce_eager", "--model.enforce-eager"},
    {"enable_chunked_prefill", "--enable-chunked-prefill"},
    {"max_loras", "--max-loras"},
    {"max_cpu_loras", "--max-cpu-loras"},
};

/// Prefill and decode engines.
void check_disaggregated(InferenceConfig& config, const InferenceDisaggregated& nodes, const Check& check) {
  config.use_pd_kv_transfer = true;
  ParallelConfig& parallel = config.parallel;
  if (parallel.headless || parallel.dp_address || parallel.dp_start_rank > 0)
    check.problem("deployment.type", "disaggregated places its engines itself: leave parallel.dp_address, dp_start_rank and headless out");
  if (nodes.gpus_per_node % parallel.tp != 0)
    check.problem("parallel.tp", fmt::format("is {}, which does not divide the {} GPUs of a node", parallel.tp, nodes.gpus_per_node));
  const int num_prefill = num_prefill_nodes(nodes), num_decode = num_decode_nodes(nodes);
  parallel.dp = config.api_server_count = num_prefill + num_decode;
  const auto overlap = [](int a, int num_a, int b, int num_b) { return a < b + num_b && b < a + num_a; };
  if (overlap(nodes.prefill_port, num_prefill, nodes.decode_port, num_decode))
    check.problem("deployment.decode_port", fmt::format("{} decode engines from {} on and {} prefill engines from {} on share ports",
                                                        num_decode, nodes.decode_port, num_prefill, nodes.prefill_port));
  for (const auto& [key, table] : {std::pair{"deployment.prefill_vllm_overrides", &nodes.prefill_vllm_overrides},
                                   {"deployment.decode_vllm_overrides", &nodes.decode_vllm_overrides}}) {
    if (!table->is_table()) check.problem(key, "wanted a table of settings");
    std::vector<std::string> unknown;
    (void)engine_flags_of(*table, &unknown);
    std::string known;
    for (const auto& [name, flag] : kRoleSettings) known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
    for (const std::string& name : unknown)
      check.problem(key, fmt::format("\"{}\" cannot differ between prefill and decode engines here; what can: {}", name, known));
  }
  check_env_vars(nodes.prefill_env_vars, check);
  check_env_vars(nodes.decode_env_vars, check);
}

/// How many engines there are, and which of them are this node's.
void check_copies(InferenceConfig& config, const Check& check) {
  ParallelConfig& parallel = config.parallel;
  const bool is_serverless = config.api_server_count == 0;  // as others call it: nothing here answers for all
  if (is_serverless) parallel.headless = true;
  parallel.dp = config.api_server_count = num_engines(config);
  if (const auto* nodes = std::get_if<InferenceMultiNode>(&config.deployment)) {
    if (nodes->gpus_per_node % parallel.tp != 0)
      check.problem("parallel.tp", fmt::format("is {}, which does not divide the {} GPUs of a node", parallel.tp, nodes->gpus_per_node));
    const int wanted = nodes->num_nodes * num_engines_on(config, nodes->gpus_per_node);
    if (check.is_set("parallel.dp") && parallel.dp != wanted && !parallel.dp_address)
      check.problem("parallel.dp", fmt::format("is {}, but {} nodes with {} GPUs each have {} engines", parallel.dp, nodes->num_nodes,
                                               nodes->gpus_per_node, wanted));
    parallel.dp = config.api_server_count = wanted;
  }
  if (const auto* nodes = std::get_if<InferenceDisaggregated>(&config.deployment)) return check_disaggregated(config, *nodes, check);
  if (parallel.dp_address && parallel.dp_address->empty()) check.problem("parallel.dp_address", "names no address");
  if (parallel.dp_address) {
    const int num_here = parallel.dp_local.value_or(parallel.dp);
    if (parallel.dp_start_rank + num_here > parallel.dp)
      check.problem("parallel.dp_local", fmt::format("the copies from {} on are {}, but there are {} in all (parallel.dp)",
                                                     parallel.dp_start_rank, num_here, parallel.dp));
    return;
  }
  constexpr const char* kNeedsAddress = "needs parallel.dp_address: where is the node whose router is in front of all copies?";
  if (parallel.headless) check.problem(is_serverless ? "api_server_count" : "parallel.headless", kNeedsAddress);
  if (parallel.dp_local && *parallel.dp_local != parallel.dp) check.problem("parallel.dp_local", kNeedsAddress);
  if (parallel.dp_start_rank > 0) check.problem("parallel.dp_start_rank", kNeedsAddress);
}

void check_drafts(const SpeculativeConfig& drafts, const Check& check) {
  const bool is_mtp = drafts.method == DraftMethod::kMtp, is_named = drafts.draft_model.has_value();
  const bool has_model = is_mtp || (is_named && drafts.method != DraftMethod::kNgram);
  if (drafts.method == DraftMethod::kDraftModel && !is_named)
    check.problem("speculative.draft_model", "is needed by method draft_model: the folder or hub id of a smaller model");
  if (is_named && is_mtp)
    check.warn("speculative.draft_model", "has no effect: speculative.method is mtp, the model's own head draws drafts");
  if (is_named && !has_model) check.warn("speculative.draft_model", "has no effect: speculative.method is ngram, which looks drafts up");
  if (is_named) check_model_name(*drafts.draft_model, "speculative.draft_model", check);
  if (has_model && drafts.num_tokens == 0)
    check.problem("speculative.num_tokens", fmt::format("must be at least 1 with {}: how many tokens it draws for a sequence in a step",
                                                        is_mtp ? "method mtp" : "a draft_model"));
  const SpeculativeConfig usual;
  const auto warn_of_lookup = [&](const char* key, bool is_set) {
    if (has_model && is_set)
      check.warn(key, fmt::format("has no effect: drafts are drawn by {} and not looked up",
                                  is_mtp ? "the model's head" : "speculative.draft_model"));
  };
  warn_of_lookup("speculative.max_ngram", drafts.max_ngram != usual.max_ngram);
  warn_of_lookup("speculative.min_ngram", drafts.min_ngram != usual.min_ngram);
  warn_of_lookup("speculative.from_completions", drafts.from_completions != usual.from_completions);
  warn_of_lookup("speculative.max_stored_tokens", drafts.max_stored_tokens != usual.max_stored_tokens);
  if (!has_model && !drafts.adaptive)
    check.warn("speculative.adaptive", "has no effect: drafts are looked up, and it is of those that a model draws");
  if (drafts.min_ngram > drafts.max_ngram)
    check.problem("speculative.min_ngram", fmt::format("must not be above max_ngram, which is {}", drafts.max_ngram));
}

}  // namespace

void check_routing(const RoutingConfig& routing, const std::string& prefix, const Check& check) {
  if (routing.policy == RouterPolicy::kCacheAware) return;
  // By its value: a configuration that a run wrote for its roles sets every key.
  const RoutingConfig usual;
  const auto warn_of = [&](const char* key, bool is_set) {
    if (is_set)
      check.warn(prefix + key, fmt::format("has no effect: {}policy is {}, and it is of cache_aware", prefix, enum_name(routing.policy)));
  };
  warn_of("cache_threshold", routing.cache_threshold != usual.cache_threshold);
  warn_of("balance_abs_threshold", routing.balance_abs_threshold != usual.balance_abs_threshold);
  warn_of("balance_rel_threshold", routing.balance_rel_threshold != usual.balance_rel_threshold);
  warn_of("max_tree_size", routing.max_tree_size != usual.max_tree_size);
}

void check_quantization(const InferenceModelConfig& model, const Check& check) {
  if (model.quantization && !is_built_quantization(*model.quantization))
    check.not_built("model.quantization",
                    fmt::format("weights quantised as \"{}\"; use {} or {}", *model.quantization, kFp8Weights, kFp8Products));
}

void check_inference(InferenceConfig& config, const Check& check) {
  check_quantization(config.model, check);
  if (!config.model.latent_attention) config.model.latent_attention = LatentAttention::kLatents;
  if (const auto* router = config.router ? std::get_if<VllmRouterConfig>(&*config.router) : nullptr)
    check_routing(*router, "router.", check);
  check_model_name(config.model.name, "model.name", check);
  check_env_vars(config.env_vars, check);
  if (config.model.dtype != ComputeDType::kAuto) {
    if (config.compute.dtype != ComputeDType::kAuto && config.compute.dtype != config.model.dtype)
      check.problem("model.dtype", fmt::format("differs from compute.dtype, which is {}", enum_name(config.compute.dtype)));
    config.compute.dtype = config.model.dtype;
  }
  config.model.dtype = config.compute.dtype;
  if (config.compute.dtype == ComputeDType::kFloat16)
    check.warn(
        check.is_set("model.dtype") ? "model.dtype" : "compute.dtype",
        "float16 is computed in float32 here: no value is rounded to less than it would be, and memory and time are those of float32");
  check_copies(config, check);
  if (const Value& rope = config.model.rope_scaling; !rope.is_null() && !(rope.is_table() && (rope.find("rope_type") || rope.find("type"))))
    check.problem("model.rope_scaling",
                  "wanted a table with a rope_type, such as {rope_type = \"yarn\", factor = 4.0, "
                  "original_max_position_embeddings = 32768}");
  if (!config.enable_chunked_prefill && config.model.max_model_len && *config.model.max_model_len > config.max_num_batched_tokens)
    check.problem("max_num_batched_tokens",
                  fmt::format("must be at least max_model_len {} when enable_chunked_prefill is off", *config.model.max_model_len));
  if (config.max_num_seqs > config.max_num_batched_tokens)
    check.problem("max_num_batched_tokens", fmt::format("must be at least max_num_seqs, which is {}", config.max_num_seqs));
  if (config.use_pd_kv_transfer && !config.enable_prefix_caching)
    check.problem("use_pd_kv_transfer", "needs enable_prefix_caching: blocks that arrive are found as a prefix");
  if (config.kv_cache_offload && !config.enable_prefix_caching)
    check.problem("kv_cache_offload", "needs enable_prefix_caching: only blocks that a later request can find are worth keeping");
  if (const auto* native = config.kv_cache_offload ? std::get_if<NativeKvOffloadConfig>(&*config.kv_cache_offload) : nullptr)
    if (native->disk && (!native->disk->path || native->disk->path->empty()))
      check.problem("kv_cache_offload.disk.path", "is needed: the folder of the files");
  check_drafts(config.speculative, check);
  if (config.max_cpu_loras < config.max_loras)
    check.problem("max_cpu_loras", fmt::format("must be at least max_loras, which is {}", config.max_loras));
  if (!config.lora_modules.empty() && !config.enable_lora) check.problem("lora_modules", "needs enable_lora");
  if (!is_loopback(config.server.host) && !config.server.api_key)
    check.warn("server.host", "other machines can reach the server, and it asks for no api_key");
  if (config.server.max_held_body_bytes < config.server.max_body_bytes)
    check.problem("server.max_held_body_bytes",
                  fmt::format("must be at least server.max_body_bytes, which is {}", config.server.max_body_bytes));
  for (const std::string& origin : config.server.cors_origins)
    if (origin != "*" && !is_origin(origin))
      check.problem("server.cors_origins", fmt::format("wanted origins such as https://host:port, or *, found '{}'", origin));
}

}  // namespace detail

std::vector<std::pair<std::string, std::string>> engine_flags_of(const Value& vllm_overrides, std::vector<std::string>* unknown) {
  std::vector<std::pair<std::string, std::string>> flags;
  if (!vllm_overrides.is_table()) return flags;
  for (const Member& member : vllm_overrides.members()) {
    const auto* known = std::find_if(std::begin(detail::kRoleSettings), std::end(detail::kRoleSettings),
                                     [&](const auto& setting) { return setting.first == member.key; });
    const bool is_scalar = !member.value.is_table() && !member.value.is_list() && !member.value.is_null();
    if (known != std::end(detail::kRoleSettings) && is_scalar)
      flags.emplace_back(known->second, member.value.is_string() ? member.value.as_string() : to_compact_json(member.value));
    else if (unknown != nullptr)
      unknown->push_back(member.key);
  }
  return flags;
}

template <>
Resolution<InferenceConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<InferenceConfig>(raw);
  const detail::Check check(raw, "", resolution.report, context);
  detail::check_inference(resolution.config, check);
  return resolution;
}

}  // namespace prl::config
