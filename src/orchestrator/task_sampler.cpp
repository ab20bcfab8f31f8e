#include "orchestrator/task_sampler.hpp"

#include <boost/json/array.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::orchestrator {

namespace json = boost::json;

namespace {

void insert_sorted(std::vector<std::int64_t>& items, std::int64_t item) {
  items.insert(std::lower_bound(items.begin(), items.end(), item), item);
}

bool erase_sorted(std::vector<std::int64_t>& items, std::int64_t item) {
  const auto it = std::lower_bound(items.begin(), items.end(), item);
  if (it == items.end() || *it != item) return false;
  items.erase(it);
  return true;
}

std::string key_of(const env::Environment& environment, std::int64_t task_idx) {
  return fmt::format("{:016x}", environment.task(env::Split::kTrain, task_idx).key());
}

/// How many tasks of an environment are looked at: endless ones and large ones are not read whole at the start of a run.
constexpr std::int64_t kMaxCompared = 4096;

/// A curriculum remembers tasks by their keys, so each must be there once.
void check_unique(const env::Environment& environment) {
  std::unordered_map<std::string, std::int64_t> seen;
  const std::int64_t num_tasks = std::min(environment.num_tasks(env::Split::kTrain), kMaxCompared);
  for (std::int64_t i = 0; i < num_tasks; ++i) {
    const auto [first, is_new] = seen.emplace(key_of(environment, i), i);
    if (!is_new)
      fail(ErrorCode::kInvalidArgument,
           "environment {}: train tasks {} and {} are the same, and a curriculum knows tasks by what they hold; remove one of them from "
           "the data, "
           "or unset curriculum",
           environment.name(), first->second, i);
  }
}

const json::value& member(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) fail(ErrorCode::kCorrupt, "saved task sampler: no member '{}'", key);
  return *value;
}

}  // namespace

TaskSampler::TaskSampler(std::vector<env::EnvironmentPtr> environments, TaskSamplerOptions options)
    : environments_(std::move(environments)), options_(std::move(options)), rng_(options_.seed, /*stream=*/0x7a5c) {
  if (environments_.empty()) fail(ErrorCode::kInvalidArgument, "orchestrator.train.env is empty: there is nothing to train on");
  if (!options_.env_ratios.empty() && options_.env_ratios.size() != environments_.size())
    fail(ErrorCode::kInvalidArgument, "buffer.env_ratios has {} entries, there are {} environments", options_.env_ratios.size(),
         environments_.size());
  for (const double ratio : options_.env_ratios)
    if (!(ratio > 0)) fail(ErrorCode::kInvalidArgument, "buffer.env_ratios holds {}, each must be above 0", ratio);
  if (!options_.curricula.empty() && options_.curricula.size() != environments_.size())
    fail(ErrorCode::kInternal, "{} curricula for {} environments", options_.curricula.size(), environments_.size());
  for (std::size_t i = 0; i < environments_.size(); ++i) {
    const env::EnvironmentPtr& environment = environments_[i];
    const std::int64_t num_tasks = environment->num_tasks(env::Split::kTrain);
    if (num_tasks < 1) fail(ErrorCode::kInvalidArgument, "environment {} has no train tasks", environment->name());
    Pool pool;
    pool.rng = Rng(curriculum_of(i).seed, /*stream=*/0xd1ff);
    pool.normal.resize(static_cast<std::size_t>(num_tasks));
    std::iota(pool.normal.begin(), pool.normal.end(), std::int64_t{0});
    pools_.push_back(std::move(pool));
    if (curriculum_of(i).order != Curriculum::Order::kRandom) check_unique(*environment);
  }
}

const Curriculum& TaskSampler::curriculum_of(std::size_t env_idx) const {
  static const Curriculum kNone;
  return options_.curricula.empty() ? kNone : options_.curricula[env_idx];
}

std::size_t TaskSampler::difficulty_of(const Curriculum& curriculum, double mean_reward) {
  std::size_t pool = 0;
  while (pool + 1 < curriculum.pools.size() && mean_reward > curriculum.pools[pool].threshold) ++pool;
  return pool;
}

std::int64_t TaskSampler::draw_by_difficulty(const Curriculum& curriculum, Pool& pool, const std::string& env_name) {
  const auto weight_of = [&](std::int64_t task) {
    const auto seen = pool.rewards.find(task);
    return seen == pool.rewards.end() ? 1.0 : curriculum.pools[difficulty_of(curriculum, seen->second)].weight;
  };
  double total = 0;
  for (const std::int64_t task : pool.normal) total += weight_of(task);
  if (!(total > 0))
    fail(ErrorCode::kInvalidArgument, "{}: every task is in a pool of weight 0; raise a weight of its curriculum.sampler.pools", env_name);
  double point = pool.rng.next_double() * total;
  std::int64_t chosen = -1;
  for (const std::int64_t task : pool.normal) {
    const double weight = weight_of(task);
    if (!(weight > 0)) continue;
    chosen = task;
    point -= weight;
    if (point < 0) break;
  }
  return chosen;
}

std::map<std::string, std::int64_t> TaskSampler::difficulty_sizes(std::int64_t env_idx) const {
  const Curriculum& curriculum = curriculum_of(static_cast<std::size_t>(env_idx));
  std::map<std::string, std::int64_t> sizes;
  if (curriculum.order != Curriculum::Order::kDifficulty) return sizes;
  const Pool& pool = pools_.at(static_cast<std::size_t>(env_idx));
  for (const Curriculum::Pool& named : curriculum.pools) sizes[named.name] = 0;
  for (const auto& [task, reward] : pool.rewards) ++sizes[curriculum.pools[difficulty_of(curriculum, reward)].name];
  sizes["unseen"] = static_cast<std::int64_t>(pool.normal.size()) - static_cast<std::int64_t>(pool.rewards.size());
  return sizes;
}

double TaskSampler::weight_of(std::size_t env_idx) const {
  if (pools_[env_idx].normal.empty()) return 0;
  if (!options_.env_ratios.empty()) return options_.env_ratios[env_idx];
  return static_cast<double>(environments_[env_idx]->num_tasks(env::Split::kTrain));
}

TaskRef TaskSampler::draw() {
  double total = 0;
  for (std::size_t i = 0; i < pools_.size(); ++i) total += weight_of(i);
  if (total <= 0)
    fail(ErrorCode::kInvalidArgument,
         "no task is left to train on: all of them are in the easy or the hard pool; raise buffer.easy_threshold, lower "
         "buffer.hard_threshold, or add tasks");
  double point = rng_.next_double() * total;
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    if (weight_of(i) <= 0) continue;
    chosen = i;
    point -= weight_of(i);
    if (point < 0) break;
  }
  Pool& pool = pools_[chosen];
  TaskRef task{static_cast<std::int64_t>(chosen), 0};
  switch (curriculum_of(chosen).order) {
    case Curriculum::Order::kRandom: task.task_idx = pool.normal[rng_.next_below(pool.normal.size())]; break;
    case Curriculum::Order::kDifficulty:
      task.task_idx = draw_by_difficulty(curriculum_of(chosen), pool, environments_[chosen]->name());
      break;
    case Curriculum::Order::kSequential: {
      auto it = std::lower_bound(pool.normal.begin(), pool.normal.end(), pool.cursor);
      if (it == pool.normal.end()) it = pool.normal.begin();
      task.task_idx = *it;
      pool.cursor = *it + 1;
      break;
    }
  }
  return task;
}

void TaskSampler::observe(TaskRef task, double mean_reward) {
  Pool& pool = pools_.at(static_cast<std::size_t>(task.env_idx));
  if (curriculum_of(static_cast<std::size_t>(task.env_idx)).order == Curriculum::Order::kDifficulty)
    pool.rewards[task.task_idx] = mean_reward;
  const bool is_easy = options_.easy_threshold && mean_reward >= *options_.easy_threshold;
  const bool is_hard = !is_easy && options_.hard_threshold && mean_reward <= *options_.hard_threshold;
  if (!is_easy && !is_hard) return;
  if (erase_sorted(pool.normal, task.task_idx)) insert_sorted(is_easy ? pool.easy : pool.hard, task.task_idx);
}

TaskSampler::PoolSizes TaskSampler::pool_sizes(std::int64_t env_idx) const {
  const Pool& pool = pools_.at(static_cast<std::size_t>(env_idx));
  const auto size = [](const auto& items) { return static_cast<std::int64_t>(items.size()); };
  return {size(pool.easy), size(pool.normal), size(pool.hard)};
}

json::object TaskSampler::save() const {
  json::object envs;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    json::array easy;
    json::array hard;
    for (const std::int64_t task : pools_[i].easy) easy.emplace_back(key_of(*environments_[i], task));
    for (const std::int64_t task : pools_[i].hard) hard.emplace_back(key_of(*environments_[i], task));
    json::object entry;
    entry["cursor"] = pools_[i].cursor;
    if (curriculum_of(i).order == Curriculum::Order::kDifficulty) {
      json::array rewards;
      for (const auto& [task, reward] : pools_[i].rewards) rewards.push_back(json::array{key_of(*environments_[i], task), reward});
      entry["rewards"] = std::move(rewards);
      entry["curriculum_rng_position"] = pools_[i].rng.position();
    }
    entry["easy"] = std::move(easy);
    entry["hard"] = std::move(hard);
    envs[environments_[i]->name()] = std::move(entry);
  }
  json::object state;
  state["rng_position"] = rng_.position();
  state["envs"] = std::move(envs);
  return state;
}

void TaskSampler::load(const json::object& state) {
  rng_.seek(member(state, "rng_position").to_number<std::uint64_t>());
  const json::object& envs = member(state, "envs").as_object();
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const env::Environment& environment = *environments_[i];
    const json::value* found = envs.if_contains(environment.name());
    if (found == nullptr) {
      log::warning("the saved state has no environment {}: it starts afresh", environment.name());
      continue;
    }
    load_pools(i, found->as_object());
  }
}

void TaskSampler::load_pools(std::size_t env_idx, const json::object& entry) {
  const env::Environment& environment = *environments_[env_idx];
  Pool& pool = pools_[env_idx];
  pool.cursor = member(entry, "cursor").to_number<std::int64_t>();
  if (const json::value* position = entry.if_contains("curriculum_rng_position")) pool.rng.seek(position->to_number<std::uint64_t>());
  const json::value* rewards = entry.if_contains("rewards");
  const bool has_rewards =
      rewards != nullptr && !rewards->as_array().empty() && curriculum_of(env_idx).order == Curriculum::Order::kDifficulty;
  if (member(entry, "easy").as_array().empty() && member(entry, "hard").as_array().empty() && !has_rewards) return;
  std::unordered_map<std::string, std::int64_t> task_of_key;
  for (std::int64_t task = 0; task < environment.num_tasks(env::Split::kTrain); ++task)
    task_of_key.emplace(key_of(environment, task), task);
  const auto restore = [&](const char* name, std::vector<std::int64_t>& target, double fraction) {
    std::vector<std::int64_t> tasks;
    std::int64_t num_missing = 0;
    for (const json::value& key : member(entry, name).as_array()) {
      const auto it = task_of_key.find(std::string(key.as_string()));
      if (it == task_of_key.end())
        ++num_missing;
      else
        tasks.push_back(it->second);
    }
    if (num_missing > 0)
      log::warning("{}: {} tasks of the saved {} pool are not in the data set any more", environment.name(), num_missing, name);
    auto num_return = static_cast<std::size_t>(std::llround(fraction * static_cast<double>(tasks.size())));
    for (; num_return > 0; --num_return) tasks.erase(tasks.begin() + static_cast<std::ptrdiff_t>(rng_.next_below(tasks.size())));
    for (const std::int64_t task : tasks)
      if (erase_sorted(pool.normal, task)) insert_sorted(target, task);
  };
  restore("easy", pool.easy, options_.easy_fraction);
  restore("hard", pool.hard, options_.hard_fraction);
  if (!has_rewards) return;
  for (const json::value& pair : rewards->as_array()) {
    const auto it = task_of_key.find(std::string(pair.as_array().at(0).as_string()));
    if (it != task_of_key.end()) pool.rewards[it->second] = pair.as_array().at(1).to_number<double>();
  }
}

}  // namespace prl::orchestrator
