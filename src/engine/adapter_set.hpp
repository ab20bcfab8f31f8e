#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "engine/served_adapter.hpp"

namespace prl::engine {

class ModelRunner;
struct StepPlan;

/// The adapters of an engine by name. Changes take effect between two steps and pause nothing: sequences in flight go on with the new
/// weights. At most `max_ready` adapters that can come back are ready to compute with; the least recently used ones leave the device.
class AdapterSet {
 public:
  /// `max_ready`: also how many adapters the sequences of a step have together at most. 0: there are no adapters.
  explicit AdapterSet(std::int64_t max_ready) : max_ready_(max_ready) {}

  // Any thread.
  std::int64_t max_ready() const noexcept { return max_ready_; }
  /// A new adapter, or other weights for one. Error{kInvalidArgument} if the engine serves none, or both pointers are null.
  void set(const std::string& name, PolicyVersion version, AdapterWeights weights);
  /// Requests can name it no longer; those in flight end with it. False if there is none.
  bool remove(const std::string& name);
  /// Error{kNotFound} names the adapter.
  ServedAdapterPtr find(const std::string& name) const;
  bool has(const std::string& name) const;

  // The engine's thread.
  bool has_news() const noexcept { return has_news_.load(std::memory_order_acquire); }
  /// Carries out what set() asked for. No step may be in flight.
  void apply_news();
  /// Loads every adapter of the plan's rows, evicting others if it must. No step may be in flight. Error of ModelRunner::make_adapter.
  void bring(const StepPlan& plan, ModelRunner& runner);

 private:
  struct News {
    ServedAdapterPtr adapter;
    PolicyVersion version;
    AdapterWeights weights;
  };
  /// Lets the least recently used adapters leave the device until the limit holds. Those of the current step stay.
  void shrink();

  const std::int64_t max_ready_;
  mutable std::mutex mutex_;
  std::map<std::string, ServedAdapterPtr, std::less<>> by_name_;  ///< guarded
  std::vector<News> news_;                                        ///< guarded
  std::atomic<bool> has_news_{false};
  std::uint64_t num_ids_ = 0;                            ///< guarded
  std::vector<std::weak_ptr<ServedAdapter>> on_device_;  ///< guarded; those that can leave
  std::uint64_t num_steps_ = 0;                          ///< the engine's thread
};

}  // namespace prl::engine
