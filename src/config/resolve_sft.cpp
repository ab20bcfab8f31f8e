#include <fmt/core.h>

#include "config/bind.hpp"
#include "config/detail/check.hpp"

namespace prl::config {
namespace {

using detail::Check;

void check_data(const SftData& data, const std::string& key, const Check& check) {
  std::visit(
      [&](const auto& d) {
        if (d.batch_size % d.micro_batch_size != 0)
          check.problem(key + ".micro_batch_size", fmt::format("must divide batch_size, which is {}", d.batch_size));
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

}  // namespace

template <>
Resolution<SftConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<SftConfig>(raw);
  SftConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.bench) {
    config.max_steps = detail::kBenchSteps;
    config.ckpt.reset();
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
