#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "text/jinja/ast.hpp"
#include "text/jinja/token_stream.hpp"

namespace prl::text::jinja {

/// Parses expressions, one method for each level of binding. What is nested too deeply fails.
class ExpressionParser : protected TokenStream {
 protected:
  using TokenStream::TokenStream;

  NodePtr parse_tuple(bool with_condition, Words end_words = {}, bool has_parentheses = false);
  NodePtr parse_expression(bool with_condition);
  NodePtr parse_filter(NodePtr input, bool starts_inline);

 private:
  NodePtr parse_condition();
  NodePtr parse_or();
  NodePtr parse_and();
  NodePtr parse_not();
  NodePtr parse_compare();
  NodePtr parse_sum();
  NodePtr parse_concat();
  NodePtr parse_product();
  NodePtr parse_power();
  NodePtr parse_unary(bool with_filter);
  NodePtr parse_primary();
  template <typename ParseOne>
  void parse_items(std::string_view close, const ParseOne& parse_one) {
    bool is_first = true;
    while (!at_op(close)) {
      if (!is_first) expect_op(",");
      is_first = false;
      if (at_op(close)) break;
      parse_one();
    }
    expect_op(close);
  }
  NodePtr parse_postfix(NodePtr node);
  NodePtr parse_filter_expression(NodePtr node);
  NodePtr parse_subscript(NodePtr object);
  NodePtr parse_subscribed();
  CallArgs parse_call_args();
  NodePtr parse_call(NodePtr callee);
  NodePtr parse_test(NodePtr input);
};

NodePtr make_node(NodeKind kind, int line);
/// The node with its depth, once its parts are in place; fails for a tree that is too deep.
NodePtr done(NodePtr node);

}  // namespace prl::text::jinja
