#include "tools/plan.hpp"

#include <fmt/format.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <filesystem>
#include <vector>

#include "base/error.hpp"
#include "base/units.hpp"
#include "launch/model_setup.hpp"
#include "ops/measure.hpp"
#include "tools/bench.hpp"

namespace prl::tools {
namespace {
namespace fs = std::filesystem;

nn::ModelConfig model_of(const std::string& name) {
  const fs::path path(name);
  std::error_code error;
  if (fs::is_directory(path, error)) return nn::load_model_config(path);
  if (path.filename() == "config.json") return nn::load_model_config(path.parent_path());
  for (const std::string& shape : {name, "qwen3-" + name})
    if (is_named_shape(shape)) return named_shape(shape);
  return nn::load_model_config(launch::model_folder(name));
}

/// A row holds whole rollouts.
std::int64_t rows_of(const config::PlanConfig& config) {
  if (config.num_rows) return *config.num_rows;
  if (config.work == config::PlanWork::kSft) return 8;
  const int per_row = std::max(1, config.seq_len / (config.prompt_tokens + config.completion_tokens));
  return (config.batch_size + per_row - 1) / per_row;
}

std::string rate(double per_second, const char* unit) {
  const bool is_large = per_second >= 1e12;
  return fmt::format("{:.4g} {}{}/s", per_second / (is_large ? 1e12 : 1e9), is_large ? "T" : "G", unit);
}

std::vector<std::string> assumptions(const config::PlanConfig& config, const launch::Card& card, const launch::StepLoad& load) {
  std::vector<std::string> lines;
  lines.push_back(fmt::format("{}: {} at {:.0f}% in training, memory {} at {:.0f}%, {:.1f} GiB", card.name, rate(card.flops, "FLOP"),
                              100 * card.compute_efficiency, rate(card.memory_bytes_per_s, "B"), 100 * card.bandwidth_efficiency,
                              card.memory_bytes / kGiB));
  lines.push_back(fmt::format("a device sends {} within a machine of {} and {} to others, {:g} microseconds an exchange",
                              rate(card.link_bytes_per_s, "B"), config.gpus_per_node, rate(card.node_bytes_per_s, "B"),
                              config.assume_latency));
  lines.push_back(fmt::format("{} rows of {} tokens, sequences of {}; rows are full and every token is trained on", load.num_rows,
                              load.seq_len, load.sequence_tokens));
  if (load.step.num_ranks > 1 && load.step.reduce == trainer::Reduce::kExact)
    lines.emplace_back(
        "a layer's gradient travels beside the backward pass of the next one, at the link's full rate and without slowing that down; what "
        "is "
        "larger than a layer travels beside it in part; \"exchange\" is what the pass waits for, and the owner's sums");
  lines.emplace_back(load.policy.gathers_layers
                         ? "AdamW; a layer's weights travel beside the layer before it, forward and backward; \"gather\" is what is waited "
                           "for, and embedding and head after the step"
                     : load.sampling ? "AdamW; new weights are gathered before they are published"
                                     : "AdamW; new weights travel under the next forward pass; \"gather\" is what that waits for");
  if (load.model.num_experts > 0) lines.emplace_back("each expert has as many rows as the others");
  if (load.policy.share.divides_experts)
    lines.emplace_back("experts are divided among the devices; \"exchange\" has the way of tokens to them and back, which is waited for");
  if (!load.sampling) return lines;
  lines.push_back(
      fmt::format("{} rollouts of {} tokens after {} of prompt, all of that length; no prefix is shared; environments take no time",
                  config.batch_size, config.completion_tokens, config.prompt_tokens));
  lines.emplace_back(load.sampling->num_engines == 0
                         ? "sampling and training share the devices, so they take turns; weights change by a pointer"
                     : load.sampling->is_beside_training ? "sampling of the next step goes on beside training"
                                                         : "sampling and training take turns");
  if (load.sampling->num_engines > 0)
    lines.emplace_back(launch::num_weight_senders(load) > 1 ? "each rank sends its part of the weights to each engine"
                                                            : "the first rank sends the weights to each engine");
  return lines;
}

boost::json::object memory_json(const launch::MemoryPlan& plan, const char* process) {
  boost::json::object out = boost::json::parse(plan.to_json(process)).as_object();
  out["fits"] = plan.fits();
  return out;
}

struct Plan {
  launch::DevicePlans memory;
  launch::StepCost cost;
  int least_devices = 0;
  std::int64_t longest_row = 0;
  std::vector<std::string> assumptions;
};

std::vector<std::pair<const char*, double>> parts_of(const launch::StepCost& cost, bool has_sampling) {
  std::vector<std::pair<const char*, double>> parts{
      {"compute", cost.compute}, {"exchange", cost.exchange}, {"optimizer", cost.optimizer}, {"gather", cost.gather}};
  if (has_sampling) parts.insert(parts.end(), {{"sampling", cost.sampling}, {"weight_sync", cost.weight_sync}});
  return parts;
}

std::string to_json(const config::PlanConfig& config, const launch::Card& card, const launch::StepLoad& load, const Plan& plan) {
  boost::json::array memory{memory_json(plan.memory.trainer, "trainer")};
  if (plan.memory.engine) memory.push_back(memory_json(*plan.memory.engine, "engine"));
  boost::json::object seconds;
  for (const auto& [name, value] : parts_of(plan.cost, load.sampling.has_value())) seconds[name] = value;
  seconds["step"] = plan.cost.total;
  boost::json::array assumed;
  for (const std::string& line : plan.assumptions) assumed.emplace_back(line);
  const boost::json::object out{
      {"model", config.model},
      {"parameters", load.model.num_parameters()},
      {"card", card.name},
      {"devices", config.num_devices},
      {"infer_devices", config.num_infer_devices},
      {"fits", plan.memory.fits},
      {"missing", plan.memory.missing},
      {"least_devices", plan.least_devices},
      {"longest_row", plan.longest_row},
      {"memory", memory},
      {"rounds", plan.cost.num_rounds},
      {"seconds", seconds},
      {"beside_compute", boost::json::object{{"exchange", plan.cost.hidden_exchange}, {"gather", plan.cost.hidden_gather}}},
      {"bytes_sent", boost::json::object{{"exchange", plan.cost.exchange_bytes}, {"gather", plan.cost.gather_bytes}}},
      {"tokens_per_s", plan.cost.tokens_per_s},
      {"model_flops_share", plan.cost.model_flops_share},
      {"assumptions", assumed}};
  return boost::json::serialize(out) + "\n";
}

std::string to_text(const config::PlanConfig& config, const launch::StepLoad& load, const Plan& plan) {
  std::string text = fmt::format("{}: {:.3g} B parameters on {} {} that train", config.model,
                                 static_cast<double>(load.model.num_parameters()) / 1e9, config.num_devices, config.card);
  if (config.num_infer_devices > 0) text += fmt::format(" and {} that sample", config.num_infer_devices);
  text += fmt::format("\n\nmemory of a device\n  training  {}\n", plan.memory.trainer.to_string());
  if (plan.memory.engine) text += fmt::format("  sampling  {}\n", plan.memory.engine->to_string());
  text += plan.memory.fits ? "  it fits\n" : fmt::format("  it does NOT fit: {}\n", plan.memory.missing);
  text += plan.least_devices > 0
              ? fmt::format("  otherwise the same, {} device{} that train would do", plan.least_devices, plan.least_devices > 1 ? "s" : "")
              : std::string("  otherwise the same, it does not fit on any number of devices that train");
  text += fmt::format("; the longest row that fits on {} is {}\n\ntime of a step\n", config.num_devices,
                      plan.longest_row > 0 ? fmt::format("{} tokens", plan.longest_row) : std::string("below 1024 tokens"));
  for (const auto& [name, seconds] : parts_of(plan.cost, load.sampling.has_value()))
    text += fmt::format("  {:<12}{:>12.4f} s{:>6.1f}%\n", name, seconds, 100 * seconds / plan.cost.total);
  text +=
      fmt::format("  {:<12}{:>12.4f} s        {} round{}, {:.0f} tokens/s trained, {:.1f}% of the devices' peak\n", "step", plan.cost.total,
                  plan.cost.num_rounds, plan.cost.num_rounds > 1 ? "s" : "", plan.cost.tokens_per_s, 100 * plan.cost.model_flops_share);
  if (const double hidden = plan.cost.hidden_exchange + plan.cost.hidden_gather; hidden > 0)
    text += fmt::format("  beside compute, not in the sum: exchange {:.4f} s, gather {:.4f} s\n", plan.cost.hidden_exchange,
                        plan.cost.hidden_gather);
  text += "\nassumed\n";
  for (const std::string& line : plan.assumptions) text += fmt::format("  {}\n", line);
  return text;
}

}  // namespace

launch::Card card_of(const config::PlanConfig& config) {
  launch::Card card;
  if (config.card == "local") {
    const auto runtime = launch::make_runtime({});
    const bool is_cpu = runtime->device().kind == DeviceKind::kCpu;
    ops::OpSession session(runtime, 0);
    const ops::MachinePeak peak = ops::measure_machine(session.context());
    const bool is_half = launch::compute_dtype(config.dtype, runtime->device().kind) == DType::kBF16;
    const double sharing = is_cpu ? std::min(config.num_devices, config.gpus_per_node) : 1;
    const double memory = peak.read_bytes_per_second / sharing;
    card = {"local", (is_half ? peak.bf16_flops : peak.f32_flops) / sharing, static_cast<double>(runtime->bytes_available()) / sharing,
            memory,
            // Ranks of one machine without a link between them move bytes through its memory: each is read and written twice on its way.
            memory / 4, memory / 4, memory};
  } else {
    card = launch::named_card(config.card);
  }
  if (config.assume_flops) card.flops = *config.assume_flops * 1e12;
  if (config.assume_efficiency) card.compute_efficiency = card.bandwidth_efficiency = *config.assume_efficiency;
  if (config.assume_bandwidth) card.link_bytes_per_s = *config.assume_bandwidth * 1e9;
  if (config.assume_node_bandwidth) card.node_bytes_per_s = *config.assume_node_bandwidth * 1e9;
  if (config.assume_memory_bandwidth) card.memory_bytes_per_s = *config.assume_memory_bandwidth * 1e9;
  if (config.assume_memory) card.memory_bytes = *config.assume_memory * kGiB;
  return card;
}

std::string plan_report(const config::PlanConfig& config, const launch::Card& card) {
  nn::ModelConfig model = model_of(config.model);
  // As runs do by default.
  model.attends_to_latents = model.latent && model.latent->has_attention() && config.work == config::PlanWork::kRl;
  if (config.seq_len > model.max_position)
    fail(ErrorCode::kOverlong, "seq_len: {} tokens, and the model ends at position {}", config.seq_len, model.max_position);
  trainer::PolicyOptions policy;
  policy.compute = launch::compute_dtype(config.dtype, DeviceKind::kCuda);
  policy.random_init = true;
  policy.shape = model;
  policy.checkpointing = {config.checkpoint_every};
  trainer::GradientStepOptions step;
  step.num_ranks = config.num_devices;
  step.num_replicas = config.dp_replicate;
  step.overlaps_exchange = true;  // as runs do
  policy.share.divides_experts = config.ep > 1;
  if (config.ep > 1 && config.ep != config.num_devices)
    fail(ErrorCode::kInvalidArgument, "ep: {} devices cannot divide the experts among {} that train; use 1, or {}", config.ep,
         config.num_devices, config.num_devices);
  if (config.ep > 1) trainer::check_experts_divide(model, config.ep);
  if (config.ep > 1 && (config.dp_replicate > 1 || config.reduce == config::GradientReduce::kFast))
    fail(ErrorCode::kNotImplemented,
         "ep: experts are divided with exact sums and one copy of the state; use dp_replicate 1 and reduce exact");
  policy.gathers_layers = (config.reshard_after_forward || config.ep > 1) && config.num_devices > config.dp_replicate;
  if (config.reduce == config::GradientReduce::kFast) step.reduce = trainer::Reduce::kFast;
  if (config.optim_cpu_offload || config.fsdp_cpu_offload)
    step.optimizer_memory.host = make_host_link(make_cpu_runtime(), /*page_locked=*/false);
  if (config.fsdp_cpu_offload) {
    policy.masters_host = step.optimizer_memory.host;
    step.optimizer_memory.holds_masters = true;
  }
  launch::StepLoad load{.model = model,
                        .policy = policy,
                        .step = step,
                        .seq_len = config.seq_len,
                        .sequence_tokens = config.sequence_tokens.value_or(config.seq_len),
                        .num_rows = rows_of(config),
                        .devices_per_node = config.gpus_per_node,
                        .latency_s = config.assume_latency * 1e-6};
  if (config.work == config::PlanWork::kRl) {
    load.sequence_tokens = config.sequence_tokens.value_or(config.prompt_tokens + config.completion_tokens);
    load.sampling = launch::SamplingLoad{.num_rollouts = config.batch_size,
                                         .prompt_tokens = config.prompt_tokens,
                                         .completion_tokens = config.completion_tokens,
                                         .max_num_seqs = config.max_num_seqs,
                                         .num_engines = config.num_infer_devices,
                                         .is_beside_training = config.max_async_level > 0};
  }
  const Plan plan{launch::device_plans(load, card), launch::step_cost(load, card), launch::least_devices(load, card),
                  launch::longest_row(load, card), assumptions(config, card, load)};
  return config.json ? to_json(config, card, load, plan) : to_text(config, load, plan);
}

}  // namespace prl::tools
