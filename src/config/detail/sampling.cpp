#include "config/detail/sampling.hpp"

#include <fmt/core.h>

#include "config/merge.hpp"

namespace prl::config::detail {
namespace {

/// Below this logits overflow float32 when they are divided; the engine refuses such requests too.
constexpr double kLeastTemperature = 0.01;

/// Fills `own` with what only `shared` has.
void inherit(Value& own, const Value& shared, const std::string& path, std::set<std::string>& taken) {
  for (const Member& member : shared.members()) {
    const std::string key = path + "." + member.key;
    Value* present = own.find(member.key);
    if (!present) {
      own.set(member.key, member.value);
      taken.insert(key);
    } else if (present->is_table() && member.value.is_table()) {
      inherit(*present, member.value, key, taken);
    }
  }
}

/// `inherited`: the section's table, whose values are not named again; null for the section itself.
void check_table(const TrainSamplingConfig& sampling, const TrainSamplingConfig* inherited, const Check& check) {
  if (!(inherited && inherited->temperature == sampling.temperature) && sampling.temperature < kLeastTemperature)
    check.problem("temperature",
                  fmt::format("is {}, from which a policy cannot learn: without chance all rollouts of a group are equal. Set "
                              "at least {}, usually 1",
                              sampling.temperature, kLeastTemperature));
  constexpr std::string_view kAnother =
      "tokens are drawn from another distribution than the one that is trained: mismatch_kl is above 0 even in lock-step, and importance "
      "ratios are off";
  if (sampling.repetition_penalty != (inherited ? inherited->repetition_penalty : 1.0) && sampling.repetition_penalty != 1.0)
    check.warn("repetition_penalty", fmt::format("is {}: {}; set 1", sampling.repetition_penalty, kAnother));
  if (sampling.min_tokens != (inherited ? inherited->min_tokens : 0) && sampling.min_tokens > 0)
    check.warn("min_tokens", fmt::format("is {}: stop tokens are masked until then, so {}; set 0", sampling.min_tokens, kAnother));
}

}  // namespace

void list_environments(Value* section) {
  Value* envs = section ? section->find("env") : nullptr;
  if (!envs || !envs->is_table()) return;
  if (std::optional<Value> entries = as_entries(*envs)) *envs = *std::move(entries);
  Value::List items;
  if (is_indexed(*envs))
    for (const Member& member : envs->members()) items.push_back(member.value);
  else
    items.push_back(*envs);
  Value list = Value(std::move(items));
  *envs = std::move(list);
}

std::set<std::string> inherit_sampling(Value* section, std::string_view prefix) {
  std::set<std::string> taken;
  list_environments(section);
  Value* envs = section ? section->find("env") : nullptr;
  const Value* sampling = section ? section->find("sampling") : nullptr;
  if (!envs || !envs->is_list() || !sampling || !sampling->is_table()) return taken;
  const Value shared = *sampling;
  for (std::size_t i = 0; i < envs->items().size(); ++i)
    if (Value* own = envs->items()[i].find("sampling"); own && own->is_table())
      inherit(*own, shared, fmt::format("{}env.{}.sampling", prefix, i), taken);
  return taken;
}

void check_policy_sampling(const TrainEnvsConfig& train, const Check& check) {
  check_table(train.sampling, nullptr, check.sub("sampling"));
  for (std::size_t i = 0; i < train.env.size(); ++i)
    if (train.env[i].sampling) check_table(*train.env[i].sampling, &train.sampling, check.sub(fmt::format("env.{}.sampling", i)));
}

}  // namespace prl::config::detail
