#pragma once

#include <bitset>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace prl::grammar {

using NodeId = std::int32_t;
using RuleId = std::int32_t;
using ByteSet = std::bitset<256>;

/// Bounds of what one request may ask for.
struct Limits {
  std::size_t max_nodes = 200'000;  ///< of one automaton
  std::int32_t max_depth = 128;     ///< calls that may be open at once: how deep values nest
};

struct Edge {
  enum class Kind : std::uint8_t {
    kBytes,  ///< one byte in [low, high]
    kEmpty,  ///< nothing
    kCall,   ///< a whole text of `rule`
  };
  Kind kind = Kind::kEmpty;
  std::uint8_t low = 0, high = 0;
  RuleId rule = -1;
  NodeId to = -1;
};

/// A set of byte strings: nodes with edges, grouped into rules that call each other, so values may nest.
///
/// Immutable once made. Every node that can be entered leads to an accepted text within Limits::max_depth, by bytes of the
/// given set alone: whoever keeps to node_need() never reaches a dead end.
class Automaton {
 public:
  std::span<const Edge> edges(NodeId node) const;
  /// Calls that must be open at once, beyond those open already, to end the node's rule; kNever if it cannot end.
  std::int32_t node_need(NodeId node) const { return needs_[static_cast<std::size_t>(node)]; }
  /// True for the node that ends its rule.
  bool is_accept(NodeId node) const { return is_accept_[static_cast<std::size_t>(node)]; }
  NodeId rule_start(RuleId rule) const { return rule_starts_[static_cast<std::size_t>(rule)]; }
  NodeId start() const { return start_; }
  std::size_t num_nodes() const { return needs_.size(); }
  std::int32_t max_depth() const { return max_depth_; }

  static constexpr std::int32_t kNever = 1 << 29;

 private:
  friend class AutomatonBuilder;
  std::vector<Edge> edges_;
  std::vector<std::size_t> edge_begins_;  // [num_nodes + 1]
  std::vector<std::int32_t> needs_;
  std::vector<bool> is_accept_;
  std::vector<NodeId> rule_starts_;
  NodeId start_ = -1;
  std::int32_t max_depth_ = 0;
};

/// Makes an Automaton edge by edge. Error{kInvalidArgument} when it grows beyond the limits.
class AutomatonBuilder {
 public:
  explicit AutomatonBuilder(Limits limits = {}) : limits_(limits) {}

  /// A rule with a start and an accept node of its own. Edges into the start node and out of the accept node are not allowed.
  RuleId add_rule();
  NodeId rule_start(RuleId rule) const { return rules_[static_cast<std::size_t>(rule)].start; }
  NodeId rule_accept(RuleId rule) const { return rules_[static_cast<std::size_t>(rule)].accept; }
  NodeId add_node();
  void add_bytes(NodeId from, std::uint8_t low, std::uint8_t high, NodeId to);
  void add_empty(NodeId from, NodeId to);
  void add_call(NodeId from, RuleId rule, NodeId to);

  /// The emitters below and those of regex.hpp and json_schema.hpp start at a node and return the node after the text.
  NodeId emit_literal(NodeId from, std::string_view bytes);
  NodeId emit_call(NodeId from, RuleId rule);
  /// Any bytes up to and including the first `end`, which is not empty.
  NodeId emit_until(NodeId from, std::string_view end);

  /// The texts of `root`, spelt with `bytes`. Error{kInvalidArgument} if there are none, if all nest too deep, or if a rule
  /// calls itself before it takes a byte.
  Automaton finish(RuleId root, const ByteSet& bytes) &&;

 private:
  struct Rule {
    NodeId start = -1, accept = -1;
  };
  void add_edge(NodeId from, Edge edge);
  enum class Taking : std::uint8_t { kBytes, kNoBytes };
  /// Per node, the calls that must be open at once to end its rule; kNever if it cannot end. With kNoBytes: without a byte taken.
  std::vector<std::int32_t> least_needs(Taking taking) const;
  void check_recursion() const;

  Limits limits_;
  std::size_t num_edges_ = 0;
  std::vector<std::vector<Edge>> nodes_;
  std::vector<Rule> rules_;
};

}  // namespace prl::grammar
