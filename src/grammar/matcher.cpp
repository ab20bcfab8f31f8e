#include "grammar/matcher.hpp"

#include <algorithm>
#include <bitset>
#include <utility>
#include <vector>

namespace prl::grammar {
namespace {

/// Keys met so far: a list while they are few, which is nearly always, a table with open addressing beyond.
class SeenKeys {
 public:
  bool insert(std::uint64_t key) {
    if (slots_.empty()) {
      if (std::find(few_.begin(), few_.end(), key) != few_.end()) return false;
      few_.push_back(key);
      if (few_.size() > 32) grow(128);
      return true;
    }
    if (!insert_into(slots_, key)) return false;
    if (++size_ * 2 > slots_.size()) grow(slots_.size() * 4);
    return true;
  }

 private:
  static constexpr std::uint64_t kFree = ~std::uint64_t{0};  // no pair of a node and a stack: both are at least 0

  static bool insert_into(std::vector<std::uint64_t>& slots, std::uint64_t key) {
    std::size_t at = (key * 0x9E3779B97F4A7C15u) >> 32;
    for (;; ++at) {
      std::uint64_t& slot = slots[at & (slots.size() - 1)];
      if (slot == key) return false;
      if (slot != kFree) continue;
      slot = key;
      return true;
    }
  }
  void grow(std::size_t num_slots) {
    std::vector<std::uint64_t> slots(num_slots, kFree);
    for (const std::uint64_t key : slots_.empty() ? few_ : slots_)
      if (key != kFree) insert_into(slots, key);
    if (slots_.empty()) size_ = few_.size();
    slots_ = std::move(slots);
  }

  std::vector<std::uint64_t> few_;
  std::vector<std::uint64_t> slots_;  // a power of two, at most half of them taken
  std::size_t size_ = 0;
};

std::uint64_t pair_key(std::int32_t a, std::int32_t b) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
}

}  // namespace

Matcher::Matcher(std::shared_ptr<const Automaton> automaton) : automaton_(std::move(automaton)) {
  std::bitset<257> begins;
  begins.set(0);
  for (NodeId node = 0; node < static_cast<NodeId>(automaton_->num_nodes()); ++node) {
    for (const Edge& edge : automaton_->edges(node)) {
      if (edge.kind != Edge::Kind::kBytes) continue;
      begins.set(edge.low);
      begins.set(edge.high + std::size_t{1});
    }
  }
  for (std::size_t byte = 0; byte < 256; ++byte) {
    if (begins[byte]) ++num_classes_;
    class_of_[byte] = static_cast<std::uint8_t>(num_classes_ - 1);
  }
  clear();
}

void Matcher::clear() {
  states_.clear();
  transitions_.clear();
  states_by_hash_.clear();
  frames_.assign(1, Frame{0, -1, 0});
  frames_by_key_.clear();
  num_bytes_ = 0;
  intern({{automaton_->start(), 0}});
}

Matcher::StackId Matcher::push(StackId below, NodeId return_to) {
  const auto [found, is_new] = frames_by_key_.emplace(pair_key(below, return_to), static_cast<StackId>(frames_.size()));
  if (is_new) {
    frames_.push_back({below, return_to, frames_[static_cast<std::size_t>(below)].depth + 1});
    num_bytes_ += 64;
  }
  return found->second;
}

Matcher::StateId Matcher::intern(std::vector<Place> entered) {
  State state;
  SeenKeys seen;
  for (const Place& place : entered) seen.insert(pair_key(place.node, place.stack));
  while (!entered.empty()) {
    const Place place = entered.back();
    entered.pop_back();
    ++num_places_walked_;
    const auto enter = [&](NodeId node, StackId stack) {
      if (seen.insert(pair_key(node, stack))) entered.push_back({node, stack});
    };
    const Frame frame = frames_[static_cast<std::size_t>(place.stack)];
    if (automaton_->is_accept(place.node)) {
      if (place.stack == 0)
        state.is_complete = true;
      else
        enter(frame.return_to, frame.below);
    }
    bool takes_bytes = false;
    for (const Edge& edge : automaton_->edges(place.node)) {
      const bool can_end = frame.depth + automaton_->node_need(edge.to) <= automaton_->max_depth();
      if (edge.kind == Edge::Kind::kBytes) {
        takes_bytes = takes_bytes || can_end;
      } else if (edge.kind == Edge::Kind::kEmpty) {
        if (can_end) enter(edge.to, place.stack);
      } else {
        const NodeId start = automaton_->rule_start(edge.rule);
        if (can_end && frame.depth + 1 + automaton_->node_need(start) <= automaton_->max_depth()) enter(start, push(place.stack, edge.to));
      }
    }
    if (takes_bytes) state.places.push_back(place);
  }
  if (state.places.empty() && !state.is_complete) return kDead;
  std::sort(state.places.begin(), state.places.end());

  std::uint64_t hash = state.is_complete ? 1 : 2;
  for (const Place& place : state.places) {
    hash = (hash ^ static_cast<std::uint32_t>(place.node)) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ (hash >> 29) ^ static_cast<std::uint32_t>(place.stack)) * 0xBF58476D1CE4E5B9u;
  }
  const auto [begin, end] = states_by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const State& known = states_[static_cast<std::size_t>(it->second)];
    if (known.is_complete == state.is_complete && known.places == state.places) return it->second;
  }
  const auto id = static_cast<StateId>(states_.size());
  num_bytes_ += 96 + state.places.size() * sizeof(Place) + num_classes_ * sizeof(StateId);
  states_.push_back(std::move(state));
  transitions_.resize(transitions_.size() + num_classes_, kUnknown);
  states_by_hash_.emplace(hash, id);
  return id;
}

Matcher::StateId Matcher::make_step(StateId state, std::uint8_t byte) {
  std::vector<Place> entered;
  SeenKeys seen;
  num_places_walked_ += states_[static_cast<std::size_t>(state)].places.size() + 1;
  for (const Place& place : states_[static_cast<std::size_t>(state)].places) {
    const std::int32_t depth = frames_[static_cast<std::size_t>(place.stack)].depth;
    for (const Edge& edge : automaton_->edges(place.node)) {
      if (edge.kind != Edge::Kind::kBytes || byte < edge.low || byte > edge.high) continue;
      if (depth + automaton_->node_need(edge.to) > automaton_->max_depth()) continue;
      if (seen.insert(pair_key(edge.to, place.stack))) entered.push_back({edge.to, place.stack});
    }
  }
  const StateId next = entered.empty() ? kDead : intern(std::move(entered));
  transitions_[static_cast<std::size_t>(state) * num_classes_ + class_of_[byte]] = next;
  return next;
}

}  // namespace prl::grammar
