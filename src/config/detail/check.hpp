#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "config/bind.hpp"
#include "config/resolve.hpp"
#include "config/status.hpp"

/// Checks of single roles, shared by the command of the role and by `rl`. Private to config/.
namespace prl::config::detail {

/// Steps of a run with --bench.
constexpr std::int64_t kBenchSteps = 4;

/// Files findings under the keys of one section.
class Check {
 public:
  Check(const Value& raw, std::string prefix, Report& report, const Context& context)
      : raw_(raw), prefix_(std::move(prefix)), report_(report), context_(context) {}

  /// What the user wrote at a key of the section; nullptr if nothing.
  const Value* raw(std::string_view key) const { return find_path(raw_, full(key)); }
  /// True if the user wrote something other than null there.
  bool is_set(std::string_view key) const {
    report_.decisive.insert(full(key));
    const Value* value = raw(key);
    return value && !value->is_null();
  }
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }
  void problem(std::string_view key, std::string message) const { report_.add(full(key), std::move(message), raw(key)); }
  /// For what depends on values. A key that is not built whatever its value, or never has an effect, says so in its section's visit().
  void not_built(std::string_view key, std::string feature) const;
  void inert(std::string_view key, std::string reason) const;
  void warn(std::string_view key, std::string_view message) const;
  /// The same section one level down.
  Check sub(std::string_view key) const { return Check(raw_, full(key) + ".", report_, context_); }
  const Context& context() const { return context_; }

 private:
  const Value& raw_;
  std::string prefix_;
  Report& report_;
  const Context& context_;
};

// Checks may also fill in what follows from other keys, such as bench mode.
void check_trainer(TrainerConfig& config, const Check& check);
void check_orchestrator(OrchestratorConfig& config, const Check& check);
void check_inference(InferenceConfig& config, const Check& check);
/// Warns of what the policy does not use. `prefix`: of the keys, as "router.".
void check_routing(const RoutingConfig& routing, const std::string& prefix, const Check& check);
/// True if `rl` starts the teacher's server as a process.
bool starts_teacher(const RlConfig& config);
/// The teacher of `rl` and its server: fills in what one section tells of the other, after the deployment is chosen.
void resolve_teacher(RlConfig& config, const Check& check);

/// Sets model.dp_replicate from the nodes that share a copy of the state; `prefix` is that of the model's section.
void choose_copies(TrainerModelConfig& model, const std::string& prefix, int num_nodes, const std::optional<int>& nodes_per_group,
                   const Check& check);
void check_trainer_model(TrainerModelConfig& model, const OptimConfig& optim, const Check& check);
/// What the trainer's ranks are divided by, where the deployment says how many there are; `prefix` as above.
void check_ranks(const TrainerModelConfig& model, const std::string& prefix, int num_ranks, const Check& check);
void check_schedule(const SchedulerConfig& scheduler, const OptimConfig& optim, const std::optional<std::int64_t>& max_steps,
                    const Check& check);
void check_online_eval(std::optional<OnlineEvalConfig>& eval, const Check& check);
/// The same, with their sampling, where a process evaluates beside a training run; `check` is that of the section [eval].
void check_evaluations(OnlineEvalConfig& eval, const Check& check);
/// The engine of such a process, for the model `name` at `key`; `check` is that of its section.
void check_eval_engine(EvalEngineConfig& engine, const std::string& name, std::string_view key, const Check& check);
/// Hands `data` of an environment to its arguments `keys` that are not set.
void pass_on_data(const std::optional<std::string>& data, Value& args, std::initializer_list<const char*> keys);
/// Also hands `data` to the environment as its arguments dataset_path and eval_dataset_path.
void check_eval_env(EvalEnvConfig& env, const Check& check);
void check_client(const ClientConfig& client, const Check& check);
void check_ckpt(const std::optional<TrainerCkptConfig>& ckpt, const Check& check);
/// A run cannot be removed and continued.
void check_clean(bool clean_output_dir, const std::optional<TrainerCkptConfig>& ckpt, const Check& check);
/// Applies WANDB_MODE.
void check_wandb(std::optional<WandbConfig>& wandb, const Check& check);
/// Adds "-bench" to the project, once.
void mark_bench(WandbConfig& wandb);
void check_env_vars(const std::map<std::string, std::string>& env_vars, const Check& check);
/// A folder, or a hub id such as "Qwen/Qwen3-0.6B"; which of them it is, is found out when the model is loaded.
void check_model_name(const std::string& name, std::string_view key, const Check& check);
/// Whether inference.model.quantization may say so.
bool is_built_quantization(std::string_view quantization);
/// What needs no look at this machine's Python environments.
template <class Env>
void check_env(const Env& env, const Check& check);
/// Unique, and none of the names that metrics reserve.
template <class Env>
void check_env_names(const std::vector<Env>& envs, std::string_view key, const Check& check);

/// A key that has no effect where a run has a certain shape, and why. Keys without effect in every run have that status in visit().
struct Inert {
  std::string_view key;
  std::string_view reason;
};
/// Reports those that the user set to something else than the default.
void warn_inert(const TypeOps& ops, const void* config, std::span<const Inert> keys, const Check& check);

/// Names the loss type of a [trainer] tree that sets only knobs of an unnamed older loss.
void infer_loss_type(Value& trainer);

/// Binds a tree to a default-made struct.
template <class C>
Resolution<C> bind_all(const Value& raw) {
  Resolution<C> resolution;
  bind(raw, ops_of<C>(), &resolution.config, resolution.report);
  resolution.report.bound = dump(ops_of<C>(), &resolution.config, NullStyle::kAlways);
  check_status(raw, ops_of<C>(), &resolution.config, resolution.report);
  return resolution;
}

}  // namespace prl::config::detail
