#include "server/tenant_book.hpp"

#include "base/error.hpp"
#include "net/request_guard.hpp"

namespace prl::server {

void TenantBook::fail_unknown(const std::string& name) const {
  std::string known;
  for (const auto& [one, entry] : entries_) known += (known.empty() ? "" : ", ") + one;
  fail(ErrorCode::kNotFound, "name: there is no run '{}'; {}", name,
       known.empty() ? std::string("there is none: POST /runs makes one") : "there are " + known);
}

void TenantBook::change(const std::string& name, const Change& change, bool must_exist, const Apply& apply) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  if (found == entries_.end() && must_exist) fail_unknown(name);
  Entry entry = found == entries_.end() ? Entry{} : found->second;
  if (change.weight) entry.options.weight = *change.weight;
  if (change.max_tokens_in_flight) entry.options.max_tokens_in_flight = *change.max_tokens_in_flight;
  if (change.state) entry.options.state = *change.state;
  if (change.api_key) entry.api_key = *change.api_key;
  if (change.api_key && !change.api_key->empty())
    for (const auto& [other, its] : entries_)
      if (other != name && net::is_same_key(its.api_key, *change.api_key))
        fail(ErrorCode::kAlreadyExists, "api_key: another run has that key; each run needs one of its own");
  apply(name, entry.options);
  entries_[name] = std::move(entry);
}

void TenantBook::remove(const std::string& name, const std::function<void(const std::string& name)>& apply) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail_unknown(name);
  apply(name);
  entries_.erase(found);
}

void TenantBook::require(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (!entries_.contains(name)) fail_unknown(name);
}

bool TenantBook::has_key(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  return found != entries_.end() && !found->second.api_key.empty();
}

std::optional<std::string> TenantBook::run_of(const net::HttpRequest& request) const {
  const std::lock_guard lock(mutex_);
  std::optional<std::string> run;
  for (const auto& [name, entry] : entries_)
    if (!entry.api_key.empty() && net::has_key(request, entry.api_key)) run = name;
  return run;
}

}  // namespace prl::server
