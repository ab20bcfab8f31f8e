#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "env/environment.hpp"
#include "env/python/judge.hpp"
#include "env/python/task_pages.hpp"
#include "env/python/worker_pool.hpp"

namespace prl::env::python {

struct PythonOptions {
  std::string name;                                ///< in configs, metrics and samples
  PoolOptions pool;                                ///< workers; its `load` names the environment
  std::string model = "policy";                    ///< the name that Python sees
  std::chrono::milliseconds start_limit{600'000};  ///< until tasks can be had
  std::chrono::milliseconds page_limit{120'000};   ///< of one page of tasks
  std::int64_t num_endless_tasks = 100'000;        ///< of a task set without an end
  std::vector<std::string> state_columns;          ///< of the environment's state, for the episode's info
  std::shared_ptr<Judge> judge;                    ///< answers the calls of judges; null: they are refused
};

/// An environment that runs in Python worker processes (docs/developers/env-protocol.md).
///
/// The workers start with the first call that needs them. Rows are read in pages. Model calls of the environment come back here and are
/// completed with the rollout's chat client; Python sees messages only, so ids, log-probabilities, versions and seeds are those of a
/// native environment. Any thread.
class PythonEnvironment final : public Environment {
 public:
  explicit PythonEnvironment(PythonOptions options);
  ~PythonEnvironment() override;

  const std::string& name() const noexcept override { return options_.name; }
  void prepare() const override;
  std::int64_t num_tasks(Split split) const override;
  Task task(Split split, std::int64_t index) const override;
  asio::awaitable<Task> fetch_task(Split split, std::int64_t index) const override;
  asio::awaitable<Episode> run(Task task, RolloutContext context) const override;
  std::int64_t num_learners() const override;
  bool scores_groups() const noexcept override;
  asio::awaitable<void> score_group(std::span<Episode> group) const override;
  boost::json::array tools(const Task& task) const override;
  asio::awaitable<boost::json::value> save_state() const override;
  void load_state(const boost::json::value& state) const override;
  std::map<std::string, double> gauges() const override;

  /// For tests and reports.
  WorkerPool::Stats stats() const { return pool().stats(); }

 private:
  struct Held {
    std::string run_id;
    std::string group_id;
    boost::json::object sample;
  };
  WorkerPool& pool() const;
  const boost::json::object& loaded() const;
  asio::awaitable<std::vector<boost::json::object>> read_rows(Split split, std::int64_t offset, std::int64_t limit) const;
  std::string run_members(const Task& task, const RolloutContext& context, const boost::json::object& sampling, net::TimePoint now) const;
  void fill(Episode& episode, const boost::json::object& result, class Player& player, const RolloutContext& context) const;
  void fill_seat(Episode& episode, const boost::json::object& sample, const boost::json::object& result, const Player& player) const;
  void hold(const RolloutContext& context, const boost::json::object& result, const boost::json::object& sample) const;
  std::vector<std::optional<Held>> take_held(std::span<const Episode> group) const;

  PythonOptions options_;
  mutable std::mutex mutex_;                        ///< guards what follows
  mutable std::vector<boost::json::value> states_;  ///< that the workers start from
  mutable std::unique_ptr<WorkerPool> pool_;
  mutable std::optional<boost::json::object> loaded_;
  mutable std::map<std::string, Held> held_;     ///< by trajectory id
  mutable std::deque<std::string> held_groups_;  ///< oldest first
  mutable std::unique_ptr<TaskPages> pages_;
};

}  // namespace prl::env::python
