#include "text/jinja/parser.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/expression_parser.hpp"

namespace prl::text::jinja {
namespace {

/// Parses statements and what they assign to.
class Parser : private ExpressionParser {
 public:
  explicit Parser(std::string_view source) : ExpressionParser(source) {}

  NodeList run() { return parse_body({}); }

 private:
  // ---- statements
  NodeList parse_body(Words end_words) {
    const Nesting nesting(*this);
    NodeList body;
    while (!at(TokenType::kEnd)) {
      const int line = current().line;
      if (at(TokenType::kData)) {
        NodePtr text = make_node(NodeKind::kText, line);
        text->name = take().text;
        body.push_back(std::move(text));
      } else if (at(TokenType::kVariableBegin)) {
        take();
        NodePtr output = make_node(NodeKind::kOutput, line);
        output->children.push_back(parse_tuple(true));
        body.push_back(done(std::move(output)));
        expect(TokenType::kVariableEnd, "end of print statement");
      } else {
        expect(TokenType::kBlockBegin, "begin of statement block");
        if (at_any_name(end_words)) return body;
        body.push_back(parse_statement());
        expect(TokenType::kBlockEnd, "end of statement block");
      }
    }
    if (end_words.size() > 0)
      fail_here(fmt::format("unexpected end of template; looking for {}", fmt::join(end_words.begin(), end_words.end(), " or ")));
    return body;
  }
  // The body of a block, up to (not over) one of the end tags.
  NodeList parse_block_body(Words end_words) {
    skip_op(":");
    expect(TokenType::kBlockEnd, "end of statement block");
    return parse_body(end_words);
  }
  NodeList parse_block_body_to(std::string_view end_word) {
    NodeList body = parse_block_body({end_word});
    take();
    return body;
  }

  NodePtr parse_statement() {
    if (!at(TokenType::kName)) fail_here("tag name expected");
    const std::string tag = current().text;
    if (tag == "for") return parse_for();
    if (tag == "if") return parse_if();
    if (tag == "set") return parse_set();
    if (tag == "macro") return parse_macro();
    if (tag == "call") return parse_call_block();
    if (tag == "filter") return parse_filter_block();
    if (tag == "with") return parse_with();
    if (tag == "print") return parse_print();
    const int line = current().line;
    if (tag == "break" || tag == "continue") {
      if (num_loops_ == 0) fail_here(fmt::format("'{}' outside a loop", tag));
      take();
      return make_node(tag == "break" ? NodeKind::kBreak : NodeKind::kContinue, line);
    }
    if (tag == "block") return parse_block();
    if (tag == "generation" || tag == "autoescape") {
      take();
      if (tag == "autoescape") {
        const NodePtr wanted = parse_expression(true);
        if (wanted->kind != NodeKind::kConst || wanted->constant.truthy())
          fail_at(line, "'autoescape' is not possible in a chat template, unless to say that it is off");
      }
      NodePtr node = make_node(NodeKind::kScope, line);
      node->bodies.push_back(parse_block_body_to("end" + tag));
      return done(std::move(node));
    }
    if (tag == "include" || tag == "import" || tag == "from" || tag == "extends")
      fail_here(fmt::format("'{}' is not possible in a chat template: there are no other templates to load", tag));
    fail_here(fmt::format("Encountered unknown tag '{}'", tag));
  }

  NodePtr parse_block() {
    NodePtr node = make_node(NodeKind::kBlock, take().line);
    node->name = expect_name();
    if (std::find(block_names_.begin(), block_names_.end(), node->name) != block_names_.end())
      fail_at(node->line, fmt::format("block '{}' defined twice", node->name));
    block_names_.push_back(node->name);
    node->flag = skip_name("scoped");
    if (skip_name("required"))
      fail_at(node->line, fmt::format("Required block '{}' not found: there is no template to fill it in", node->name));
    if (at_op("-"))
      fail_here("Block names in Jinja have to be valid Python identifiers and may not contain hyphens, use an underscore instead.");
    node->bodies.push_back(parse_macro_body("endblock"));
    skip_name(node->name);
    return done(std::move(node));
  }

  NodePtr parse_for() {
    NodePtr node = make_node(NodeKind::kFor, take().line);
    in_for_target_ = true;
    node->target = parse_target({"in"}, false);
    in_for_target_ = false;
    expect_word("in");
    node->children.push_back(parse_tuple(false, {"recursive"}));
    node->children.push_back(skip_name("if") ? parse_expression(true) : nullptr);
    node->flag = skip_name("recursive");
    ++num_loops_;
    node->bodies.push_back(parse_block_body({"endfor", "else"}));
    --num_loops_;
    if (take().text == "else")
      node->bodies.push_back(parse_block_body_to("endfor"));
    else
      node->bodies.emplace_back();
    return done(std::move(node));
  }

  NodePtr parse_if() {
    NodePtr node = make_node(NodeKind::kIf, take().line);
    while (true) {
      node->children.push_back(parse_tuple(false));
      node->bodies.push_back(parse_block_body({"elif", "else", "endif"}));
      const std::string word = take().text;
      if (word == "elif") continue;
      if (word == "else")
        node->bodies.push_back(parse_block_body_to("endif"));
      else
        node->bodies.emplace_back();
      return done(std::move(node));
    }
  }

  NodePtr parse_set() {
    const int line = take().line;
    NodePtr target = parse_target({}, true);
    NodePtr node = make_node(NodeKind::kSet, line);
    if (skip_op("=")) {
      node->children.push_back(parse_tuple(true));
    } else {
      node->kind = NodeKind::kSetBlock;
      node->children.push_back(at_op("|") ? parse_filter(nullptr, false) : nullptr);
      node->bodies.push_back(parse_block_body_to("endset"));
    }
    node->target = std::move(target);
    return done(std::move(node));
  }

  void parse_signature(Node& node) {
    expect_op("(");
    while (!at_op(")")) {
      if (!node.names.empty()) expect_op(",");
      if (at_op(")")) break;
      node.names.push_back(expect_name());
      if (skip_op("="))
        node.args.positional.push_back(parse_expression(true));
      else if (!node.args.positional.empty())
        fail_here("non-default argument follows default argument");
    }
    expect_op(")");
    const auto caller = std::find(node.names.begin(), node.names.end(), "caller");
    if (caller != node.names.end() && static_cast<std::size_t>(node.names.end() - caller) > node.args.positional.size())
      fail_here("the argument 'caller' of a macro must be left out or have a default");
  }

  // break and continue do not reach out of a macro.
  NodeList parse_macro_body(std::string_view end_word) {
    const int outer = std::exchange(num_loops_, 0);
    NodeList body = parse_block_body_to(end_word);
    num_loops_ = outer;
    return body;
  }

  NodePtr parse_macro() {
    NodePtr node = make_node(NodeKind::kMacro, take().line);
    node->name = expect_name();
    parse_signature(*node);
    node->bodies.push_back(parse_macro_body("endmacro"));
    return done(std::move(node));
  }

  NodePtr parse_call_block() {
    NodePtr node = make_node(NodeKind::kCallBlock, take().line);
    node->name = "caller";
    if (at_op("(")) parse_signature(*node);
    node->children.push_back(parse_expression(true));
    if (node->children[0]->kind != NodeKind::kCall) fail_at(node->line, "expected call");
    node->bodies.push_back(parse_macro_body("endcall"));
    return done(std::move(node));
  }

  NodePtr parse_filter_block() {
    NodePtr node = make_node(NodeKind::kFilterBlock, take().line);
    node->children.push_back(parse_filter(nullptr, true));
    node->bodies.push_back(parse_block_body_to("endfilter"));
    return done(std::move(node));
  }

  NodePtr parse_with() {
    NodePtr node = make_node(NodeKind::kWith, take().line);
    node->target = make_node(NodeKind::kTuple, node->line);
    while (!at(TokenType::kBlockEnd)) {
      if (!node->children.empty()) expect_op(",");
      node->target->children.push_back(parse_target({}, false, false));
      expect_op("=");
      node->children.push_back(parse_expression(true));
    }
    node->bodies.push_back(parse_block_body_to("endwith"));
    return done(std::move(node));
  }

  NodePtr parse_print() {
    NodePtr node = make_node(NodeKind::kOutput, take().line);
    while (!at(TokenType::kBlockEnd)) {
      if (!node->children.empty()) expect_op(",");
      node->children.push_back(parse_expression(true));
    }
    return done(std::move(node));
  }

  // ---- assignment targets
  NodePtr parse_single_target(bool with_namespace) {
    if (skip_op("(")) {
      NodePtr inner = parse_target({}, with_namespace);
      expect_op(")");
      return inner;
    }
    const int line = current().line;
    NodePtr node = make_node(NodeKind::kName, line);
    node->name = expect_name();
    if (node->name == "loop" && (num_loops_ > 0 || in_for_target_)) fail_at(line, "Can't assign to special loop variable in for-loop");
    if (node->name == "true" || node->name == "false" || node->name == "none" || node->name == "True" || node->name == "False" ||
        node->name == "None")
      fail_at(line, "can't assign to '" + node->name + "'");
    if (with_namespace && skip_op(".")) {
      node->kind = NodeKind::kNamespaceRef;
      node->names = {node->name, expect_name()};
    }
    return node;
  }
  NodePtr parse_target(Words end_words, bool with_namespace, bool with_tuple = true) {
    const Nesting nesting(*this);
    const int line = current().line;
    NodePtr first = parse_single_target(with_namespace);
    if (!with_tuple || !at_op(",")) return first;
    NodePtr node = make_node(NodeKind::kTuple, line);
    node->children.push_back(std::move(first));
    while (skip_op(",")) {
      if (at_tuple_end(end_words) || at_op("=")) break;
      node->children.push_back(parse_single_target(with_namespace));
    }
    return done(std::move(node));
  }

  int num_loops_ = 0;
  bool in_for_target_ = false;
  std::vector<std::string> block_names_;
};

}  // namespace

NodeList parse_template(std::string_view source) { return Parser(source).run(); }

}  // namespace prl::text::jinja
