#include "engine/tenant_set.hpp"

#include <memory>

namespace prl::engine {

void TenantSet::set(const std::string& name, const TenantOptions& options) {
  TenantPtr& tenant = by_name_[name];
  if (tenant == nullptr) {
    tenant = std::make_shared<Tenant>();
    tenant->name = name;
  }
  scheduler_->set_tenant(tenant, options);
}

void TenantSet::remove(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  TenantOptions options = found->second->options;
  options.state = TenantState::kOpen;
  scheduler_->set_tenant(found->second, options);
  by_name_.erase(found);
}

TenantPtr TenantSet::of(const ServedAdapterPtr& adapter) const {
  if (adapter == nullptr) return nullptr;
  const auto found = by_name_.find(adapter->name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::vector<TenantStats> TenantSet::stats() const {
  std::vector<TenantStats> out;
  for (const auto& [name, tenant] : by_name_)
    out.push_back({.name = name,
                   .options = tenant->options,
                   .num_running = tenant->num_running,
                   .num_waiting = tenant->num_waiting,
                   .num_tokens_in_flight = tenant->num_tokens_in_flight,
                   .num_tokens = tenant->num_tokens,
                   .num_generation_tokens = tenant->num_generation_tokens});
  return out;
}

}  // namespace prl::engine
