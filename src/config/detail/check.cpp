#include "config/detail/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "config/bind.hpp"

namespace prl::config::detail {
namespace {

/// Names that the launcher or the tracker owns.
constexpr std::array<std::string_view, 8> kForbiddenVariables = {"CUDA_VISIBLE_DEVICES", "PRL_RUN_ID",           "PRL_RUN_NAME",
                                                                 "WANDB_RUN_ID",         "WANDB_SHARED_MODE",    "WANDB_SHARED_LABEL",
                                                                 "WANDB_SHARED_PRIMARY", "WANDB_SHARED_FINISHER"};

/// The defaults, with the optional blocks and variants around `key` switched on as `chosen` has them.
Value usual_around(const TypeOps& ops, const Value& chosen, std::string_view key) {
  Value blocks = Value::table();
  for (std::size_t dot = key.find('.'); dot != std::string_view::npos; dot = key.find('.', dot + 1)) {
    const Value* block = find_path(chosen, key.substr(0, dot));
    if (!block || !block->is_table()) break;
    Value on = Value::table();
    if (const Value* type = block->find("type")) on.set("type", *type);
    set_path(blocks, key.substr(0, dot), std::move(on));
  }
  const std::shared_ptr<void> fresh = ops.make();
  Report ignored;
  bind(blocks, ops, fresh.get(), ignored);
  return dump(ops, fresh.get(), NullStyle::kAlways);
}

}  // namespace

void Check::not_built(std::string_view key, std::string feature) const {
  const Value* found = raw(key);
  report_.not_built.push_back({full(key), std::move(feature), found ? found->origin() : Origin{}});
}

void Check::warn(std::string_view key, std::string_view message) const {
  report_.warnings.push_back(fmt::format("{}: {}", full(key), message));
}

void Check::inert(std::string_view key, std::string reason) const {
  const Value* found = raw(key);
  report_.inert.push_back({full(key), std::move(reason), found ? found->origin() : Origin{}});
}

void warn_inert(const TypeOps& ops, const void* config, std::span<const Inert> keys, const Check& check) {
  const Value chosen = dump(ops, config, NullStyle::kAlways);
  for (const Inert& inert : keys) {
    const Value* a = find_path(chosen, inert.key);
    const Value usual = usual_around(ops, chosen, inert.key);
    const Value* b = find_path(usual, inert.key);
    if (check.raw(inert.key) && a && !(b && equals(*a, *b))) check.inert(inert.key, std::string(inert.reason));
  }
}

void check_model_name(const std::string& name, std::string_view key, const Check& check) {
  if (name.empty()) check.problem(key, "names no model; give the folder of one, or its id on the Hugging Face hub");
}

template <class Env>
void check_env(const Env& env, const Check& check) {
  const auto& native = check.context().native_envs;
  if (env.id.empty()) return check.problem("id", "must name an environment");
  if (!env.agent.is_table()) check.problem("agent", "expects a table");
  const bool is_native = std::find(native.begin(), native.end(), env.id) != native.end();
  // Others are looked for among the installed ones when the command starts.
  if (!env.extra_env_kwargs.is_table()) check.problem("extra_env_kwargs", "expects a table");
  const bool runs_natively = is_native && !env.path && !env.python && !env.address && env.kind == EnvKind::kAuto;
  if (runs_natively && env.extra_env_kwargs.is_table() && !env.extra_env_kwargs.members().empty())
    check.problem("extra_env_kwargs", "is of Python environments; the arguments of native ones are args");
  if (runs_natively && env.judge) check.warn("judge", "has no effect: no native environment asks a judge");
  if (runs_natively && !env.state_columns.empty()) check.warn("state_columns", "has no effect: native environments have no further state");
  if (is_native && env.agent.is_table() && !env.agent.members().empty() && !env.path && !env.python && !env.address)
    check.warn("agent", "has no effect: native environments have no agents to set up");
}
template void check_env(const EnvConfig&, const Check&);
template void check_env(const EvalEnvConfig&, const Check&);

template <class Env>
void check_env_names(const std::vector<Env>& envs, std::string_view key, const Check& check) {
  std::set<std::string> seen;
  for (std::size_t i = 0; i < envs.size(); ++i) {
    const std::string name = envs[i].name.value_or(envs[i].id);
    const std::string at = fmt::format("{}.{}.name", key, i);
    if (name == "all" || name == "agg") check.problem(at, fmt::format("\"{}\" is reserved for metrics over all environments", name));
    if (!seen.insert(name).second) check.problem(at, fmt::format("two environments are called \"{}\"; give each its own name", name));
  }
}
template void check_env_names(const std::vector<EnvConfig>&, std::string_view, const Check&);
template void check_env_names(const std::vector<EvalEnvConfig>&, std::string_view, const Check&);

void pass_on_data(const std::optional<std::string>& data, Value& args, std::initializer_list<const char*> keys) {
  if (!data || !args.is_table()) return;
  for (const char* key : keys)
    if (!args.find(key)) args.set(key, Value(*data));
}

void check_eval_env(EvalEnvConfig& env, const Check& check) {
  if (!env.args.is_table()) check.problem("args", "expects a table of arguments");
  pass_on_data(env.data, env.args, {"dataset_path", "eval_dataset_path"});
  check_env(env, check);
}

void check_online_eval(std::optional<OnlineEvalConfig>& eval, const Check& check) {
  if (!eval) return;
  if (eval->env.empty()) check.problem("eval.env", "must list at least one environment");
  check_env_names(eval->env, "eval.env", check);
  for (std::size_t i = 0; i < eval->env.size(); ++i) check_eval_env(eval->env[i], check.sub(fmt::format("eval.env.{}", i)));
}

void check_client(const ClientConfig& client, const Check& check) {
  for (const auto& [header, variable] : client.headers_from_env)
    if (!check.context().environment.contains(variable))
      check.problem("headers_from_env." + header, fmt::format("names the environment variable {}, which is not set", variable));
  for (const auto& [header, field] : client.extra_headers_from_state)
    if (std::ranges::find(kRolloutStateFields, field) == kRolloutStateFields.end())
      check.problem("extra_headers_from_state." + header,
                    fmt::format("there is no field '{}'; there are {}", field, fmt::join(kRolloutStateFields, ", ")));
  if (client.base_url.empty()) check.problem("base_url", "must name at least one server");
  for (const auto& [key, urls] :
       {std::pair{"base_url", client.base_url}, std::pair{"admin_base_url", client.admin_base_url.value_or(std::vector<std::string>())}}) {
    for (const std::string& url : urls) {
      if (!url.starts_with("https://") && !url.starts_with("http://"))
        check.problem(key, fmt::format("\"{}\" must start with http:// or https://", url));
    }
  }
}

void check_ckpt(const std::optional<TrainerCkptConfig>& ckpt, const Check& check) {
  if (!ckpt || !ckpt->weights) return;
  if (ckpt->weights->save_format != "safetensors") check.problem("ckpt.weights.save_format", "must be safetensors");
}

void check_clean(bool clean_output_dir, const std::optional<TrainerCkptConfig>& ckpt, const Check& check) {
  if (!clean_output_dir || !ckpt || !ckpt->resume_step) return;
  check.problem("clean_output_dir",
                fmt::format("contradicts ckpt.resume_step, which is {}: a run is either removed or continued; leave out one of the two",
                            *ckpt->resume_step));
}

void check_wandb(std::optional<WandbConfig>& wandb, const Check& check) {
  if (!wandb) return;
  const auto mode = check.context().environment.find("WANDB_MODE");
  if (mode != check.context().environment.end() && mode->second == "disabled") {
    wandb.reset();
    return check.warn("wandb", "is off because WANDB_MODE is disabled");
  }
  if (mode != check.context().environment.end() && mode->second == "offline") wandb->offline = true;
}

void mark_bench(WandbConfig& wandb) {
  if (!wandb.project.ends_with("-bench")) wandb.project += "-bench";
}

void check_env_vars(const std::map<std::string, std::string>& env_vars, const Check& check) {
  for (const auto& [name, value] : env_vars)
    if (std::find(kForbiddenVariables.begin(), kForbiddenVariables.end(), name) != kForbiddenVariables.end())
      check.problem("env_vars." + name, "is set by the launcher and cannot be chosen");
}

void check_schedule(const SchedulerConfig& scheduler, const OptimConfig& optim, const std::optional<std::int64_t>& max_steps,
                    const Check& check) {
  const double lr = std::visit([](const auto& o) { return o.lr; }, optim);
  const auto check_min_lr = [&](double min_lr) {
    if (min_lr > lr) check.problem("scheduler.min_lr", fmt::format("must be at most optim.lr, which is {}", lr));
  };
  if (const auto* linear = std::get_if<LinearScheduler>(&scheduler)) {
    check_min_lr(linear->min_lr);
    if (linear->decay_steps > 0 && !max_steps) {
      check.problem("scheduler.decay_steps", "needs max_steps: the decay ends there; set max_steps or decay_steps = 0");
    } else if (linear->decay_steps > 0 && *max_steps < std::int64_t{linear->warmup_steps} + linear->decay_steps) {
      check.problem("scheduler.decay_steps", fmt::format("warmup_steps {} and decay_steps {} do not fit into max_steps {}",
                                                         linear->warmup_steps, linear->decay_steps, *max_steps));
    }
  } else if (const auto* cosine = std::get_if<CosineScheduler>(&scheduler)) {
    check_min_lr(cosine->min_lr);
    if (!max_steps) {
      check.problem("scheduler.type", "cosine needs max_steps: the decay ends there");
    } else if (*max_steps <= cosine->warmup_steps) {
      check.problem("scheduler.warmup_steps", fmt::format("must be less than max_steps {}", *max_steps));
    }
  }
}

}  // namespace prl::config::detail
