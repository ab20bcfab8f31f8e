#include "engine/adapter_set.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "engine/model_runner.hpp"
#include "engine/step_plan.hpp"

namespace prl::engine {

void AdapterSet::set(const std::string& name, PolicyVersion version, AdapterWeights weights) {
  if (max_ready_ < 1) fail(ErrorCode::kInvalidArgument, "this engine serves no adapters; set enable_lora");
  if (weights.ready == nullptr && weights.stored == nullptr) fail(ErrorCode::kInvalidArgument, "adapter '{}' has no weights", name);
  const std::lock_guard lock(mutex_);
  ServedAdapterPtr& entry = by_name_[name];
  if (entry != nullptr) {
    news_.push_back({entry, version, std::move(weights)});
    has_news_.store(true, std::memory_order_release);
    return;
  }
  entry = std::make_shared<ServedAdapter>();
  entry->name = name;
  entry->id = ++num_ids_;
  entry->version = version;
  entry->weights = std::move(weights);
  if (entry->weights.stored != nullptr) on_device_.push_back(entry);
}

bool AdapterSet::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return by_name_.erase(name) > 0;
}

ServedAdapterPtr AdapterSet::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) fail(ErrorCode::kNotFound, "there is no adapter '{}' in this engine", name);
  return found->second;
}

bool AdapterSet::has(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return by_name_.contains(name);
}

void AdapterSet::apply_news() {
  const std::lock_guard lock(mutex_);
  for (News& news : news_) {
    ServedAdapter& adapter = *news.adapter;
    const bool could_leave = adapter.weights.stored != nullptr;
    adapter.version = news.version;
    adapter.weights = std::move(news.weights);
    ++adapter.num_updates;
    if (!could_leave && adapter.weights.stored != nullptr) on_device_.push_back(news.adapter);
  }
  news_.clear();
  has_news_.store(false, std::memory_order_release);
}

void AdapterSet::bring(const StepPlan& plan, ModelRunner& runner) {
  ++num_steps_;
  bool any = false;
  for (const PlanRow& row : plan.rows) {
    ServedAdapter* adapter = row.sequence->request->served.get();
    if (adapter == nullptr) continue;
    any = true;
    adapter->last_use = num_steps_;
  }
  if (!any) return;
  shrink();  // first, so that there is room
  for (const PlanRow& row : plan.rows) {
    ServedAdapter* adapter = row.sequence->request->served.get();
    if (adapter != nullptr && adapter->weights.ready == nullptr) adapter->weights.ready = runner.make_adapter(*adapter->weights.stored);
  }
}

void AdapterSet::shrink() {
  const std::lock_guard lock(mutex_);
  std::vector<ServedAdapterPtr> idle;
  std::int64_t num_wanted = 0;
  std::erase_if(on_device_, [](const auto& entry) { return entry.expired(); });
  for (const auto& entry : on_device_) {
    ServedAdapterPtr adapter = entry.lock();
    if (adapter == nullptr) continue;
    if (adapter->last_use == num_steps_)
      ++num_wanted;
    else if (adapter->weights.ready != nullptr)
      idle.push_back(std::move(adapter));
  }
  std::ranges::sort(idle, {}, [](const ServedAdapterPtr& adapter) { return adapter->last_use; });
  const std::int64_t num_kept = std::max<std::int64_t>(0, max_ready_ - num_wanted);
  for (std::int64_t i = 0; i + num_kept < static_cast<std::int64_t>(idle.size()); ++i)
    idle[static_cast<std::size_t>(i)]->weights.ready = nullptr;
}

}  // namespace prl::engine
