#include "grammar/automaton.hpp"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.hpp"

namespace prl::grammar {

std::span<const Edge> Automaton::edges(NodeId node) const {
  const auto i = static_cast<std::size_t>(node);
  return std::span(edges_).subspan(edge_begins_[i], edge_begins_[i + 1] - edge_begins_[i]);
}

RuleId AutomatonBuilder::add_rule() {
  const NodeId start = add_node();
  const NodeId accept = add_node();
  rules_.push_back({start, accept});
  return static_cast<RuleId>(rules_.size()) - 1;
}

NodeId AutomatonBuilder::add_node() {
  if (nodes_.size() >= limits_.max_nodes)
    fail(ErrorCode::kInvalidArgument, "structured output: the automaton needs more than {} states; lower repeat counts or lengths",
         limits_.max_nodes);
  nodes_.emplace_back();
  return static_cast<NodeId>(nodes_.size()) - 1;
}

void AutomatonBuilder::add_edge(NodeId from, Edge edge) {
  if (++num_edges_ > 4 * limits_.max_nodes)
    fail(ErrorCode::kInvalidArgument, "structured output: the automaton needs more than {} edges", 4 * limits_.max_nodes);
  nodes_[static_cast<std::size_t>(from)].push_back(edge);
}

void AutomatonBuilder::add_bytes(NodeId from, std::uint8_t low, std::uint8_t high, NodeId to) {
  add_edge(from, {Edge::Kind::kBytes, low, high, -1, to});
}
void AutomatonBuilder::add_empty(NodeId from, NodeId to) { add_edge(from, {Edge::Kind::kEmpty, 0, 0, -1, to}); }
void AutomatonBuilder::add_call(NodeId from, RuleId rule, NodeId to) { add_edge(from, {Edge::Kind::kCall, 0, 0, rule, to}); }

NodeId AutomatonBuilder::emit_literal(NodeId from, std::string_view bytes) {
  for (const char c : bytes) {
    const NodeId next = add_node();
    add_bytes(from, static_cast<std::uint8_t>(c), static_cast<std::uint8_t>(c), next);
    from = next;
  }
  return from;
}

NodeId AutomatonBuilder::emit_call(NodeId from, RuleId rule) {
  const NodeId next = add_node();
  add_call(from, rule, next);
  return next;
}

NodeId AutomatonBuilder::emit_until(NodeId from, std::string_view end) {
  // Node i: the bytes so far end with the longest prefix of `end` that is i bytes long (Knuth, Morris, Pratt).
  std::vector<NodeId> nodes;
  for (std::size_t i = 0; i <= end.size(); ++i) nodes.push_back(add_node());
  add_empty(from, nodes[0]);
  for (std::size_t matched = 0; matched < end.size(); ++matched) {
    for (int byte = 0; byte < 256; ++byte) {
      const std::string tail = std::string(end.substr(0, matched)) + static_cast<char>(byte);
      std::size_t length = std::min(tail.size(), end.size());
      while (tail.substr(tail.size() - length) != end.substr(0, length)) --length;
      add_bytes(nodes[matched], static_cast<std::uint8_t>(byte), static_cast<std::uint8_t>(byte), nodes[length]);
    }
  }
  return nodes.back();
}

void AutomatonBuilder::find_needs(Automaton& out) const {
  out.needs_.assign(nodes_.size(), Automaton::kNever);
  for (const Rule& rule : rules_) out.needs_[static_cast<std::size_t>(rule.accept)] = 0;
  // Smallest fixed point. Edges mostly lead to later nodes, so sweeps from the back settle in a few rounds.
  for (bool is_changed = true; is_changed;) {
    is_changed = false;
    for (std::size_t node = nodes_.size(); node-- > 0;) {
      std::int32_t need = out.needs_[node];
      for (const Edge& edge : nodes_[node]) {
        std::int32_t way = out.needs_[static_cast<std::size_t>(edge.to)];
        if (edge.kind == Edge::Kind::kCall)
          way = std::max(way, 1 + out.needs_[static_cast<std::size_t>(rules_[static_cast<std::size_t>(edge.rule)].start)]);
        need = std::min(need, way);
      }
      if (need < out.needs_[node]) {
        out.needs_[node] = need;
        is_changed = true;
      }
    }
  }
}

void AutomatonBuilder::check_recursion() const {
  // Which rules have the empty text; nodes that reach their rule's end without a byte.
  std::vector<bool> ends_empty(nodes_.size(), false);
  for (const Rule& rule : rules_) ends_empty[static_cast<std::size_t>(rule.accept)] = true;
  const auto is_nullable = [&](RuleId rule) { return ends_empty[static_cast<std::size_t>(rules_[static_cast<std::size_t>(rule)].start)]; };
  for (bool is_changed = true; is_changed;) {
    is_changed = false;
    for (std::size_t node = nodes_.size(); node-- > 0;) {
      if (ends_empty[node]) continue;
      for (const Edge& edge : nodes_[node]) {
        if (edge.kind == Edge::Kind::kBytes || !ends_empty[static_cast<std::size_t>(edge.to)]) continue;
        if (edge.kind == Edge::Kind::kCall && !is_nullable(edge.rule)) continue;
        ends_empty[node] = is_changed = true;
      }
    }
  }
  // Depth first over "stands before a byte is taken"; meeting a rule that is still open is a loop.
  enum class Mark : std::uint8_t { kNew, kOpen, kDone };
  std::vector<Mark> marks(rules_.size(), Mark::kNew);
  struct Frame {
    RuleId rule;
    std::vector<RuleId> callees;
  };
  const auto callees_of = [&](RuleId rule) {
    std::vector<RuleId> callees;
    std::vector<NodeId> todo{rules_[static_cast<std::size_t>(rule)].start};
    std::unordered_set<NodeId> seen;
    while (!todo.empty()) {
      const NodeId node = todo.back();
      todo.pop_back();
      if (!seen.insert(node).second) continue;
      for (const Edge& edge : nodes_[static_cast<std::size_t>(node)]) {
        if (edge.kind == Edge::Kind::kCall) callees.push_back(edge.rule);
        if (edge.kind == Edge::Kind::kEmpty || (edge.kind == Edge::Kind::kCall && is_nullable(edge.rule))) todo.push_back(edge.to);
      }
    }
    return callees;
  };
  for (RuleId root = 0; root < static_cast<RuleId>(rules_.size()); ++root) {
    if (marks[static_cast<std::size_t>(root)] != Mark::kNew) continue;
    marks[static_cast<std::size_t>(root)] = Mark::kOpen;
    std::vector<Frame> stack{{root, callees_of(root)}};
    while (!stack.empty()) {
      Frame& top = stack.back();
      if (top.callees.empty()) {
        marks[static_cast<std::size_t>(top.rule)] = Mark::kDone;
        stack.pop_back();
        continue;
      }
      const RuleId next = top.callees.back();
      top.callees.pop_back();
      Mark& mark = marks[static_cast<std::size_t>(next)];
      if (mark == Mark::kOpen)
        fail(ErrorCode::kInvalidArgument, "structured output: a definition refers to itself without any text in between");
      if (mark == Mark::kDone) continue;
      mark = Mark::kOpen;
      stack.push_back({next, callees_of(next)});
    }
  }
}

Automaton AutomatonBuilder::finish(RuleId root, const ByteSet& bytes) && {
  check_recursion();
  for (auto& edges : nodes_) {
    std::vector<Edge> kept;
    for (const Edge& edge : edges) {
      if (edge.kind != Edge::Kind::kBytes) {
        kept.push_back(edge);
        continue;
      }
      // The parts of [low, high] that can be spelt.
      for (int low = edge.low; low <= edge.high; ++low) {
        if (!bytes[static_cast<std::size_t>(low)]) continue;
        int high = low;
        while (high < edge.high && bytes[static_cast<std::size_t>(high + 1)]) ++high;
        Edge part = edge;
        part.low = static_cast<std::uint8_t>(low);
        part.high = static_cast<std::uint8_t>(high);
        kept.push_back(part);
        low = high;
      }
    }
    edges = std::move(kept);
  }
  Automaton out;
  out.max_depth_ = limits_.max_depth;
  find_needs(out);
  out.start_ = rule_start(root);
  const std::int32_t need = out.node_need(out.start_);
  if (need >= Automaton::kNever) fail(ErrorCode::kInvalidArgument, "structured output: no text can satisfy what is asked for");
  if (need > limits_.max_depth)
    fail(ErrorCode::kInvalidArgument, "structured output: every text nests deeper than {} levels", limits_.max_depth);
  out.is_accept_.assign(nodes_.size(), false);
  for (const Rule& rule : rules_) {
    out.rule_starts_.push_back(rule.start);
    out.is_accept_[static_cast<std::size_t>(rule.accept)] = true;
  }
  out.edge_begins_.push_back(0);
  for (const auto& edges : nodes_) {
    for (const Edge& edge : edges) {
      const bool is_dead = out.node_need(edge.to) >= Automaton::kNever ||
                           (edge.kind == Edge::Kind::kCall && out.node_need(rule_start(edge.rule)) >= Automaton::kNever);
      if (!is_dead) out.edges_.push_back(edge);
    }
    out.edge_begins_.push_back(out.edges_.size());
  }
  return out;
}

}  // namespace prl::grammar
