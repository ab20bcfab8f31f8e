#include "text/jinja/expression_parser.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace prl::text::jinja {
namespace {

// Depth of a tree that is accepted: rendering it recurses as deeply.
constexpr int kMaxTreeDepth = 400;

void adopt(Node& node, const Node* child) {
  if (child == nullptr) return;
  node.depth = std::max(node.depth, child->depth + 1);
  if (node.depth > kMaxTreeDepth) fail_at(node.line, fmt::format("expression of more than {} steps", kMaxTreeDepth));
}

NodePtr unary(NodeKind kind, int line, NodePtr child) {
  NodePtr node = make_node(kind, line);
  node->children.push_back(std::move(child));
  return done(std::move(node));
}

NodePtr binary(NodeKind kind, int line, NodePtr left, NodePtr right, std::string name = {}) {
  NodePtr node = make_node(kind, line);
  node->name = std::move(name);
  node->children.push_back(std::move(left));
  node->children.push_back(std::move(right));
  return done(std::move(node));
}

}  // namespace

NodePtr make_node(NodeKind kind, int line) {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  node->line = line;
  return node;
}

NodePtr done(NodePtr node) {
  for (const NodePtr& child : node->children) adopt(*node, child.get());
  for (const NodePtr& child : node->args.positional) adopt(*node, child.get());
  for (const auto& [name, child] : node->args.keyword) adopt(*node, child.get());
  adopt(*node, node->args.star.get());
  adopt(*node, node->args.double_star.get());
  adopt(*node, node->target.get());
  for (const NodeList& body : node->bodies)
    for (const NodePtr& child : body) adopt(*node, child.get());
  return node;
}

NodePtr ExpressionParser::parse_tuple(bool with_condition, Words end_words, bool has_parentheses) {
  const int line = current().line;
  NodeList items;
  bool is_tuple = false;
  while (true) {
    if (!items.empty()) expect_op(",");
    if (at_tuple_end(end_words)) break;
    items.push_back(parse_expression(with_condition));
    if (!at_op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!items.empty()) return std::move(items.front());
    if (!has_parentheses) fail_here(fmt::format("Expected an expression, got '{}'", describe(current())));
  }
  NodePtr node = make_node(NodeKind::kTuple, line);
  node->children = std::move(items);
  return done(std::move(node));
}

NodePtr ExpressionParser::parse_expression(bool with_condition) {
  const Nesting nesting(*this);
  return with_condition ? parse_condition() : parse_or();
}

NodePtr ExpressionParser::parse_condition() {
  const int line = current().line;
  NodePtr value = parse_or();
  while (skip_name("if")) {
    NodePtr node = make_node(NodeKind::kCond, line);
    node->children.push_back(parse_or());
    node->children.push_back(std::move(value));
    node->children.push_back(skip_name("else") ? parse_expression(true) : nullptr);
    value = done(std::move(node));
  }
  return value;
}

NodePtr ExpressionParser::parse_or() {
  NodePtr left = parse_and();
  while (at_name("or")) {
    const int line = take().line;
    left = binary(NodeKind::kOr, line, std::move(left), parse_and());
  }
  return left;
}

NodePtr ExpressionParser::parse_and() {
  NodePtr left = parse_not();
  while (at_name("and")) {
    const int line = take().line;
    left = binary(NodeKind::kAnd, line, std::move(left), parse_not());
  }
  return left;
}

NodePtr ExpressionParser::parse_not() {
  if (!at_name("not")) return parse_compare();
  const Nesting nesting(*this);
  const int line = take().line;
  return unary(NodeKind::kNot, line, parse_not());
}

NodePtr ExpressionParser::parse_compare() {
  const int line = current().line;
  NodePtr first = parse_sum();
  NodePtr node;
  while (true) {
    std::string op;
    if (at(TokenType::kOperator) && (at_op("==") || at_op("!=") || at_op("<") || at_op(">") || at_op("<=") || at_op(">="))) {
      op = take().text;
    } else if (skip_name("in")) {
      op = "in";
    } else if (at_name("not") && look().type == TokenType::kName && look().text == "in") {
      take();
      take();
      op = "not in";
    } else {
      break;
    }
    if (!node) {
      node = make_node(NodeKind::kCompare, line);
      node->children.push_back(std::move(first));
    }
    node->names.push_back(std::move(op));
    node->children.push_back(parse_sum());
  }
  return node ? done(std::move(node)) : std::move(first);
}

NodePtr ExpressionParser::parse_sum() {
  NodePtr left = parse_concat();
  while (at_op("+") || at_op("-")) {
    const Token& op = take();
    left = binary(NodeKind::kBinary, op.line, std::move(left), parse_concat(), op.text);
  }
  return left;
}

NodePtr ExpressionParser::parse_concat() {
  const int line = current().line;
  NodePtr first = parse_product();
  if (!at_op("~")) return first;
  NodePtr node = make_node(NodeKind::kConcat, line);
  node->children.push_back(std::move(first));
  while (skip_op("~")) node->children.push_back(parse_product());
  return done(std::move(node));
}

NodePtr ExpressionParser::parse_product() {
  NodePtr left = parse_power();
  while (at_op("*") || at_op("/") || at_op("//") || at_op("%")) {
    const Token& op = take();
    left = binary(NodeKind::kBinary, op.line, std::move(left), parse_power(), op.text);
  }
  return left;
}

NodePtr ExpressionParser::parse_power() {
  NodePtr left = parse_unary(true);
  while (at_op("**")) {
    const Token& op = take();
    left = binary(NodeKind::kBinary, op.line, std::move(left), parse_unary(true), op.text);
  }
  return left;
}

NodePtr ExpressionParser::parse_unary(bool with_filter) {
  const Nesting nesting(*this);
  const int line = current().line;
  NodePtr node;
  if (skip_op("-"))
    node = unary(NodeKind::kNeg, line, parse_unary(false));
  else if (skip_op("+"))
    node = unary(NodeKind::kPos, line, parse_unary(false));
  else
    node = parse_primary();
  node = parse_postfix(std::move(node));
  return with_filter ? parse_filter_expression(std::move(node)) : std::move(node);
}

NodePtr ExpressionParser::parse_primary() {
  const Token& token = current();
  NodePtr node = make_node(NodeKind::kConst, token.line);
  switch (token.type) {
    case TokenType::kName:
      take();
      if (token.text == "true" || token.text == "True") {
        node->constant = Value(true);
      } else if (token.text == "false" || token.text == "False") {
        node->constant = Value(false);
      } else if (token.text != "none" && token.text != "None") {
        node->kind = NodeKind::kName;
        node->name = token.text;
      }
      return node;
    case TokenType::kString: {
      std::string text;
      while (at(TokenType::kString)) text += take().text;
      node->constant = Value(std::move(text));
      return node;
    }
    case TokenType::kInteger:
    case TokenType::kFloat: node->constant = take().number; return node;
    default: break;
  }
  if (skip_op("(")) {
    NodePtr inner = parse_tuple(true, {}, true);
    expect_op(")");
    return inner;
  }
  if (skip_op("[")) {
    node->kind = NodeKind::kList;
    parse_items("]", [&] { node->children.push_back(parse_expression(true)); });
    return done(std::move(node));
  }
  if (skip_op("{")) {
    node->kind = NodeKind::kDict;
    parse_items("}", [&] {
      node->children.push_back(parse_expression(true));
      expect_op(":");
      node->children.push_back(parse_expression(true));
    });
    return done(std::move(node));
  }
  fail_here(fmt::format("unexpected '{}'", describe(token)));
}

NodePtr ExpressionParser::parse_postfix(NodePtr node) {
  while (true) {
    if (at_op(".") || at_op("["))
      node = parse_subscript(std::move(node));
    else if (at_op("("))
      node = parse_call(std::move(node));
    else
      return node;
  }
}

NodePtr ExpressionParser::parse_filter_expression(NodePtr node) {
  while (true) {
    if (at_op("|"))
      node = parse_filter(std::move(node), false);
    else if (at_name("is"))
      node = parse_test(std::move(node));
    else if (at_op("("))
      node = parse_call(std::move(node));
    else
      return node;
  }
}

NodePtr ExpressionParser::parse_subscript(NodePtr object) {
  const int line = current().line;
  if (take().text == ".") {
    if (at(TokenType::kName)) {
      NodePtr node = make_node(NodeKind::kGetattr, line);
      node->name = take().text;
      node->children.push_back(std::move(object));
      return done(std::move(node));
    }
    if (!at(TokenType::kInteger)) fail_here("expected name or number");
    NodePtr index = make_node(NodeKind::kConst, line);
    index->constant = take().number;
    return binary(NodeKind::kGetitem, line, std::move(object), std::move(index));
  }
  NodeList items;
  parse_items("]", [&] { items.push_back(parse_subscribed()); });
  if (items.empty()) fail_here("expected subscript expression");
  NodePtr index = std::move(items.front());
  if (items.size() > 1) {
    items.front() = std::move(index);
    index = make_node(NodeKind::kTuple, line);
    index->children = std::move(items);
    index = done(std::move(index));
  }
  return binary(NodeKind::kGetitem, line, std::move(object), std::move(index));
}

NodePtr ExpressionParser::parse_subscribed() {
  NodePtr node = make_node(NodeKind::kSlice, current().line);
  NodePtr begin, end, step;
  if (!at_op(":")) {
    begin = parse_expression(true);
    if (!at_op(":")) return begin;
  }
  take();
  if (!at_op(":") && !at_op("]") && !at_op(",")) end = parse_expression(true);
  if (skip_op(":") && !at_op("]") && !at_op(",")) step = parse_expression(true);
  node->children.push_back(std::move(begin));
  node->children.push_back(std::move(end));
  node->children.push_back(std::move(step));
  return done(std::move(node));
}

CallArgs ExpressionParser::parse_call_args() {
  const int line = current().line;
  const auto ensure = [line](bool is_valid) {
    if (!is_valid) fail_at(line, "invalid syntax for function call expression");
  };
  CallArgs args;
  expect_op("(");
  parse_items(")", [&] {
    if (skip_op("*")) {
      ensure(!args.star && !args.double_star);
      args.star = parse_expression(true);
    } else if (skip_op("**")) {
      ensure(!args.double_star);
      args.double_star = parse_expression(true);
    } else if (at(TokenType::kName) && look().type == TokenType::kOperator && look().text == "=") {
      ensure(!args.double_star);
      std::string name = take().text;
      take();
      args.keyword.emplace_back(std::move(name), parse_expression(true));
    } else {
      ensure(!args.star && !args.double_star && args.keyword.empty());
      args.positional.push_back(parse_expression(true));
    }
  });
  return args;
}

NodePtr ExpressionParser::parse_call(NodePtr callee) {
  NodePtr node = make_node(NodeKind::kCall, current().line);
  node->args = parse_call_args();
  node->children.push_back(std::move(callee));
  return done(std::move(node));
}

NodePtr ExpressionParser::parse_filter(NodePtr input, bool starts_inline) {
  while (at_op("|") || starts_inline) {
    if (!starts_inline) take();
    starts_inline = false;
    NodePtr node = make_node(NodeKind::kFilter, current().line);
    node->name = expect_name();
    while (skip_op(".")) node->name += "." + expect_name();
    if (at_op("(")) node->args = parse_call_args();
    node->children.push_back(std::move(input));
    input = done(std::move(node));
  }
  return input;
}

NodePtr ExpressionParser::parse_test(NodePtr input) {
  const int line = take().line;
  const bool is_negated = skip_name("not");
  NodePtr node = make_node(NodeKind::kTest, line);
  node->name = expect_name();
  while (skip_op(".")) node->name += "." + expect_name();
  if (at_op("(")) {
    node->args = parse_call_args();
  } else if ((at(TokenType::kName) || at(TokenType::kString) || at(TokenType::kInteger) || at(TokenType::kFloat) || at_op("[") ||
              at_op("{")) &&
             !at_any_name({"else", "or", "and"})) {
    if (at_name("is")) fail_here("You cannot chain multiple tests with is");
    node->args.positional.push_back(parse_postfix(parse_primary()));
  }
  node->children.push_back(std::move(input));
  node = done(std::move(node));
  return is_negated ? unary(NodeKind::kNot, line, std::move(node)) : std::move(node);
}
}  // namespace prl::text::jinja
