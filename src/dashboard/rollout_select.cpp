#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "dashboard/rollout_index.hpp"

namespace prl::dashboard {
namespace {

using RolloutOrder = RolloutQuery::Order;

/// A query with its names looked up, for many entries.
class Matcher {
 public:
  Matcher(const RolloutQuery& query, const std::vector<std::string>& names) : query_(query), names_(names) {}
  bool operator()(const RolloutEntry& e) const {
    const RolloutQuery& q = query_;
    if (q.kind && e.kind != *q.kind) return false;
    if ((q.step_from && e.step < *q.step_from) || (q.step_to && e.step > *q.step_to)) return false;
    if ((q.group && e.group != *q.group) || (q.example && e.example != *q.example)) return false;
    if ((q.reward_min || q.reward_max) && !e.has_reward) return false;
    if ((q.reward_min && e.reward < *q.reward_min) || (q.reward_max && e.reward > *q.reward_max)) return false;
    if (q.is_truncated && e.is_truncated != *q.is_truncated) return false;
    if ((q.env && names_[e.env] != *q.env) || (q.stop && names_[e.stop] != *q.stop)) return false;
    if (!q.error) return true;
    const bool has_error = e.error != 0 || e.is_damaged;
    return *q.error == "*" ? has_error : q.error->empty() ? !has_error : names_[e.error] == *q.error;
  }

 private:
  const RolloutQuery& query_;
  const std::vector<std::string>& names_;
};

/// Ties are broken by place: newest step first, then the order of the file.
bool is_earlier_in_list(const RolloutEntry& a, const RolloutEntry& b) {
  if (a.step != b.step) return a.step > b.step;
  if (a.kind != b.kind) return a.kind < b.kind;
  return a.file != b.file ? a.file < b.file : a.row < b.row;
}

/// Puts the first `count` in order and drops the others.
template <typename Key>
void sort_by(std::vector<RolloutEntry>& entries, std::size_t count, Key key) {
  const auto is_before = [&](const RolloutEntry& a, const RolloutEntry& b) {
    const auto left = key(a), right = key(b);
    return left != right ? left < right : is_earlier_in_list(a, b);
  };
  if (count < entries.size()) {
    std::nth_element(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(count), entries.end(), is_before);
    entries.resize(count);
  }
  std::sort(entries.begin(), entries.end(), is_before);
}

void sort_entries(std::vector<RolloutEntry>& entries, std::size_t n, RolloutOrder order) {
  switch (order) {
    case RolloutOrder::kNewest: sort_by(entries, n, [](const RolloutEntry& e) { return -e.step; }); break;
    case RolloutOrder::kOldest: sort_by(entries, n, [](const RolloutEntry& e) { return e.step; }); break;
    case RolloutOrder::kRewardUp: sort_by(entries, n, [](const RolloutEntry& e) { return e.has_reward ? e.reward : 1e300; }); break;
    case RolloutOrder::kRewardDown: sort_by(entries, n, [](const RolloutEntry& e) { return e.has_reward ? -e.reward : 1e300; }); break;
    case RolloutOrder::kLongest: sort_by(entries, n, [](const RolloutEntry& e) { return -static_cast<double>(e.output_tokens); }); break;
    case RolloutOrder::kAdvantageUp:
      sort_by(entries, n, [](const RolloutEntry& e) { return e.has_advantage ? e.advantage : 1e300; });
      break;
    case RolloutOrder::kAdvantageDown:
      sort_by(entries, n, [](const RolloutEntry& e) { return e.has_advantage ? -e.advantage : 1e300; });
      break;
  }
}

}  // namespace

std::vector<RolloutEntry> RolloutIndex::select(const RolloutQuery& query) const { return select_first(query, num_entries_).entries; }

RolloutIndex::Selection RolloutIndex::select_first(const RolloutQuery& query, std::size_t max_entries) const {
  Selection found;
  const Matcher matches(query, names_);
  // Of the newest first, which are asked for all the time, those of steps before the ones that are wanted need no place in the list: where
  // there are twice as many as wanted, the older half goes.
  const bool is_cut = query.order == RolloutOrder::kNewest;
  const std::size_t most = std::max<std::size_t>(2 * std::min(max_entries, num_entries_), 4096);
  for_each([&](const RolloutEntry& entry) {
    if (!matches(entry)) return;
    ++found.total;
    found.entries.push_back(entry);
    if (is_cut && found.entries.size() > most) sort_entries(found.entries, max_entries, query.order);
  });
  sort_entries(found.entries, max_entries, query.order);
  return found;
}

std::vector<RolloutIndex::EvalPoint> RolloutIndex::eval_points() const {
  struct Sums {
    std::size_t count = 0, num_truncated = 0, num_failed = 0;
    double sum = 0, squares = 0;
  };
  std::map<std::pair<std::int64_t, std::uint16_t>, Sums> sums;
  for_each([&](const RolloutEntry& e) {
    if (e.kind != RolloutKind::kEval || e.is_damaged) return;
    Sums& s = sums[{e.step, e.env}];
    s.num_truncated += e.is_truncated ? 1u : 0u;
    s.num_failed += e.error != 0 ? 1u : 0u;
    if (!e.has_reward) return;
    ++s.count;
    s.sum += e.reward;
    s.squares += e.reward * e.reward;
  });
  std::vector<EvalPoint> points;
  for (const auto& [key, s] : sums) {
    EvalPoint point{.step = key.first, .env = key.second, .count = s.count, .num_truncated = s.num_truncated, .num_failed = s.num_failed};
    const double n = static_cast<double>(s.count);
    if (s.count > 0) point.mean = s.sum / n;
    if (s.count > 1) point.half_width = 1.96 * std::sqrt(std::max(0.0, (s.squares - n * point.mean * point.mean) / (n - 1)) / n);
    points.push_back(point);
  }
  return points;
}

RolloutIndex::Facets RolloutIndex::facets() const {
  Facets facets;
  std::vector<bool> envs(names_.size()), stops(names_.size()), errors(names_.size());
  bool has_step = false, has_reward = false;
  for_each([&](const RolloutEntry& e) {
    envs[e.env] = stops[e.stop] = true;
    if (e.error != 0) errors[e.error] = true;
    (e.kind == RolloutKind::kTrain ? facets.num_train : facets.num_eval) += 1;
    facets.num_failed += e.error != 0 ? 1u : 0u;
    facets.num_damaged += e.is_damaged ? 1u : 0u;
    facets.first_step = has_step ? std::min(facets.first_step, e.step) : e.step;
    facets.last_step = has_step ? std::max(facets.last_step, e.step) : e.step;
    has_step = true;
    if (!e.has_reward) return;
    facets.min_reward = has_reward ? std::min(facets.min_reward, e.reward) : e.reward;
    facets.max_reward = has_reward ? std::max(facets.max_reward, e.reward) : e.reward;
    has_reward = true;
  });
  for (std::size_t id = 0; id < names_.size(); ++id) {
    if (envs[id]) facets.envs.push_back(static_cast<std::uint16_t>(id));
    if (stops[id]) facets.stops.push_back(static_cast<std::uint16_t>(id));
    if (errors[id]) facets.errors.push_back(static_cast<std::uint16_t>(id));
  }
  return facets;
}

}  // namespace prl::dashboard
