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

std::vector<std::int32_t> AutomatonBuilder::least_needs(Taking taking) const {
  // Knuth's generalisation of Dijkstra's algorithm: nodes are settled in the order of their need, so every edge is looked at twice at most.
  struct Way {
    NodeId from;
    RuleId rule;  // -1: no call
  };
  std::vector<std::size_t> begins(nodes_.size() + 1, 0);
  for (const auto& edges : nodes_)
    for (const Edge& edge : edges) ++begins[static_cast<std::size_t>(edge.to) + 1];
  for (std::size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
  std::vector<Way> ways(begins.back());
  std::vector<std::size_t> ends(begins.begin(), begins.end() - 1);
  std::vector<std::vector<std::pair<NodeId, NodeId>>> calls(rules_.size());  // (from, to)
  for (std::size_t from = 0; from < nodes_.size(); ++from) {
    for (const Edge& edge : nodes_[from]) {
      if (edge.kind == Edge::Kind::kBytes && taking == Taking::kNoBytes) continue;
      ways[ends[static_cast<std::size_t>(edge.to)]++] = {static_cast<NodeId>(from), edge.kind == Edge::Kind::kCall ? edge.rule : -1};
      if (edge.kind == Edge::Kind::kCall) calls[static_cast<std::size_t>(edge.rule)].emplace_back(static_cast<NodeId>(from), edge.to);
    }
  }
  std::vector<std::vector<RuleId>> rules_from(nodes_.size());
  for (std::size_t rule = 0; rule < rules_.size(); ++rule)
    rules_from[static_cast<std::size_t>(rules_[rule].start)].push_back(static_cast<RuleId>(rule));

  std::vector<std::int32_t> needs(nodes_.size(), Automaton::kNever);
  std::vector<std::vector<NodeId>> levels(1);  // to be settled, by need
  for (const Rule& rule : rules_) levels[0].push_back(rule.accept);
  const auto need_of = [&](NodeId node) { return needs[static_cast<std::size_t>(node)]; };
  const auto reach = [&](NodeId node, std::int32_t need) {
    if (need_of(node) != Automaton::kNever) return;
    if (static_cast<std::size_t>(need) >= levels.size()) levels.resize(static_cast<std::size_t>(need) + 1);
    levels[static_cast<std::size_t>(need)].push_back(node);
  };
  for (std::size_t level = 0; level < levels.size(); ++level) {
    const auto need = static_cast<std::int32_t>(level);
    while (!levels[level].empty()) {
      const NodeId node = levels[level].back();
      levels[level].pop_back();
      if (need_of(node) != Automaton::kNever) continue;
      needs[static_cast<std::size_t>(node)] = need;
      for (std::size_t i = begins[static_cast<std::size_t>(node)]; i < ends[static_cast<std::size_t>(node)]; ++i) {
        const std::int32_t inner = ways[i].rule < 0 ? -1 : need_of(rules_[static_cast<std::size_t>(ways[i].rule)].start);
        if (inner != Automaton::kNever) reach(ways[i].from, std::max(need, inner + 1));
      }
      for (const RuleId rule : rules_from[static_cast<std::size_t>(node)])
        for (const auto& [from, to] : calls[static_cast<std::size_t>(rule)])
          if (need_of(to) != Automaton::kNever) reach(from, std::max(need_of(to), need + 1));
    }
  }
  return needs;
}

void AutomatonBuilder::check_recursion() const {
  const std::vector<std::int32_t> needs = least_needs(Taking::kNoBytes);
  const auto is_nullable = [&](RuleId rule) { return needs[static_cast<std::size_t>(rule_start(rule))] != Automaton::kNever; };
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
  out.needs_ = least_needs(Taking::kBytes);
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
