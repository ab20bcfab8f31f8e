#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/rng.hpp"
#include "grammar/automaton.hpp"
#include "grammar/json_schema.hpp"
#include "grammar/json_text.hpp"
#include "grammar/matcher.hpp"
#include "grammar/regex.hpp"
#include "text/json_python.hpp"

/// Shared by the tests of grammar/ only.
namespace prl::grammar::test {

inline std::shared_ptr<const Automaton> make_automaton(const std::function<NodeId(AutomatonBuilder&, NodeId)>& emit, Limits limits = {},
                                                       const ByteSet& bytes = ByteSet().set()) {
  AutomatonBuilder builder(limits);
  const RuleId root = builder.add_rule();
  builder.add_empty(emit(builder, builder.rule_start(root)), builder.rule_accept(root));
  return std::make_shared<const Automaton>(std::move(builder).finish(root, bytes));
}

inline std::shared_ptr<const Automaton> regex_automaton(std::string_view pattern, Limits limits = {}) {
  return make_automaton([&](AutomatonBuilder& builder,
                            NodeId from) { return emit_regex(builder, from, parse_regex(pattern), Spelling::kPlain, Anchoring::kFull); },
                        limits);
}

inline std::shared_ptr<const Automaton> schema_automaton(std::string_view schema, Limits limits = {}) {
  const boost::json::value value = text::parse_json(schema);
  return make_automaton([&](AutomatonBuilder& builder, NodeId from) { return emit_json_schema(builder, from, value, "schema"); }, limits);
}

inline bool matches(Matcher& matcher, std::string_view text) {
  Matcher::StateId state = matcher.start();
  for (const char c : text) {
    state = matcher.step(state, static_cast<std::uint8_t>(c));
    if (state == Matcher::kDead) return false;
  }
  return matcher.is_complete(state);
}
inline bool matches(const std::shared_ptr<const Automaton>& automaton, std::string_view text) {
  Matcher matcher(automaton);
  return matches(matcher, text);
}

}  // namespace prl::grammar::test
