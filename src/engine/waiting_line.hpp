#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/sequence.hpp"
#include "engine/tenant.hpp"

namespace prl::engine {

/// Sequences that wait for their admission, and whose turn it is: lower priority values first, then the tenant that has had the fewest
/// tokens over its weight (start-time fair queueing: Goyal, Vin and Cheng, 1996), then arrival. A tenant that had nothing to run saves
/// nothing up.
///
/// A sequence is charged when it is admitted, with what is left of its prompt and the output that its tenant's requests write on average;
/// when it leaves the batch the charge is corrected to what was computed. One thread.
class WaitingLine {
 public:
  WaitingLine();

  /// A sequence without a tenant gets the one of all such.
  void push(Sequence& sequence);
  void erase(Sequence& sequence);
  std::int64_t size() const noexcept { return size_; }
  /// True if one waits that is not held back by its tenant's pause.
  bool has_ready() const noexcept;

  /// Everybody who may run is a candidate again.
  void begin_round();
  /// Whose turn it is; nullptr: no candidate is left. Tenants at their limit of tokens are no candidates, unless nothing of theirs runs.
  Sequence* candidate();
  /// The candidate is none in this round any more; its tenant's next one is.
  void pass_over() { ++chosen_->next; }
  /// The candidate leaves the line and runs: its tenant is charged. Its cached prefix is known.
  void admit();
  /// A sequence that ran leaves the batch, before its blocks are dropped; `has_ended`: for good.
  void leave_batch(Sequence& sequence, bool has_ended);
  /// Pause and what follows from other weights; the caller preempts what runs.
  void set_options(Tenant& tenant, const TenantOptions& options);

  /// Of those that wait, in no particular order.
  void for_each(const std::function<void(const Sequence&)>& visit) const;
  const TenantPtr& everybody() const noexcept { return everybody_; }
  void check_integrity() const;

 private:
  static bool is_active(const Tenant& tenant) noexcept { return tenant.num_running + tenant.num_waiting > 0; }
  void catch_up(Tenant& tenant) const noexcept { tenant.service = std::max(tenant.service, clock_); }

  TenantPtr everybody_;
  std::vector<TenantPtr> active_;  ///< those with sequences that wait or run
  Tenant* chosen_ = nullptr;       ///< of the candidate
  std::int64_t size_ = 0;
  double clock_ = 0;  ///< the service of the tenant that was admitted last, before its charge
};

}  // namespace prl::engine
