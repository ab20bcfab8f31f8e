// Every spelling of a key that is not ours, in one place. Sources: the configurations of the January and May 2026
// documentation (flat orchestrator keys, rollouts_per_example, ...) and of the August 2026 one (train.source, monitors,
// inference.vllm, ...).
#include "config/aliases.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "config/merge.hpp"

namespace prl::config {
namespace {

/// Sections that appear in several commands.
enum class Scope { kRl, kTrainer, kOrchestrator, kInference, kSft, kEval, kTrainerModel, kTrainEnv, kEvalEnv, kSampling };

struct Rename {
  Scope scope;
  std::string_view from;
  std::string_view to;
  bool is_inverted = false;  ///< a boolean with the opposite meaning
};

// Order matters where one rename uncovers another.
constexpr Rename kRenames[] = {
    {Scope::kRl, "clean", "clean_output_dir"},
    {Scope::kRl, "monitor.wandb", "wandb"},
    {Scope::kRl, "monitors.wandb", "wandb"},
    {Scope::kRl, "monitors.prime.name", "orchestrator.prime_monitor.run_name"},
    {Scope::kRl, "monitors.prime", "orchestrator.prime_monitor"},
    {Scope::kRl, "prime_monitor", "orchestrator.prime_monitor"},
    {Scope::kRl, "async_level", "max_async_level"},

    {Scope::kTrainer, "monitor.wandb", "wandb"},
    {Scope::kTrainer, "monitors.wandb", "wandb"},
    {Scope::kTrainer, "monitors.file", "file_monitor"},
    {Scope::kTrainer, "async_level", "max_async_level"},

    {Scope::kOrchestrator, "monitor.wandb", "wandb"},
    {Scope::kOrchestrator, "monitors.wandb", "wandb"},
    {Scope::kOrchestrator, "monitors.file", "file_monitor"},
    {Scope::kOrchestrator, "monitors.prime.name", "prime_monitor.run_name"},
    {Scope::kOrchestrator, "monitors.prime", "prime_monitor"},
    {Scope::kOrchestrator, "prime_monitor.name", "prime_monitor.run_name"},
    {Scope::kOrchestrator, "async_level", "max_async_level"},
    {Scope::kOrchestrator, "rollouts_per_example", "group_size"},
    {Scope::kOrchestrator, "rollouts_per_prompt", "group_size"},
    {Scope::kOrchestrator, "max_concurrent", "max_inflight_rollouts"},
    {Scope::kOrchestrator, "workers_per_env", "train.num_workers"},
    {Scope::kOrchestrator, "env", "train.env"},
    {Scope::kOrchestrator, "train.source", "train.env"},
    {Scope::kOrchestrator, "sampling", "train.sampling"},
    {Scope::kOrchestrator, "eval.source", "eval.env"},
    {Scope::kOrchestrator, "eval.rollouts_per_example", "eval.group_size"},
    {Scope::kOrchestrator, "eval.skip_first_step", "eval.eval_base_model", true},
    {Scope::kOrchestrator, "eval.retrigger_on_resume", "eval.skip_eval_on_resume", true},
    {Scope::kOrchestrator, "eval.skip_eval_on_restart", "eval.skip_eval_on_resume"},
    {Scope::kOrchestrator, "val.rollouts_per_example", "val.group_size"},
    {Scope::kOrchestrator, "client", "student.client"},
    {Scope::kOrchestrator, "model.client", "student.client"},
    {Scope::kOrchestrator, "model", "student.model"},
    {Scope::kOrchestrator, "lora_name", "student.model.lora.name"},
    {Scope::kOrchestrator, "teacher_model", "teacher"},
    {Scope::kOrchestrator, "algo.length_penalty", "advantage.length_penalty"},
    {Scope::kOrchestrator, "algo.decay", "advantage.decay"},
    {Scope::kOrchestrator, "algo.roles", "advantage.roles"},
    {Scope::kOrchestrator, "algo.episode_agents", "advantage.episode_agents"},
    {Scope::kOrchestrator, "algo.demo_key", "opsd.demo_key"},
    {Scope::kOrchestrator, "algo.template", "opsd.template"},

    {Scope::kTrainerModel, "fused_lm_head_chunk_size", "fused_lm_head_token_chunk_size"},

    {Scope::kSft, "clean", "clean_output_dir"},
    {Scope::kSft, "monitor.wandb", "wandb"},
    {Scope::kSft, "monitors.wandb", "wandb"},
    {Scope::kSft, "monitors.file", "file_monitor"},
    {Scope::kSft, "num_gpus", "deployment.num_gpus"},
    {Scope::kSft, "num_nodes", "deployment.num_nodes"},
    {Scope::kSft, "deployment.num_train_gpus", "deployment.num_gpus"},
    {Scope::kSft, "deployment.num_train_nodes", "deployment.num_nodes"},
    {Scope::kSft, "deployment.num_eval_gpus", "deployment.num_infer_gpus"},
    {Scope::kSft, "deployment.num_eval_nodes", "deployment.num_infer_nodes"},
    {Scope::kSft, "eval.source", "eval.env"},
    {Scope::kSft, "eval.rollouts_per_example", "eval.group_size"},
    {Scope::kSft, "eval.skip_first_step", "eval.eval_base_model", true},
    {Scope::kSft, "eval.retrigger_on_resume", "eval.skip_eval_on_resume", true},

    {Scope::kInference, "port", "server.port"},
    {Scope::kInference, "host", "server.host"},
    {Scope::kInference, "api_key", "server.api_key"},
    {Scope::kInference, "served_model_name", "model.served_name"},
    {Scope::kInference, "dtype", "model.dtype"},
    {Scope::kInference, "max_model_len", "model.max_model_len"},
    {Scope::kInference, "enforce_eager", "model.enforce_eager"},
    {Scope::kInference, "trust_remote_code", "model.trust_remote_code"},
    {Scope::kInference, "chat_template", "model.chat_template"},
    {Scope::kInference, "enable_auto_tool_choice", "model.enable_auto_tool_choice"},
    {Scope::kInference, "tool_call_parser", "model.tool_call_parser"},
    {Scope::kInference, "reasoning_parser", "model.reasoning_parser"},
    {Scope::kInference, "generation_config", "model.generation_config"},
    {Scope::kInference, "rope_scaling", "model.rope_scaling"},
    {Scope::kInference, "quantization", "model.quantization"},
    {Scope::kInference, "speculative_config", "speculative"},
    {Scope::kInference, "block_size", "kv.block_size"},
    {Scope::kInference, "num_gpu_blocks_override", "kv.num_blocks"},
    {Scope::kInference, "tensor_parallel_size", "parallel.tp"},
    {Scope::kInference, "data_parallel_size", "parallel.dp"},
    {Scope::kInference, "data_parallel_size_local", "parallel.dp_local"},
    {Scope::kInference, "data_parallel_address", "parallel.dp_address"},
    {Scope::kInference, "data_parallel_rpc_port", "parallel.dp_rpc_port"},
    {Scope::kInference, "data_parallel_start_rank", "parallel.dp_start_rank"},
    {Scope::kInference, "headless", "parallel.headless"},
    {Scope::kInference, "vllm.model", "model.name"},
    {Scope::kInference, "vllm.served_model_name", "model.served_name"},
    {Scope::kInference, "vllm.dtype", "model.dtype"},
    {Scope::kInference, "vllm.max_model_len", "model.max_model_len"},
    {Scope::kInference, "vllm.enforce_eager", "model.enforce_eager"},
    {Scope::kInference, "vllm.trust_remote_code", "model.trust_remote_code"},
    {Scope::kInference, "vllm.chat_template", "model.chat_template"},
    {Scope::kInference, "vllm.tool_call_parser", "model.tool_call_parser"},
    {Scope::kInference, "vllm.reasoning_parser", "model.reasoning_parser"},
    {Scope::kInference, "vllm.generation_config", "model.generation_config"},
    {Scope::kInference, "vllm.rope_scaling", "model.rope_scaling"},
    {Scope::kInference, "vllm.quantization", "model.quantization"},
    {Scope::kInference, "vllm.seed", "seed"},
    {Scope::kInference, "vllm.gpu_memory_utilization", "gpu_memory_utilization"},
    {Scope::kInference, "vllm.enable_prefix_caching", "enable_prefix_caching"},
    {Scope::kInference, "vllm.enable_chunked_prefill", "enable_chunked_prefill"},
    {Scope::kInference, "vllm.max_num_seqs", "max_num_seqs"},
    {Scope::kInference, "vllm.max_num_batched_tokens", "max_num_batched_tokens"},
    {Scope::kInference, "vllm.speculative_config", "speculative"},
    {Scope::kInference, "vllm.block_size", "kv.block_size"},
    {Scope::kInference, "vllm.num_gpu_blocks_override", "kv.num_blocks"},
    {Scope::kInference, "vllm.tensor_parallel_size", "parallel.tp"},
    {Scope::kInference, "vllm.data_parallel_size", "parallel.dp"},
    {Scope::kInference, "vllm.data_parallel_size_local", "parallel.dp_local"},
    {Scope::kInference, "vllm.data_parallel_rpc_port", "parallel.dp_rpc_port"},
    {Scope::kInference, "vllm.api_server_count", "api_server_count"},
    {Scope::kInference, "vllm.enable_lora", "enable_lora"},
    {Scope::kInference, "vllm.max_loras", "max_loras"},
    {Scope::kInference, "vllm.max_cpu_loras", "max_cpu_loras"},
    {Scope::kInference, "vllm.max_lora_rank", "max_lora_rank"},
    {Scope::kInference, "vllm.lora_modules", "lora_modules"},
    {Scope::kInference, "vllm.lora_dtype", "lora_dtype"},
    {Scope::kInference, "vllm.enable_expert_parallel", "enable_expert_parallel"},
    {Scope::kInference, "vllm.enable_return_routed_experts", "enable_return_routed_experts"},

    {Scope::kEval, "rollouts_per_example", "group_size"},
    {Scope::kEval, "eval_base_model", "eval_base"},
    {Scope::kEval, "monitor.wandb", "wandb"},
    {Scope::kEval, "monitors.wandb", "wandb"},

    {Scope::kTrainEnv, "env.taskset.id", "id"},
    {Scope::kTrainEnv, "env.taskset", "args"},
    {Scope::kTrainEnv, "env.agent", "agent"},
    {Scope::kTrainEnv, "serve.address", "address"},
    {Scope::kTrainEnv, "rollouts_per_example", "group_size"},
    {Scope::kTrainEnv, "environment_id", "id"},

    {Scope::kSampling, "max_tokens", "max_completion_tokens"},
};

/// Keys without a counterpart, and what to use instead.
struct Retired {
  Scope scope;
  std::string_view key;
  std::string_view advice;
};
constexpr Retired kRetired[] = {
    {Scope::kRl, "run", "set output_dir to the folder of the run"},
    {Scope::kSft, "run", "set output_dir to the folder of the run"},
    {Scope::kRl, "monitors.file", "set trainer.file_monitor.path and orchestrator.file_monitor.path"},
    {Scope::kRl, "trainer_env_vars", "set trainer.env_vars"},
    {Scope::kRl, "resume.dir", "copy the checkpoint into output_dir/checkpoints and set ckpt.resume_step"},
    {Scope::kTrainer, "resume.dir", "copy the checkpoint into output_dir/checkpoints and set ckpt.resume_step"},
    {Scope::kSft, "resume.dir", "copy the checkpoint into output_dir/checkpoints and set ckpt.resume_step"},
    {Scope::kSft, "weight_broadcast", "evaluate saved weights with `prl eval --weights-dir`"},
    {Scope::kOrchestrator, "inference_metrics_roles", "set collect_inference_metrics"},
    {Scope::kOrchestrator, "optim", "set trainer.optim"},
};

class Canonicalizer {
 public:
  explicit Canonicalizer(Report& report) : report_(report) {}

  void run(Value& layer, Command command) {
    switch (command) {
      case Command::kRl: return rl(layer);
      case Command::kTrainer: return trainer(layer, "");
      case Command::kOrchestrator: return orchestrator(layer, "");
      case Command::kInference: return inference(layer, "");
      case Command::kSft: return sft(layer);
      case Command::kEval:
      case Command::kSynthesize: return eval(layer);
      case Command::kEvals: return evaluations(layer);
      case Command::kChat: {
        if (Value* sampling = layer.find("sampling")) renames(*sampling, Scope::kSampling, "sampling.");
        return;
      }
      default: return;
    }
  }

 private:
  void rl(Value& layer) {
    renames(layer, Scope::kRl, "");
    resume(layer, "");
    for (const char* name : {"inference", "teacher_inference"})
      if (Value* section = layer.find(name)) inference(*section, fmt::format("{}.", name));
    if (Value* section = layer.find("trainer")) trainer(*section, "trainer.");
    if (Value* section = layer.find("orchestrator")) orchestrator(*section, "orchestrator.");
  }

  void trainer(Value& section, const std::string& prefix) {
    if (!section.is_table()) return;
    renames(section, Scope::kTrainer, prefix);
    resume(section, prefix);
    if (Value* type = find_path(section, "loss.type"); type && type->is_string() && type->as_string() == "dppo")
      *type = retyped(*type, "default");
    if (Value* model = section.find("model")) trainer_model(*model, prefix + "model.");
  }

  void trainer_model(Value& model, const std::string& prefix) {
    if (!model.is_table()) return;
    renames(model, Scope::kTrainerModel, prefix);
    if (Value* fp8 = model.find("fp8")) {
      const bool is_on = !(fp8->is_bool() && !fp8->as_bool()) && !fp8->is_null() && to_display(*fp8) != "\"false\"";
      Value quantization = is_on ? Value("fp8") : Value();
      quantization.set_origin(fp8->origin());
      model.erase("fp8");
      model.set("quantization", std::move(quantization));
    }
  }

  void orchestrator(Value& section, const std::string& prefix) {
    if (!section.is_table()) return;
    renames(section, Scope::kOrchestrator, prefix);
    resume(section, prefix);
    algorithm(section);
    advantage(section);
    if (Value* train = section.find("train"); train && train->is_table()) {
      if (Value* sampling = train->find("sampling")) renames(*sampling, Scope::kSampling, prefix + "train.sampling.");
      if (Value* envs = train->find("env")) env_list(*envs, prefix + "train.env");
    }
    if (Value* eval = section.find("eval")) eval_section(*eval, prefix + "eval.");
  }

  void eval_section(Value& eval, const std::string& prefix) {
    if (!eval.is_table()) return;
    if (Value* sampling = eval.find("sampling")) renames(*sampling, Scope::kSampling, prefix + "sampling.");
    if (Value* envs = eval.find("env")) env_list(*envs, prefix + "env");
  }

  void inference(Value& section, const std::string& prefix) {
    if (!section.is_table()) return;
    if (Value* model = section.find("model"); model && model->is_string()) {
      Value table = Value::table();
      table.set("name", *model);
      *model = std::move(table);
    }
    renames(section, Scope::kInference, prefix);
    if (const Value* speculative = section.find("speculative"); speculative && speculative->is_table()) drafts(section, prefix);
  }

  /// What a speculative_config says in vLLM's words. One bound of the lookup alone is both of them.
  void drafts(Value& section, const std::string& prefix) {
    Value& speculative = *section.find("speculative");
    const Value *method = speculative.find("method"), *model = speculative.find("model");
    if (const bool is_only = model != nullptr && method == nullptr; is_only && is_lookup(*model)) {
      speculative.set("method", Value("ngram"));
    } else if (model != nullptr && !model->is_null() && !is_lookup(*model)) {
      speculative.set("draft_model", Value(*model));
    }
    speculative.erase("model");
    if (const Value* named = speculative.find("method"); named != nullptr && is_mtp(*named)) speculative.set("method", Value("mtp"));
    constexpr std::string_view kMax = "prompt_lookup_max", kMin = "prompt_lookup_min";
    const Value *max = speculative.find(kMax), *min = speculative.find(kMin);
    if ((max == nullptr) != (min == nullptr)) speculative.set(max != nullptr ? kMin : kMax, Value(max != nullptr ? *max : *min));
    constexpr std::pair<std::string_view, std::string_view> kNames[] = {
        {"num_speculative_tokens", "num_tokens"}, {kMax, "max_ngram"}, {kMin, "min_ngram"}};
    for (const auto& [from, to] : kNames) {
      const Value* found = section.find("speculative")->find(from);
      if (found == nullptr) continue;
      Value value = *found;
      section.find("speculative")->erase(from);
      put(section, fmt::format("speculative.{}", to), std::move(value), fmt::format("{}speculative.{}", prefix, from), prefix);
    }
  }

  static bool is_lookup(const Value& method) {
    return method.is_string() && (method.as_string() == "ngram" || method.as_string() == "[ngram]");
  }

  /// vLLM has a method for each family of models whose head draws drafts.
  static bool is_mtp(const Value& method) {
    constexpr std::string_view kMethods[] = {"deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"};
    return method.is_string() && std::ranges::find(kMethods, std::string_view(method.as_string())) != std::ranges::end(kMethods);
  }

  void sft(Value& layer) {
    renames(layer, Scope::kSft, "");
    resume(layer, "");
    if (Value* model = layer.find("model")) trainer_model(*model, "model.");
    evaluations(layer);
  }

  /// Of a run, or of a process that follows one.
  void evaluations(Value& layer) {
    if (Value* eval = layer.find("eval")) eval_section(*eval, "eval.");
    if (Value* engine = layer.find("inference")) inference(*engine, "inference.");
  }

  void eval(Value& layer) {
    renames(layer, Scope::kEval, "");
    if (Value* sampling = layer.find("sampling")) renames(*sampling, Scope::kSampling, "sampling.");
    if (Value* ids = layer.find("environment_ids")) {
      Value envs = environments_of(*ids);
      layer.erase("environment_ids");
      if (layer.find("env"))
        report_.add("environment_ids", "is the older name of env; set only one of them", &envs);
      else
        layer.set("env", std::move(envs));
    }
    if (Value* envs = layer.find("env")) env_list(*envs, "env");
  }

  /// A list of names, or one comma-separated text, as a list of environments.
  static Value environments_of(const Value& ids) {
    Value envs = Value(Value::List());
    const Value::List one = {ids};
    for (const Value& item : ids.is_list() ? ids.items() : one) {
      std::string_view rest = item.is_string() ? std::string_view(item.as_string()) : std::string_view();
      while (!rest.empty()) {
        const std::size_t comma = rest.find(',');
        Value env = Value::table();
        if (comma != 0) env.set("id", Value(rest.substr(0, comma)));
        env.set_origin(item.origin());
        if (comma != 0) envs.items().push_back(std::move(env));
        rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
      }
    }
    Value marked = std::move(envs);
    for (Value& env : marked.items()) env.set_origin(ids.origin());
    return marked;
  }

  void env_list(Value& envs, const std::string& prefix) {
    if (std::optional<Value> entries = as_entries(envs)) envs = *std::move(entries);
    if (envs.is_list()) {
      for (std::size_t i = 0; i < envs.items().size(); ++i) env_entry(envs.items()[i], fmt::format("{}[{}].", prefix, i));
    } else if (is_indexed(envs)) {
      for (Member& member : envs.members()) env_entry(member.value, fmt::format("{}[{}].", prefix, member.key));
    } else {
      env_entry(envs, prefix + "[0].");
    }
  }

  void env_entry(Value& env, const std::string& prefix) {
    if (!env.is_table()) return;
    renames(env, Scope::kTrainEnv, prefix);
    if (Value* rest = env.find("env"); rest && rest->is_table()) {
      for (const Member& agent : rest->members()) set_path(env, "agent." + agent.key, agent.value);
      env.erase("env");
    }
    if (Value* sampling = env.find("sampling")) renames(*sampling, Scope::kSampling, prefix + "sampling.");
  }

  /// `resume` (bare, or with a step) is ckpt.resume_step, -1 for the latest.
  void resume(Value& section, const std::string& prefix) {
    if (!section.is_table()) return;
    Value* resume = section.find("resume");
    if (!resume) return;
    const bool is_off = resume->is_null() || (resume->is_bool() && !resume->as_bool());
    Value step = is_off ? Value() : Value(-1);
    step.set_origin(resume->origin());
    if (const Value* wanted = resume->find("step")) step = *wanted;
    section.erase("resume");
    put(section, "ckpt.resume_step", std::move(step), prefix + "resume", prefix);
  }

  /// `algo.type` is a training mode or an advantage.
  void algorithm(Value& section) {
    const Value* type = find_path(section, "algo.type");
    if (const Value* algo = section.find("algo"); algo && algo->is_string()) type = algo;
    if (!type) {
      if (const Value* algo = section.find("algo")) {
        report_.add("algo", "is the newer name of training_mode and advantage; set those, or algo.type", algo);
        section.erase("algo");
      }
      return;
    }
    const Value chosen = *type;
    const std::string name = chosen.is_string() ? chosen.as_string() : to_display(chosen);
    const bool has_teacher = find_path(section, "algo.teacher") != nullptr;
    if (has_teacher) teacher(section, *find_path(section, "algo.teacher"));
    if (const Value* source = find_path(section, "algo.sampling.source"); source && source->is_table()) teacher(section, *source);
    section.erase("algo");
    if (name == "grpo" || name == "max_rl" || name == "echo" || name == "rae" || name == "hierarchical_grpo") {
      set_path(section, "advantage.type", retyped(chosen, name));
    } else if (name == "opd" || name == "opsd" || name == "sft") {
      set_path(section, "training_mode", retyped(chosen, name));
    } else {
      report_.add("algo.type", "must be one of grpo, max_rl, opd, sft, echo, rae, hierarchical_grpo, opsd", &chosen);
    }
  }

  /// A frozen endpoint {name, base_url, ...} as our teacher {model, client}.
  static void teacher(Value& section, const Value endpoint) {
    if (!endpoint.is_table()) return;
    for (const Member& member : endpoint.members())
      set_path(section, fmt::format("teacher.{}.{}", member.key == "name" ? "model" : "client", member.key), member.value);
  }

  static void advantage(Value& section) {
    Value* advantage = section.find("advantage");
    if (!advantage) return;
    if (advantage->is_null() || (advantage->is_bool() && !advantage->as_bool())) {
      const Value type = retyped(*advantage, "reward");
      *advantage = Value::table();
      advantage->set("type", type);
      return;
    }
    if (advantage->is_string()) {
      const Value type = *advantage;
      *advantage = Value::table();
      advantage->set("type", type);
    }
    if (!advantage->is_table()) return;
    if (Value* type = advantage->find("type"); type && type->is_string() && type->as_string() == "default") *type = retyped(*type, "grpo");
    if (const Value* weighted = advantage->find("length_weighted_mean")) {
      const bool is_on = weighted->is_bool() ? weighted->as_bool() : to_display(*weighted) == "\"true\"";
      const Value type = retyped(*weighted, is_on ? "opo" : "grpo");
      advantage->erase("length_weighted_mean");
      if (is_on || !advantage->find("type")) advantage->set("type", type);
    }
  }

  static Value retyped(const Value& old, std::string_view text) {
    Value value(text);
    value.set_origin(old.origin());
    return value;
  }

  void renames(Value& section, Scope scope, const std::string& prefix) {
    if (!section.is_table()) return;
    for (const Retired& retired : kRetired) {
      if (retired.scope != scope) continue;
      if (const Value* found = find_path(section, retired.key)) {
        report_.add(prefix + std::string(retired.key), fmt::format("is not a key of this program; {}", retired.advice), found);
        erase_path(section, retired.key);
      }
    }
    for (const Rename& rename : kRenames) {
      if (rename.scope != scope) continue;
      const Value* found = find_path(section, rename.from);
      if (!found) continue;
      Value value = *found;
      erase_path(section, rename.from);
      if (rename.is_inverted) value = inverted(value);
      put(section, rename.to, std::move(value), prefix + std::string(rename.from), prefix);
    }
  }

  static Value inverted(const Value& value) {
    Value opposite = value;
    if (value.is_bool()) opposite = Value(!value.as_bool());
    if (value.is_string()) opposite = Value(value.as_string() == "true" || value.as_string() == "True" ? "false" : "true");
    opposite.set_origin(value.origin());
    opposite.set_loose(value.is_loose());
    return opposite;
  }

  /// Puts a value at its canonical key. Two tables merge; two different values are a problem.
  void put(Value& section, std::string_view key, Value value, const std::string& old_name, const std::string& prefix) {
    Value* present = find_path(section, key);
    if (!present) {
      set_path(section, key, std::move(value));
    } else if (present->is_table() && value.is_table()) {
      Value merged = std::move(value);
      merge(merged, *present);
      *find_path(section, key) = std::move(merged);
    } else if (present->is_bool() && value.is_table()) {
      *present = std::move(value);
    } else if (!present->is_table() && !equals(*present, value)) {
      report_.add(prefix + std::string(key), fmt::format("is also set as {} = {}; set only one of them", old_name, to_display(value)),
                  present);
    }
  }

  Report& report_;
};

}  // namespace

void canonicalize(Value& layer, Command command, Report& report) { Canonicalizer(report).run(layer, command); }

std::vector<std::string> alias_roots(Command command) {
  constexpr std::pair<Command, Scope> kScopes[] = {
      {Command::kRl, Scope::kRl},          {Command::kTrainer, Scope::kTrainer},     {Command::kOrchestrator, Scope::kOrchestrator},
      {Command::kSft, Scope::kSft},        {Command::kInference, Scope::kInference}, {Command::kEval, Scope::kEval},
      {Command::kSynthesize, Scope::kEval}};
  std::vector<std::string> roots = {"resume", "environment_ids"};
  for (const auto& [owner, scope] : kScopes)
    if (owner == command)
      for (const Rename& rename : kRenames)
        if (rename.scope == scope) roots.emplace_back(rename.from.substr(0, rename.from.find('.')));
  return roots;
}

}  // namespace prl::config
