#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/detail/one_process.hpp"
#include "config/detail/sampling.hpp"
#include "config/detail/urls.hpp"
#include "config/merge.hpp"

namespace prl::config {
namespace {

using detail::Check;

std::string bare_text(const Value& value) {
  std::string text = to_display(value);
  if (text.size() >= 2 && text.front() == '"') text = text.substr(1, text.size() - 2);
  return text;
}

/// Equal, also when one was written as text on the command line.
bool is_same(const Value& a, const Value& b) { return equals(a, b) || bare_text(a) == bare_text(b); }

/// Copies shared keys of the raw tree to the roles that did not set theirs.
class Propagation {
 public:
  Propagation(Value& raw, Report& report) : raw_(raw), report_(report) {
    for (const char* section : {"trainer", "orchestrator"})
      if (!raw_.find(section) || is_switch(*raw_.find(section))) raw_.set(section, Value::table());
    for (const char* section : {"inference", "teacher_inference"})
      if (Value* server = raw_.find(section); server && is_switch(*server)) {
        const bool is_on = server->is_bool() && server->as_bool();
        *server = is_on ? Value::table() : Value();
      }
    has_inference_ = raw_.find("inference") && raw_.find("inference")->is_table();
  }

  void run() {
    share("model.name", {"trainer.model.name", "orchestrator.student.model.name", "inference.model.name"});
    share("model.vlm", {"trainer.model.vlm", "orchestrator.student.model.vlm"});
    share("tokenizer.name", {"trainer.tokenizer.name", "orchestrator.tokenizer.name"});
    share("tokenizer.trust_remote_code", {"trainer.tokenizer.trust_remote_code", "orchestrator.tokenizer.trust_remote_code"});
    share("tokenizer.chat_template",
          {"trainer.tokenizer.chat_template", "orchestrator.tokenizer.chat_template", "inference.model.chat_template"});
    // Whoever names the template, all three use it: the one that renders, the one that serves, and the one that saves the weights.
    share("trainer.tokenizer.chat_template", {"orchestrator.tokenizer.chat_template", "inference.model.chat_template"});
    share("orchestrator.tokenizer.chat_template", {"trainer.tokenizer.chat_template", "inference.model.chat_template"});
    share("inference.model.chat_template", {"trainer.tokenizer.chat_template", "orchestrator.tokenizer.chat_template"});
    // The orchestrator renders messages and reads replies, in whichever process the engine runs.
    fill("inference.model.tool_call_parser", "orchestrator.renderer.tool_call_parser");
    fill("inference.model.reasoning_parser", "orchestrator.renderer.reasoning_parser");
    share("log.vf_level", {"orchestrator.log.vf_level"});
    for (const char* key : {"level", "json_logging", "file"})
      share(fmt::format("log.{}", key),
            {fmt::format("trainer.log.{}", key), fmt::format("orchestrator.log.{}", key), fmt::format("inference.log.{}", key)});
    share("log.interval", {"trainer.log.interval", "orchestrator.log.interval"});
    share("max_steps", {"trainer.max_steps", "orchestrator.max_steps"});
    share("max_async_level", {"trainer.max_async_level", "orchestrator.max_async_level"});
    share("seq_len", {"trainer.model.seq_len", "orchestrator.seq_len"});
    share("max_model_len", {"inference.model.max_model_len"});
    share("seed", {"trainer.seed", "orchestrator.seed", "inference.seed"});
    share("deterministic", {"trainer.deterministic", "orchestrator.deterministic", "inference.deterministic"});
    for (const char* key : {"device", "dtype", "num_threads"})
      share(fmt::format("compute.{}", key), {fmt::format("trainer.compute.{}", key), fmt::format("inference.compute.{}", key)});
    share_tree("weight_broadcast", {"trainer.weight_broadcast", "orchestrator.weight_broadcast", "inference.weight_broadcast"});
    share_tree("rollout_transport", {"trainer.rollout_transport", "orchestrator.rollout_transport"});
    share_block("wandb", {"trainer.wandb", "orchestrator.wandb"}, {});
    share_block("ckpt", {"trainer.ckpt", "orchestrator.ckpt"}, {"weights_only", "save_async", "weights"});
    // One table is the trainer's; orchestrator.bench.output_json is for the orchestrator's own.
    share_block("bench", {"trainer.bench", "orchestrator.bench"}, {"output_json"});
    mirror("max_steps");
    mirror("max_async_level");
    mirror_block("ckpt", {"output_dir", "interval", "keep_last", "keep_interval", "resume_step"});
    mirror_block("wandb", {"project", "name", "entity", "group", "offline"});
    share_env_vars();
    share_output_dir();
  }

  bool has_inference() const { return has_inference_; }

 private:
  static bool is_switch(const Value& value) { return value.is_null() || value.is_bool(); }

  /// True if the role of a dotted target is there and is a table.
  bool has_role(std::string_view target) const {
    const Value* role = raw_.find(target.substr(0, target.find('.')));
    return role && role->is_table();
  }

  /// Whether these keys are written decides what is copied.
  void note(const std::string& key, const std::vector<std::string>& targets) {
    report_.decisive.insert(key);
    report_.decisive.insert(targets.begin(), targets.end());
  }

  void share(const std::string& key, const std::vector<std::string>& targets) {
    note(key, targets);
    const Value* found = find_path(raw_, key);
    if (!found || found->is_null()) return;
    const Value value = *found;
    for (const std::string& target : targets) {
      if (!has_role(target)) continue;
      const Value* present = find_path(raw_, target);
      if (!present) {
        set_path(raw_, target, value);
      } else if (!is_same(*present, value)) {
        conflict(key, value, target, *present);
      }
    }
  }

  /// Copies a key that nothing else sets there.
  void fill(const std::string& key, const std::string& target) {
    report_.decisive.insert(target);
    const Value* found = find_path(raw_, key);
    if (!found || find_path(raw_, target)) return;
    set_path(raw_, target, Value(*found));
  }

  void conflict(const std::string& key, const Value& value, const std::string& target, const Value& present) {
    report_.add(target,
                fmt::format("differs from {} = {} [{}], which sets it for all roles; remove one of the two", key, to_display(value),
                            value.origin().describe()),
                &present);
  }

  /// A tagged union: the type and its keys travel together.
  void share_tree(const std::string& key, const std::vector<std::string>& targets) {
    note(key, targets);
    const Value* found = find_path(raw_, key);
    if (!found || found->is_null()) return;
    if (!found->is_table()) return share(key, targets);
    const Value variant = *found;
    for (const Member& member : variant.members()) {
      std::vector<std::string> keys;
      for (const std::string& target : targets) keys.push_back(fmt::format("{}.{}", target, member.key));
      share(fmt::format("{}.{}", key, member.key), keys);
    }
  }

  /// An optional block: its presence travels too, and switching it off wins everywhere.
  void share_block(const std::string& key, const std::vector<std::string>& targets, const std::vector<std::string>& first_only) {
    note(key, targets);
    const Value* found = raw_.find(key);
    if (!found) return;
    const Value block = *found;
    const bool is_off = block.is_null() || (block.is_bool() && !block.as_bool()) || bare_text(block) == "false";
    for (const std::string& target : targets) {
      if (is_off) {
        set_path(raw_, target, Value());
        continue;
      }
      Value* present = find_path(raw_, target);
      if (!present || present->is_bool()) {
        Value empty = Value::table();
        empty.set_origin(block.origin());
        set_path(raw_, target, std::move(empty));
      }
    }
    if (is_off || !block.is_table()) return;
    share_members(block, key, targets, first_only);
  }

  void share_members(const Value& block, const std::string& key, const std::vector<std::string>& targets,
                     const std::vector<std::string>& first_only) {
    for (const Member& member : block.members()) {
      const bool is_first_only = std::find(first_only.begin(), first_only.end(), member.key) != first_only.end();
      std::vector<std::string> keys;
      for (const std::string& target : targets)
        if (!is_first_only || target == targets.front()) keys.push_back(fmt::format("{}.{}", target, member.key));
      if (member.value.is_table() && !member.value.members().empty()) {
        share_members(member.value, fmt::format("{}.{}", key, member.key), keys, {});
      } else {
        share(fmt::format("{}.{}", key, member.key), keys);
      }
    }
  }

  /// What only one of trainer and orchestrator sets holds for both.
  void mirror(const std::string& key) {
    const std::string trainer = "trainer." + key, orchestrator = "orchestrator." + key;
    report_.decisive.insert({trainer, orchestrator});
    const Value* a = find_path(raw_, trainer);
    const Value* b = find_path(raw_, orchestrator);
    if (a && !b && has_role(orchestrator)) {
      set_path(raw_, orchestrator, Value(*a));
    } else if (b && !a && has_role(trainer)) {
      set_path(raw_, trainer, Value(*b));
    } else if (a && b && !is_same(*a, *b)) {
      report_.add(
          trainer,
          fmt::format("must equal {}, which is {} [{}]; set {} once for both", orchestrator, to_display(*b), b->origin().describe(), key),
          a);
    }
  }

  void mirror_block(const std::string& key, const std::vector<std::string>& members) {
    const auto is_on = [&](const std::string& path) {
      const Value* block = find_path(raw_, path);
      return block && (block->is_table() || (block->is_bool() && block->as_bool()));
    };
    const std::string trainer = "trainer." + key, orchestrator = "orchestrator." + key;
    if (!is_on(trainer) && !is_on(orchestrator)) return;
    for (const std::string& side : {trainer, orchestrator}) {
      const Value* block = find_path(raw_, side);
      if (has_role(side) && (!block || block->is_bool())) set_path(raw_, side, Value::table());
    }
    if (!is_on(trainer) || !is_on(orchestrator)) return;  // one side is switched off by hand
    for (const std::string& member : members) mirror(fmt::format("{}.{}", key, member));
  }

  void share_env_vars() {
    report_.decisive.insert({"trainer.env_vars", "orchestrator.env_vars", "inference.env_vars"});
    const Value* shared = raw_.find("env_vars");
    if (!shared || !shared->is_table()) return;
    const Value all = *shared;
    for (const char* role : {"trainer", "orchestrator", "inference"}) {
      if (!has_role(role)) continue;
      Value merged = all;
      if (const Value* own = find_path(raw_, fmt::format("{}.env_vars", role)); own && own->is_table()) merge(merged, *own);
      set_path(raw_, fmt::format("{}.env_vars", role), std::move(merged));
    }
  }

  void share_output_dir() {
    report_.decisive.insert({"trainer.output_dir", "orchestrator.output_dir", "inference.output_dir", "teacher_inference.output_dir"});
    const Value* set = raw_.find("output_dir");
    const Value output_dir = set ? *set : Value("outputs");
    for (const char* role : {"trainer", "orchestrator", "inference"}) {
      if (!has_role(role)) continue;
      const std::string key = fmt::format("{}.output_dir", role);
      const Value* own = find_path(raw_, key);
      if (own && !is_same(*own, output_dir)) {
        report_.add(key, fmt::format("must be the folder of the run, {}; set output_dir instead", to_display(output_dir)), own);
      } else {
        set_path(raw_, key, output_dir);
      }
    }
  }

  Value& raw_;
  Report& report_;
  bool has_inference_ = false;
};

/// Devices by number: one for both roles is one process, two different ones are
/// a process each.
void apply_gpu_ids(RlConfig& config, const Check& check) {
  if (!config.inference_gpu_ids && !config.trainer_gpu_ids) return;
  if (!config.inference_gpu_ids) config.inference_gpu_ids = std::vector<int>{0};
  if (!config.trainer_gpu_ids) config.trainer_gpu_ids = std::vector<int>{1};
  for (const auto& [key, ids] :
       {std::pair{"inference_gpu_ids", &*config.inference_gpu_ids}, {"trainer_gpu_ids", &*config.trainer_gpu_ids}}) {
    if (ids->empty()) check.problem(key, "names no GPU");
  }
  const bool is_shared = config.inference_gpu_ids == config.trainer_gpu_ids;
  if (!config.deployment && config.inference) {
    config.deployment = SingleNodeDeployment{};
    if (is_shared && config.inference_gpu_ids->size() == 1 && !detail::starts_teacher(config)) config.deployment = ColocatedDeployment{};
  }
  if (auto* node = config.deployment ? std::get_if<SingleNodeDeployment>(&*config.deployment) : nullptr) {
    const auto num_ids = static_cast<int>(config.trainer_gpu_ids->size());
    if (num_ids > 1 && !check.is_set("deployment.num_train_gpus")) node->num_train_gpus = num_ids;
    if (num_ids != node->num_train_gpus)
      check.problem("trainer_gpu_ids", fmt::format("names {} GPUs, deployment.num_train_gpus is {}", num_ids, node->num_train_gpus));
  }
  if (!is_shared && config.deployment && std::holds_alternative<ColocatedDeployment>(*config.deployment))
    check.problem("deployment.type",
                  "colocated is one process on one GPU, but inference_gpu_ids and trainer_gpu_ids differ; use single_node");
}

/// GPUs that the roles may be given; 0 if none computes on one.
int num_gpus(const RlConfig& config, const Check& check) {
  const bool uses_gpus =
      config.trainer.compute.device != DeviceKind::kCpu || (config.inference && config.inference->compute.device != DeviceKind::kCpu);
  return uses_gpus ? check.context().num_devices : 0;
}

void choose_deployment(RlConfig& config, const Check& check) {
  apply_gpu_ids(config, check);
  if (!config.deployment) {
    const bool is_colocated = config.inference && num_gpus(config, check) <= 1 && !detail::starts_teacher(config) &&
                              num_engine_gpus(*config.inference) == 1 && config.trainer.max_concurrent_runs == 1;
    config.deployment = ColocatedDeployment{};
    if (!is_colocated) config.deployment = SingleNodeDeployment{};
  }
  if (std::holds_alternative<ColocatedDeployment>(*config.deployment) && !config.inference)
    check.problem("deployment.type", "colocated runs inference in the same process: add an [inference] section");
}

int num_trainer_ranks(const RlDeployment& deployment) {
  if (const auto* node = std::get_if<SingleNodeDeployment>(&deployment)) return node->num_train_gpus;
  if (const auto* nodes = std::get_if<MultiNodeDeployment>(&deployment)) return nodes->num_train_nodes * nodes->gpus_per_node;
  return 1;
}

/// Over several nodes: an engine for each GPU of the inference nodes. Addresses are known when the nodes have met.
void choose_nodes(RlConfig& config, MultiNodeDeployment& nodes, const Check& check) {
  for (const auto& [key, ids] : {std::pair{"inference_gpu_ids", &config.inference_gpu_ids}, {"trainer_gpu_ids", &config.trainer_gpu_ids}})
    if (*ids) check.problem(key, "is for one machine: each node of multi_node uses its first deployment.gpus_per_node GPUs");
  if (detail::starts_teacher(config))
    check.problem("deployment.type",
                  "multi_node starts no teacher: start it by hand with `prl inference` and name its address in "
                  "orchestrator.teacher.client.base_url");
  const int num_infer = nodes.num_infer_nodes.value_or(config.inference ? 1 : 0);
  if (config.inference && num_infer == 0) check.problem("deployment.num_infer_nodes", "is 0, but there is an [inference] section to run");
  if (!config.inference && num_infer > 0)
    check.problem("deployment.num_infer_nodes", "needs an [inference] section, which says what they run");
  nodes.num_infer_nodes = num_infer;
  if (const auto* split = config.inference ? std::get_if<InferenceDisaggregated>(&config.inference->deployment) : nullptr) {
    if (num_infer != num_nodes_of(*split) && check.is_set("deployment.num_infer_nodes"))
      check.problem("deployment.num_infer_nodes", fmt::format("is {}, but inference.deployment has {} prefill and {} decode nodes",
                                                              num_infer, num_prefill_nodes(*split), num_decode_nodes(*split)));
    nodes.num_infer_nodes = num_nodes_of(*split);
    const ServerConfig& server = config.inference->server;
    if (!config.inference->kv_transfer.api_key && !server.admin_api_key && !server.api_key)
      check.problem("inference.kv_transfer.api_key",
                    "is needed, or inference.server.api_key: engines of several nodes show it to each other");
  }
  detail::choose_copies(config.trainer.model, "trainer.", nodes.num_train_nodes, nodes.nodes_per_fsdp_group, check);
  if (!config.inference) return;
  InferenceConfig& inference = *config.inference;
  const int tp = inference.parallel.tp;
  if (nodes.gpus_per_node % tp != 0)
    check.problem("inference.parallel.tp", fmt::format("is {}, which does not divide the {} GPUs of a node", tp, nodes.gpus_per_node));
  const int wanted = *nodes.num_infer_nodes * num_engines_on(inference, nodes.gpus_per_node);
  if (check.is_set("inference.parallel.dp") && inference.parallel.dp != wanted)
    check.problem("inference.parallel.dp", fmt::format("is {}, but {} nodes with {} GPUs each have {} engines", inference.parallel.dp,
                                                       num_infer, nodes.gpus_per_node, wanted));
  inference.parallel.dp = inference.api_server_count = wanted;
}

/// One engine for each GPU of inference; on the CPU as many as are asked for.
void choose_engines(RlConfig& config, const Check& check) {
  if (auto* nodes = std::get_if<MultiNodeDeployment>(&*config.deployment)) return choose_nodes(config, *nodes, check);
  if (!config.inference) return;
  InferenceConfig& inference = *config.inference;
  if (std::holds_alternative<ColocatedDeployment>(*config.deployment)) {
    if (std::holds_alternative<InferenceDisaggregated>(inference.deployment))
      check.problem("inference.deployment.type", "colocated has one engine, in the trainer's process; use deployment.type single_node");
    else if (inference.use_pd_kv_transfer)
      check.problem("inference.use_pd_kv_transfer", "colocated has one engine, which nobody else asks; use deployment.type single_node");
    else if (num_engines(inference) > 1)
      check.problem("inference.parallel.dp", "colocated has one engine, in the trainer's process; use deployment.type single_node");
    if (inference.parallel.tp > 1)
      check.problem("inference.parallel.tp", "colocated has one engine, on the trainer's device; use deployment.type single_node");
    return;
  }
  auto* node = std::get_if<SingleNodeDeployment>(&*config.deployment);
  if (!node) return;
  if (config.inference_gpu_ids && !check.is_set("deployment.num_infer_gpus"))
    node->num_infer_gpus = static_cast<int>(config.inference_gpu_ids->size());
  if (node->num_infer_gpus == 0) check.problem("deployment.num_infer_gpus", "is 0, but there is an [inference] section to run");
  if (config.inference_gpu_ids && static_cast<int>(config.inference_gpu_ids->size()) != node->num_infer_gpus)
    check.problem("deployment.num_infer_gpus",
                  fmt::format("is {}, but inference_gpu_ids names {} GPUs", node->num_infer_gpus, config.inference_gpu_ids->size()));
  const int tp = inference.parallel.tp;
  if (check.is_set("deployment.num_infer_gpus") || config.inference_gpu_ids) {
    if (node->num_infer_gpus % tp != 0)
      check.problem("inference.parallel.tp",
                    fmt::format("is {}, which does not divide deployment.num_infer_gpus, which is {}", tp, node->num_infer_gpus));
  } else {
    node->num_infer_gpus = tp;
  }
  const auto* split = std::get_if<InferenceDisaggregated>(&inference.deployment);
  const int wanted =
      split != nullptr ? num_nodes_of(*split) : std::max(num_engines(inference), num_engines_on(inference, node->num_infer_gpus));
  if (split != nullptr && (check.is_set("deployment.num_infer_gpus") || config.inference_gpu_ids) && node->num_infer_gpus != wanted * tp)
    check.problem("deployment.num_infer_gpus", fmt::format("is {}, but {} prefill and {} decode engines of {} GPUs each are wanted",
                                                           node->num_infer_gpus, num_prefill_nodes(*split), num_decode_nodes(*split), tp));
  if (tp > 1 || split != nullptr) node->num_infer_gpus = wanted * tp;
  if (check.is_set("inference.parallel.dp") && inference.parallel.dp != wanted)
    check.problem("inference.parallel.dp", fmt::format("is {}, but {} engines follow from the other keys", inference.parallel.dp, wanted));
  inference.parallel.dp = inference.api_server_count = wanted;
}

/// `num` GPUs from `next` on that are not the teacher's.
std::vector<int> next_gpus(const RlConfig& config, int& next, int num) {
  const std::vector<int> taken = config.teacher_gpu_ids.value_or(std::vector<int>{});
  std::vector<int> ids;
  for (; num > 0; ++next) {
    if (std::ranges::find(taken, next) != taken.end()) continue;
    ids.push_back(next);
    --num;
  }
  return ids;
}

void check_gpus_exist(const RlConfig& config, const Check& check) {
  const int present = check.context().num_devices;
  for (const auto& [key, ids] : {std::pair{"inference_gpu_ids", &config.inference_gpu_ids},
                                 {"trainer_gpu_ids", &config.trainer_gpu_ids},
                                 {"teacher_gpu_ids", &config.teacher_gpu_ids}}) {
    std::vector<int> missing;
    if (*ids) std::ranges::copy_if(**ids, std::back_inserter(missing), [&](int id) { return id >= present; });
    if (!missing.empty())
      check.problem(key, fmt::format("names {}, but this machine has {} GPUs for us, numbered from 0", fmt::join(missing, ", "), present));
  }
}

/// A GPU for each engine and each rank of the trainer: the first are those of inference, the trainer has the next. With one GPU the
/// roles share it.
void choose_gpus(RlConfig& config, const Check& check) {
  auto* node = std::get_if<SingleNodeDeployment>(&*config.deployment);
  // The node of a batch job may have others, and chooses there.
  if (!node || config.slurm || check.context().num_devices <= 1) return;
  if (config.inference_gpu_ids || config.trainer_gpu_ids) return check_gpus_exist(config, check);
  const bool has_engines = config.inference && config.inference->compute.device != DeviceKind::kCpu;
  const bool has_ranks = config.trainer.compute.device != DeviceKind::kCpu;
  int next = 0;
  if (has_engines) config.inference_gpu_ids = next_gpus(config, next, num_engine_gpus(*config.inference));
  if (has_ranks) config.trainer_gpu_ids = next_gpus(config, next, node->num_train_gpus);
  if (next > check.context().num_devices)
    check.problem("deployment.num_train_gpus",
                  fmt::format("is {} beside {} of the engines: they need GPUs 0 to {}, but there are {}", node->num_train_gpus,
                              has_engines ? num_engine_gpus(*config.inference) : 0, next - 1, check.context().num_devices));
}

void choose_transports(RlConfig& config, const Check& check) {
  const bool is_colocated = std::holds_alternative<ColocatedDeployment>(*config.deployment);
  if (!check.is_set("trainer.weight_broadcast")) {
    config.trainer.weight_broadcast.emplace<FilesystemBroadcast>();
    if (is_colocated) config.trainer.weight_broadcast.emplace<LocalBroadcast>();
  }
  if (!check.is_set("orchestrator.weight_broadcast")) config.orchestrator.weight_broadcast = config.trainer.weight_broadcast;
  if (config.inference && !check.is_set("inference.weight_broadcast")) config.inference->weight_broadcast = config.trainer.weight_broadcast;
  if (!check.is_set("trainer.rollout_transport")) {
    config.trainer.rollout_transport.emplace<FilesystemRollouts>();
    if (is_colocated) config.trainer.rollout_transport.emplace<LocalRollouts>();
  }
  if (!check.is_set("orchestrator.rollout_transport")) config.orchestrator.rollout_transport = config.trainer.rollout_transport;
  if (config.trainer.weight_broadcast.index() != config.orchestrator.weight_broadcast.index() ||
      (config.inference && config.inference->weight_broadcast.index() != config.trainer.weight_broadcast.index()))
    check.problem("trainer.weight_broadcast.type", "must be the same for trainer, orchestrator and inference; set weight_broadcast.type");
  if (config.trainer.rollout_transport.index() != config.orchestrator.rollout_transport.index())
    check.problem("trainer.rollout_transport.type", "must be the same for trainer and orchestrator; set rollout_transport.type");
  if (is_colocated) {
    if (std::holds_alternative<NcclBroadcast>(config.trainer.weight_broadcast))
      check.problem("weight_broadcast.type", "nccl needs roles that are processes: deployment.type single_node");
    return;
  }
  if (std::holds_alternative<LocalBroadcast>(config.trainer.weight_broadcast))
    check.problem("weight_broadcast.type", "local needs deployment.type colocated: here the roles are processes");
  if (std::holds_alternative<LocalRollouts>(config.trainer.rollout_transport))
    check.problem("rollout_transport.type", "local needs deployment.type colocated: here the roles are processes");
}

void connect_client(RlConfig& config, const Check& check) {
  if (!config.inference) return;
  // The orchestrator is the router of a run's engines.
  const auto* router = config.inference->router ? std::get_if<VllmRouterConfig>(&*config.inference->router) : nullptr;
  if (router != nullptr && !check.is_set("orchestrator.router")) config.orchestrator.router = *router;
  const ServerConfig& server = config.inference->server;
  std::vector<std::string>& urls = config.orchestrator.student.client.base_url;
  if (server.port == 0 && !std::holds_alternative<ColocatedDeployment>(*config.deployment))
    check.problem("inference.server.port", "must be a fixed port, so that the orchestrator knows where to connect");
  if (!check.is_set("orchestrator.student.client.base_url")) {
    urls.clear();
    const bool has_processes = std::holds_alternative<SingleNodeDeployment>(*config.deployment);
    const auto* split = std::get_if<InferenceDisaggregated>(&config.inference->deployment);
    if (split != nullptr) {
      config.orchestrator.prefill.base_url.clear();
      config.orchestrator.prefill.non_cached_tokens = split->non_cached_tokens;
    }
    const int num_prefill = split != nullptr ? num_prefill_nodes(*split) : 0, num = has_processes ? num_engines(*config.inference) : 1;
    for (int i = 0; i < num; ++i)
      (i < num_prefill ? config.orchestrator.prefill.base_url : urls).push_back(detail::local_url(server.host, server.port + i));
    if (server.port + num - 1 > 65535)
      check.problem("inference.server.port", fmt::format("leaves no ports for {} engines, which take those that follow", num));
  } else if (!urls.empty() && detail::url_port(urls.front()) != server.port) {
    check.problem(
        "orchestrator.student.client.base_url",
        fmt::format("must name the port of inference.server, which is {}; or remove [inference] to use another server", server.port));
  }
}

/// The engines that sample what the trainer trains on.
void check_sampler(InferenceConfig& inference, const Check& check) {
  detail::check_inference(inference, check);
  if (!inference.model.rope_scaling.is_null())
    check.problem("model.rope_scaling",
                  "would sample from another model than trainer.model trains, which rotates positions as its config.json "
                  "says; change rope_scaling in config.json of the model folder, which both read");
}

void check_models(RlConfig& config, const Check& check) {
  const std::string& student = config.orchestrator.student.model.name;
  const auto complain = [&](std::string_view key, const std::string& name) {
    check.problem(key,
                  fmt::format("\"{}\" differs from orchestrator.student.model.name \"{}\"; set model.name for all roles", name, student));
  };
  if (config.inference) {
    const std::string served = config.inference->model.served_name.value_or(config.inference->model.name);
    if (served != student) complain("inference.model.name", served);
  }
  if (config.inference) {
    std::optional<std::string>& served = config.inference->model.quantization;
    const std::optional<std::string> trained = served_quantization(config.trainer.model.quantization);
    if (trained && !check.is_set("inference.model.quantization")) served = trained;
    if (served != trained)
      check.problem("inference.model.quantization",
                    fmt::format("must be as trainer.model.quantization: engines and the trainer multiply alike; wanted {}, found {}",
                                trained.value_or("none"), served.value_or("none")));
  }
  if (config.trainer.model.name != student) complain("trainer.model.name", config.trainer.model.name);
  if (config.orchestrator.run)
    check.problem("orchestrator.run",
                  "is for a run of a trainer of several: `prl orchestrator` beside `prl trainer --max-concurrent-runs`");
  if (config.trainer.data.recorded) check.problem("trainer.data.recorded", "trains without an orchestrator: `prl replay RUN` does it");
  if (config.trainer.enable_router_replay && config.inference) {
    if (!check.is_set("inference.enable_return_routed_experts")) config.inference->enable_return_routed_experts = true;
    if (!config.inference->enable_return_routed_experts)
      check.problem("inference.enable_return_routed_experts",
                    "must be on for trainer.enable_router_replay: it trains with what servers tell");
  }
  if (config.trainer.model.lora && config.inference) {
    const ComputeDType trained = config.trainer.model.lora->dtype;
    if (!check.is_set("inference.lora_dtype")) config.inference->lora_dtype = trained;
    if (config.inference->lora_dtype != trained)
      check.problem("inference.lora_dtype", "must be trainer.model.lora.dtype: sampler and trainer compute the same adapter");
  }
  if (const auto& named = config.orchestrator.student.model.lora) {
    const auto& trained = config.trainer.model.lora;
    if (named->name && trained && config.inference && !check.is_set("inference.enable_lora")) {
      config.inference->enable_lora = true;
      if (!check.is_set("inference.max_lora_rank"))
        config.inference->max_lora_rank = std::max(config.inference->max_lora_rank.value_or(0), trained->rank);
    }
    if (!trained) check.problem("orchestrator.student.model.lora", "needs trainer.model.lora: nothing trains an adapter");
    if (trained && named->rank && *named->rank != trained->rank)
      check.problem("orchestrator.student.model.lora.rank", fmt::format("must be that of trainer.model.lora, which is {}", trained->rank));
    if (trained && named->alpha && *named->alpha != trained->alpha)
      check.problem("orchestrator.student.model.lora.alpha",
                    fmt::format("must be that of trainer.model.lora, which is {}", trained->alpha));
  }
}

void share_latent_attention(RlConfig& config, const Check& check) {
  if (!config.inference) return;
  const auto& trained = config.trainer.model.latent_attention;
  auto& served = config.inference->model.latent_attention;
  if (!check.is_set("inference.model.latent_attention")) served = trained;
  if (served != trained)
    check.problem("inference.model.latent_attention",
                  fmt::format("must be as trainer.model.latent_attention, which is {}: engines and the trainer attend alike",
                              enum_name(trained.value_or(LatentAttention::kLatents))));
}

void check_lengths(RlConfig& config, const Check& check) {
  if (!check.is_set("trainer.model.seq_len"))
    config.trainer.model.seq_len = std::max(config.trainer.model.seq_len, config.orchestrator.seq_len);
  if (config.trainer.model.seq_len < config.orchestrator.seq_len)
    check.problem("trainer.model.seq_len", fmt::format("must be at least orchestrator.seq_len, which is {}", config.orchestrator.seq_len));
  if (!config.inference || !config.inference->model.max_model_len) return;
  const int max_model_len = *config.inference->model.max_model_len;
  if (config.orchestrator.seq_len < max_model_len)
    check.problem(check.is_set("seq_len") ? "seq_len" : "orchestrator.seq_len",
                  fmt::format("must be at least inference.model.max_model_len {}, or long rollouts would be cut (seq_len is {})",
                              max_model_len, config.orchestrator.seq_len));
  const auto& max_tokens = config.orchestrator.train.sampling.max_completion_tokens;
  // The room of a whole sample is what is taken where nothing is set.
  if (max_tokens && *max_tokens >= max_model_len && max_model_len < config.orchestrator.seq_len)
    check.problem("orchestrator.train.sampling.max_completion_tokens",
                  fmt::format("leaves no room for the prompt: inference.model.max_model_len is {}", max_model_len));
}

/// The engine needs no longer context than samples are.
void choose_context(RlConfig& config, const Check& check) {
  if (!config.inference || check.is_set("inference.model.max_model_len")) return;
  const std::optional<int> num_positions = check.context().num_positions(config.inference->model.name);
  config.inference->model.max_model_len = std::min(config.orchestrator.seq_len, num_positions.value_or(config.orchestrator.seq_len));
}

/// The losses that are named after an advantage choose it.
void choose_advantage(RlConfig& config, const Check& check) {
  const auto choose = [&](AdvantageType type, std::string_view loss) {
    if (!check.is_set("orchestrator.advantage.type")) {
      config.orchestrator.advantage.type = type;
    } else if (config.orchestrator.advantage.type != type) {
      check.problem("orchestrator.advantage.type",
                    fmt::format("contradicts trainer.loss.type {}, which needs the advantage of that name", loss));
    }
  };
  if (std::holds_alternative<OpoLossConfig>(config.trainer.loss)) choose(AdvantageType::kOpo, "opo");
  if (std::holds_alternative<RlooLossConfig>(config.trainer.loss)) choose(AdvantageType::kRloo, "rloo");
}

void check_async(RlConfig& config, const Check& check) {
  const bool is_deterministic = config.trainer.deterministic || config.orchestrator.deterministic;
  if (!is_deterministic) return;
  config.deterministic = true;
  config.trainer.deterministic = config.orchestrator.deterministic = true;
  if (config.inference) config.inference->deterministic = true;
  if (!check.is_set("orchestrator.max_async_level")) {
    config.trainer.max_async_level = config.orchestrator.max_async_level = 0;
  } else if (config.orchestrator.max_async_level != 0) {
    check.problem("orchestrator.max_async_level",
                  "must be 0 when deterministic is on: otherwise timing decides which weights a rollout sees");
  }
}

/// Several runs of one trainer: their orchestrators' configurations lie in their folders, so the section here is none of theirs.
void resolve_runs(RlConfig& config, const Value& written, const Check& check) {
  if (const Value* section = written.find("orchestrator"); section != nullptr && section->is_table() && !section->members().empty())
    check.problem("orchestrator",
                  "is set, but each of several runs (trainer.max_concurrent_runs) has a configuration of its own: name their "
                  "files in `runs`, or `prl runs add` them");
  if (!std::holds_alternative<SingleNodeDeployment>(*config.deployment))
    check.problem("deployment.type", "must be single_node for several runs (trainer.max_concurrent_runs): their roles are processes");
  if (config.teacher_inference)
    check.not_built("teacher_inference", "a teacher's server beside several runs; start `prl inference` for it and name it in the runs");
  if (config.slurm) check.not_built("slurm", "several runs in a batch job");
  if (config.trainer.bench) check.problem("bench", "measures one run; trainer.max_concurrent_runs is above 1");
  config.orchestrator.seq_len = config.trainer.model.seq_len;
  if (!config.inference) return;
  InferenceConfig& inference = *config.inference;
  if (!check.is_set("inference.enable_lora")) inference.enable_lora = true;
  if (!inference.enable_lora) check.problem("inference.enable_lora", "must be on: each of several runs trains an adapter");
  if (!check.is_set("inference.max_loras")) inference.max_loras = std::max(inference.max_loras, config.trainer.max_concurrent_runs);
  if (config.trainer.model.lora && !check.is_set("inference.max_lora_rank"))
    inference.max_lora_rank = std::max(inference.max_lora_rank.value_or(0), config.trainer.model.lora->rank);
}

}  // namespace

template <>
Resolution<RlConfig> resolve(Value raw, const Context& context) {
  const Value written = raw;
  Report report;
  Propagation propagation(raw, report);
  propagation.run();
  if (Value* trainer = raw.find("trainer")) detail::infer_loss_type(*trainer);
  for (const char* section : {"orchestrator.train", "orchestrator.eval"})
    report.decisive.merge(detail::inherit_sampling(find_path(raw, section), fmt::format("{}.", section)));
  auto resolution = detail::bind_all<RlConfig>(raw);
  RlConfig& config = resolution.config;
  for (Problem& problem : report.problems) resolution.report.problems.push_back(std::move(problem));
  resolution.report.decisive.merge(report.decisive);
  resolution.report.decisive.insert("trainer.loss.type");

  const Check check(raw, "", resolution.report, context);
  choose_advantage(config, check);
  check_async(config, check);
  choose_deployment(config, check);
  choose_engines(config, check);
  choose_gpus(config, check);
  choose_transports(config, check);
  connect_client(config, check);
  if (config.inference && !check.is_set("inference.seed")) config.inference->seed = config.seed;
  check_models(config, check);
  const bool has_runs = config.trainer.max_concurrent_runs > 1;
  if (has_runs)
    resolve_runs(config, written, check);
  else
    check_lengths(config, check);
  if (!has_runs && !config.runs.empty())
    check.problem("runs", "needs trainer.max_concurrent_runs above 1: a trainer of one run serves its own orchestrator alone");
  choose_context(config, check);
  if (!has_runs) {
    detail::resolve_teacher(config, check);
    detail::check_orchestrator(config.orchestrator, check.sub("orchestrator"));
  }
  if (config.trainer.bench && !config.trainer.data.fake) {
    config.trainer.data.fake.emplace();
    config.trainer.data.fake->batch_size = config.orchestrator.batch_size.value_or(config.trainer.data.fake->batch_size);
  }
  if (config.orchestrator.bench.has_value() != config.trainer.bench.has_value())
    check.problem("bench", "trainer and orchestrator must both measure, or neither: set --bench beside the keys of one of them");
  if (config.orchestrator.bench && config.trainer.bench && config.orchestrator.bench->output_json &&
      config.orchestrator.bench->output_json == config.trainer.bench->output_json)
    check.problem("orchestrator.bench.output_json", "is the file of the trainer's table; name another one");
  detail::check_trainer(config.trainer, check.sub("trainer"));
  detail::check_ranks(config.trainer.model, "trainer.", num_trainer_ranks(*config.deployment), check);
  share_latent_attention(config, check);
  if (config.inference) check_sampler(*config.inference, check.sub("inference"));
  if (std::holds_alternative<ColocatedDeployment>(*config.deployment))
    detail::resolve_one_process(config, Check(written, "", resolution.report, context));
  detail::check_env_vars(config.env_vars, check);
  if (!config.inference)
    check.warn("inference",
               "is not set: no server is started, the orchestrator connects to " + config.orchestrator.student.client.base_url.front());
  if (config.output_dir.empty()) check.problem("output_dir", "must name a folder");
  detail::check_clean(config.clean_output_dir, config.trainer.ckpt, check);
  return resolution;
}

}  // namespace prl::config
