#include <fmt/core.h>

#include <set>
#include <string>

#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/detail/sampling.hpp"

namespace prl::config {
namespace {

using detail::Check;

void check_data(const SftData& data, const std::string& key, const Check& check) {
  std::visit(
      [&](const auto& d) {
        if (d.batch_size % d.micro_batch_size != 0)
          check.problem(key + ".micro_batch_size", fmt::format("must divide batch_size, which is {}", d.batch_size));
        const std::int64_t num_tokens = std::int64_t{d.seq_len} * d.micro_batch_size;
        if (d.pack_function == PackFunction::kStack && num_tokens % kStackUnit != 0)
          check.problem(key + ".pack_function", fmt::format("stack needs rows of a multiple of {} tokens; seq_len * micro_batch_size is {}",
                                                            kStackUnit, num_tokens));
      },
      data);
  const auto* real = std::get_if<SftDataConfig>(&data);
  if (!real) return;
  if (real->name.empty()) check.problem(key + ".name", "names no data; give a file, a folder, or the id of a data set on the hub");
  const std::size_t num_parts = real->subsets ? real->subsets->size() : real->splits ? real->splits->size() : 1;
  if (num_parts == 0) check.problem(key + (real->subsets ? ".subsets" : ".splits"), "is empty; leave it out to take the train split");
  if (real->subsets && real->splits && real->splits->size() != num_parts)
    check.problem(key + ".splits", fmt::format("holds {} splits for {} subsets; give one for each, or only one of the lists",
                                               real->splits->size(), num_parts));
  if (real->probabilities && real->probabilities->size() != num_parts)
    check.problem(key + ".probabilities", fmt::format("holds {} values for {} parts", real->probabilities->size(), num_parts));
}

/// A `prl launch` on one node may start other ranks than the deployment says: launch::check_start knows them.
void check_deployment(const SftConfig& config, const Check& check) {
  if (const auto* nodes = std::get_if<SftMultiNode>(&config.deployment))
    detail::check_ranks(config.model, "", nodes->num_nodes * nodes->gpus_per_node, check);
  else if (config.slurm)
    detail::check_ranks(config.model, "", std::get<SftSingleNode>(config.deployment).num_gpus, check);
}

/// The process that evaluates: its environments, its engine and where that is.
void check_evaluation(SftConfig& config, const Check& check) {
  auto* node = std::get_if<SftSingleNode>(&config.deployment);
  if (!config.eval) {
    constexpr std::string_view kWhy = "there are no evaluations without [eval]";
    constexpr detail::Inert kKeys[] = {{"inference", kWhy}, {"deployment.num_infer_gpus", kWhy}, {"log.vf_level", kWhy}};
    return detail::warn_inert(ops_of<SftConfig>(), &config, kKeys, check);
  }
  detail::check_evaluations(*config.eval, check.sub("eval"));
  if (config.model.debug.random_init || config.model.debug.num_layers)
    check.problem(config.model.debug.random_init ? "model.debug.random_init" : "model.debug.num_layers",
                  "makes another model than that of the folder, which [eval] needs; make one with `prl init-model`");
  if (config.tokenizer.name && *config.tokenizer.name != config.model.name)
    check.warn("tokenizer.name", fmt::format("evaluations read text as the tokenizer in {} does", config.model.name));
  if (!config.inference) config.inference = EvalEngineConfig{};
  const Check engine = check.sub("inference");
  if (!engine.is_set("compute.device") && (config.compute.device == DeviceKind::kCpu || (node != nullptr && node->num_infer_gpus == 0)))
    config.inference->compute.device = DeviceKind::kCpu;
  if (!engine.is_set("model.chat_template")) config.inference->model.chat_template = config.tokenizer.chat_template;
  if (config.model.quantization && !engine.is_set("model.quantization"))
    config.inference->model.quantization = served_quantization(config.model.quantization);
  if (!engine.is_set("model.latent_attention")) config.inference->model.latent_attention = config.model.latent_attention;
  detail::check_eval_engine(*config.inference, config.model.name, "model.name", engine);
  if (node == nullptr) return;
  if (config.inference->parallel.tp > 1 && config.inference->compute.device != DeviceKind::kCpu)
    check.not_built("inference.parallel.tp", "evaluations of a run on several GPUs; use 1");
  if (node->num_infer_gpus > 1) check.not_built("deployment.num_infer_gpus", "evaluations on several GPUs; use 1");
  if (node->num_infer_gpus == 0 && config.inference->compute.device == DeviceKind::kCuda)
    check.problem("inference.compute.device", "is cuda, but deployment.num_infer_gpus is 0: evaluations need a GPU of their own");
}

}  // namespace

EvalsConfig evals_of(const SftConfig& config) {
  EvalsConfig evals;
  evals.model = config.model.name;
  evals.eval = *config.eval;
  evals.eval.cancel_inflight_rollouts_on_eval = false;
  // Only what an engine in a process has a use for.
  EvalEngineConfig& engine = evals.inference.emplace();
  if (config.inference) {
    engine.model = config.inference->model;
    engine.kv = config.inference->kv;
    engine.compute = config.inference->compute;
    engine.max_num_seqs = config.inference->max_num_seqs;
    engine.max_num_batched_tokens = config.inference->max_num_batched_tokens;
    engine.enable_prefix_caching = config.inference->enable_prefix_caching;
    engine.enable_chunked_prefill = config.inference->enable_chunked_prefill;
    engine.kv_cache_offload = config.inference->kv_cache_offload;
    engine.speculative = config.inference->speculative;
    engine.gpu_memory_utilization = config.inference->gpu_memory_utilization;
    engine.seed = config.inference->seed;
    engine.lora_dtype = config.inference->lora_dtype;
    engine.env_vars = config.inference->env_vars;
  }
  engine.env_vars.insert(config.env_vars.begin(), config.env_vars.end());
  EvalsOnlineConfig& online = evals.online.emplace();
  online.broadcasts_dir = config.output_dir / "broadcasts";
  online.max_steps = config.max_steps;
  if (config.ckpt && config.ckpt->resume_step && *config.ckpt->resume_step > 0) online.resume_step = *config.ckpt->resume_step;
  online.timeout = 30.0 * 86400;  // the run that starts the process ends it, too
  online.every_step = online.remove_evaluated = true;
  evals.output_dir = config.output_dir;
  evals.log = config.log;
  evals.file_monitor = config.file_monitor;
  return evals;
}

template <>
Resolution<SftConfig> resolve(Value raw, const Context& context) {
  std::set<std::string> inherited = detail::inherit_sampling(raw.find("eval"), "eval.");
  auto resolution = detail::bind_all<SftConfig>(raw);
  resolution.report.decisive.merge(inherited);
  SftConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.bench) {
    config.max_steps = detail::kBenchSteps;
    config.ckpt.reset();
    config.eval.reset();
    if (config.wandb) detail::mark_bench(*config.wandb);
  }
  const int seq_len = std::visit([](const auto& data) { return data.seq_len; }, config.data);
  if (check.is_set("model.seq_len") && config.model.seq_len < seq_len)
    check.problem("model.seq_len", fmt::format("must be at least data.seq_len, which is {}", seq_len));
  if (!check.is_set("model.seq_len")) config.model.seq_len = seq_len;
  check_data(config.data, "data", check);
  if (config.val) check_data(config.val->data, "val.data", check);
  if (const auto* nodes = std::get_if<SftMultiNode>(&config.deployment))
    detail::choose_copies(config.model, "", nodes->num_nodes, nodes->nodes_per_fsdp_group, check);
  check_deployment(config, check);
  // There is no sampler to agree with, and attention of heads has fewer products.
  if (!config.model.latent_attention) config.model.latent_attention = LatentAttention::kHeads;
  check_evaluation(config, check);
  detail::check_trainer_model(config.model, config.optim, check);
  detail::check_schedule(config.scheduler, config.optim, config.max_steps, check);
  detail::check_ckpt(config.ckpt, check);
  detail::check_clean(config.clean_output_dir, config.ckpt, check);
  detail::check_wandb(config.wandb, check);
  detail::check_env_vars(config.env_vars, check);
  if (config.compute.dtype == ComputeDType::kFloat16) check.not_built("compute.dtype", "training in float16; use bfloat16 or float32");
  return resolution;
}

}  // namespace prl::config
