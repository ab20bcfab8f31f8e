#include "engine/waiting_line.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::engine {
namespace {

/// Requests over which the length of a tenant's output is averaged.
constexpr std::int64_t kMeanWindow = 32;

/// What the request takes of max_tokens_in_flight.
std::int64_t most_tokens(const Sequence& sequence) { return sequence.num_prompt_tokens + sequence.request->max_new_tokens; }

}  // namespace

WaitingLine::WaitingLine() : everybody_(std::make_shared<Tenant>()) {}

void WaitingLine::push(Sequence& sequence) {
  if (sequence.tenant == nullptr) sequence.tenant = everybody_;
  Tenant& tenant = *sequence.tenant;
  if (std::ranges::find(active_, sequence.tenant) == active_.end()) {
    active_.push_back(sequence.tenant);
    catch_up(tenant);
  }
  tenant.waiting.insert(std::upper_bound(tenant.waiting.begin(), tenant.waiting.end(), &sequence, comes_before), &sequence);
  ++tenant.num_waiting;
  ++size_;
}

void WaitingLine::erase(Sequence& sequence) {
  Tenant& tenant = *sequence.tenant;
  const auto it = std::lower_bound(tenant.waiting.begin(), tenant.waiting.end(), &sequence, comes_before);
  PRL_CHECK(it != tenant.waiting.end() && *it == &sequence, "sequence {} is not where its state says", sequence.request_id.value);
  tenant.waiting.erase(it);
  --tenant.num_waiting;
  --size_;
  if (!is_active(tenant)) std::erase(active_, sequence.tenant);
}

bool WaitingLine::has_ready() const noexcept {
  return std::ranges::any_of(active_,
                             [](const TenantPtr& one) { return one->num_waiting > 0 && one->options.state != TenantState::kPaused; });
}

void WaitingLine::begin_round() {
  for (const TenantPtr& tenant : active_) tenant->next = 0;
}

Sequence* WaitingLine::candidate() {
  chosen_ = nullptr;
  for (const TenantPtr& one : active_) {
    Tenant& tenant = *one;
    if (tenant.options.state == TenantState::kPaused || tenant.next >= tenant.waiting.size()) continue;
    const Sequence& first = *tenant.waiting[tenant.next];
    const std::int64_t limit = tenant.options.max_tokens_in_flight;
    if (limit > 0 && tenant.num_running > 0 && tenant.num_tokens_in_flight + most_tokens(first) > limit) {
      catch_up(tenant);  // what the limit keeps from it is not owed to it
      continue;
    }
    if (chosen_ != nullptr) {
      const Sequence& best = *chosen_->waiting[chosen_->next];
      const std::int32_t priority = first.request->priority, best_priority = best.request->priority;
      if (priority > best_priority) continue;
      if (priority == best_priority && tenant.service > chosen_->service) continue;
      if (priority == best_priority && tenant.service == chosen_->service && first.arrival > best.arrival) continue;
    }
    chosen_ = &tenant;
  }
  return chosen_ == nullptr ? nullptr : chosen_->waiting[chosen_->next];
}

void WaitingLine::admit() {
  Tenant& tenant = *chosen_;
  Sequence& sequence = *tenant.waiting[tenant.next];
  tenant.waiting.erase(tenant.waiting.begin() + static_cast<std::ptrdiff_t>(tenant.next));
  --tenant.num_waiting;
  --size_;
  ++tenant.num_running;
  tenant.num_tokens_in_flight += most_tokens(sequence);
  const auto most_output = static_cast<double>(sequence.request->max_new_tokens);
  const double output = tenant.num_ended == 0 ? most_output : std::min(most_output, tenant.mean_output);
  sequence.charge_begin = sequence.num_tokens_computed;
  sequence.charge = static_cast<double>(sequence.num_tokens() - sequence.num_tokens_computed) +
                    std::max(0.0, output - static_cast<double>(sequence.num_output_tokens()));
  clock_ = std::max(clock_, tenant.service);
  tenant.service += sequence.charge / tenant.options.weight;
}

void WaitingLine::leave_batch(Sequence& sequence, bool has_ended) {
  Tenant& tenant = *sequence.tenant;
  --tenant.num_running;
  tenant.num_tokens_in_flight -= most_tokens(sequence);
  const auto computed = static_cast<double>(sequence.num_tokens_computed - sequence.charge_begin);
  tenant.service += (computed - sequence.charge) / tenant.options.weight;
  if (has_ended) {
    tenant.num_ended = std::min(tenant.num_ended + 1, kMeanWindow);
    tenant.mean_output += (static_cast<double>(sequence.num_output_tokens()) - tenant.mean_output) / static_cast<double>(tenant.num_ended);
    if (!is_active(tenant)) std::erase(active_, sequence.tenant);
  }
}

void WaitingLine::set_options(Tenant& tenant, const TenantOptions& options) {
  if (tenant.options.state == TenantState::kPaused && options.state != TenantState::kPaused) catch_up(tenant);
  tenant.options = options;
}

void WaitingLine::for_each(const std::function<void(const Sequence&)>& visit) const {
  for (const TenantPtr& tenant : active_)
    for (const Sequence* sequence : tenant->waiting) visit(*sequence);
}

void WaitingLine::check_integrity() const {
  std::int64_t num = 0;
  for (const TenantPtr& tenant : active_) {
    PRL_CHECK(is_active(*tenant), "tenant '{}' is taken for active and has no sequences", tenant->name);
    PRL_CHECK(tenant->num_waiting == std::ssize(tenant->waiting), "tenant '{}' counts {} that wait, {} do", tenant->name,
              tenant->num_waiting, tenant->waiting.size());
    PRL_CHECK(std::is_sorted(tenant->waiting.begin(), tenant->waiting.end(), comes_before), "a queue is out of order");
    PRL_CHECK(tenant->num_running > 0 || tenant->num_tokens_in_flight == 0, "tenant '{}' has {} tokens in flight and runs nothing",
              tenant->name, tenant->num_tokens_in_flight);
    num += tenant->num_waiting;
  }
  PRL_CHECK(num == size_, "{} sequences wait, {} are counted", num, size_);
}

}  // namespace prl::engine
