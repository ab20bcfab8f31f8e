#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "env/environment.hpp"

namespace prl::orchestrator {

/// A train task by position: environment in the run's list, row in its train split.
struct TaskRef {
  std::int64_t env_idx = 0;
  std::int64_t task_idx = 0;
  auto operator<=>(const TaskRef&) const = default;
};

/// How one environment's tasks are drawn. Source: spec 3.7.
struct Curriculum {
  enum class Order {
    kRandom,      ///< uniform with replacement over the tasks in the normal pool
    kSequential,  ///< the tasks in their order, again and again
    kDifficulty,  ///< at random with the weight of the pool that a task's last mean reward puts it into; 1 for a task not seen yet
  };
  struct Pool {
    std::string name;
    double threshold = 0;  ///< a task is in the first pool whose threshold its mean reward does not exceed, else in the last
    double weight = 1;     ///< >= 0
  };
  Order order = Order::kRandom;
  std::vector<Pool> pools;  ///< of kDifficulty, by ascending threshold; not empty
  std::uint64_t seed = 42;  ///< of kDifficulty
};

struct TaskSamplerOptions {
  std::vector<Curriculum> curricula;  ///< one per environment; empty: at random everywhere
  std::uint64_t seed = 42;
  std::vector<double> env_ratios;        ///< > 0, one per environment; empty: by number of tasks
  std::optional<double> easy_threshold;  ///< mean reward >= this: the task leaves for the easy pool
  std::optional<double> hard_threshold;  ///< mean reward <= this: the task leaves for the hard pool
  double easy_fraction = 0;              ///< part of each pool that returns to normal on load()
  double hard_fraction = 0;
};

/// Chooses the next task and sorts tasks into easy, normal and hard pools by their groups' mean rewards (spec 3.6).
///
/// The draws are a pure function of the options, the calls of observe() and their order, so a saved and loaded sampler goes
/// on as if it had never stopped. One thread.
class TaskSampler {
 public:
  /// Error{kInvalidArgument} naming an environment without train tasks, one with a curriculum and a task twice (among its first 4,096), or
  /// ratios that do not fit.
  TaskSampler(std::vector<env::EnvironmentPtr> environments, TaskSamplerOptions options);

  /// Error{kInvalidArgument} when every task of every environment has left the normal pool, or those of the chosen one have weight 0.
  TaskRef draw();
  void observe(TaskRef task, double mean_reward);

  struct PoolSizes {
    std::int64_t easy = 0, normal = 0, hard = 0;
  };
  PoolSizes pool_sizes(std::int64_t env_idx) const;
  /// Tasks by pool of a curriculum by difficulty, and "unseen"; empty for other environments.
  std::map<std::string, std::int64_t> difficulty_sizes(std::int64_t env_idx) const;

  /// Pools are saved by task key, so that a data set whose rows moved still loads.
  boost::json::object save() const;
  /// Warns about tasks that no longer exist. Error{kCorrupt} when `state` is not what save() writes.
  void load(const boost::json::object& state);

 private:
  struct Pool {
    std::vector<std::int64_t> easy, normal, hard;  ///< ascending task indices
    std::int64_t cursor = 0;
    Rng rng{0};                              ///< of kDifficulty
    std::map<std::int64_t, double> rewards;  ///< last mean reward by task, of kDifficulty
  };
  const Curriculum& curriculum_of(std::size_t env_idx) const;
  static std::size_t difficulty_of(const Curriculum& curriculum, double mean_reward);
  static std::int64_t draw_by_difficulty(const Curriculum& curriculum, Pool& pool, const std::string& env_name);
  void load_pools(std::size_t env_idx, const boost::json::object& entry);
  double weight_of(std::size_t env_idx) const;

  std::vector<env::EnvironmentPtr> environments_;
  TaskSamplerOptions options_;
  Rng rng_;
  std::vector<Pool> pools_;
};

}  // namespace prl::orchestrator
