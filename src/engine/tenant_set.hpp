#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/scheduler.hpp"

namespace prl::engine {

/// The tenants of an engine by name, which is that of their adapter. The engine's thread, between two steps.
class TenantSet {
 public:
  explicit TenantSet(Scheduler& scheduler) : scheduler_(&scheduler) {}

  /// A share, limit or state from the next step on.
  void set(const std::string& name, const TenantOptions& options);
  /// Its requests come to their end; later ones belong to nobody in particular.
  void remove(const std::string& name);
  /// Whose requests those of the adapter are; nullptr: nobody's in particular.
  TenantPtr of(const ServedAdapterPtr& adapter) const;
  std::vector<TenantStats> stats() const;

 private:
  Scheduler* scheduler_;
  std::map<std::string, TenantPtr, std::less<>> by_name_;
};

}  // namespace prl::engine
