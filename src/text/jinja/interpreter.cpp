#include "text/jinja/interpreter.hpp"
#include "text/jinja/operators.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/jinja/iterator.hpp"
#include "text/jinja/lexer.hpp"
#include "text/jinja/markup.hpp"

namespace prl::text::jinja {
namespace {

bool body_names(const Node& macro, std::string_view name);

class Macro : public Object {
 public:
  Macro(const Node& node, ScopePtr scope) : node_(&node), scope_(std::move(scope)) {}
  std::string type_name() const override { return "Macro '" + node_->name + "'"; }
  bool is_callable() const override { return true; }
  Value call(Interpreter& interpreter, Args& args) const override { return Value(interpreter.call_macro(*node_, scope_, args)); }
  std::optional<Value> attribute(std::string_view name) const override {
    if (name == "name") return Value(node_->name);
    if (name == "arguments") {
      std::vector<Value> names;
      for (const std::string& argument : node_->names) names.emplace_back(argument);
      return make_tuple(std::move(names));
    }
    if (name == "catch_varargs") return Value(body_names(*node_, "varargs"));
    if (name == "catch_kwargs") return Value(body_names(*node_, "kwargs"));
    if (name == "caller") return Value(body_names(*node_, "caller"));
    return std::nullopt;
  }

 private:
  const Node* node_;  // the template outlives its rendering
  ScopePtr scope_;
};

// The variable `loop`.
class Loop : public Object {
 public:
  /// `scope` is needed by recursive loops only.
  Loop(const Node& node, std::vector<Value> items, ScopePtr scope, int depth)
      : node_(&node), items_(make_list(std::move(items))), scope_(std::move(scope)), depth_(depth) {}
  std::string type_name() const override { return "LoopContext"; }
  bool is_callable() const override { return node_->flag; }
  int depth() const override { return depth_of(items_); }
  Value call(Interpreter& interpreter, Args& args) const override {
    const ArgReader reader(interpreter, "loop", args, {"iterable"});
    return Value(interpreter.run_loop(*node_, iterate(interpreter, reader.required(0)), scope_, depth_ + 1));
  }
  std::optional<Value> attribute(std::string_view name) const override;
  void move_to(std::size_t index) { index_ = index; }
  const std::vector<Value>& items() const { return items_.list().items; }

 private:
  const Node* node_;
  Value items_;
  ScopePtr scope_;
  int depth_;
  std::size_t index_ = 0;
  // loop.changed: the arguments of the last call, as text so that they are not kept alive
  std::shared_ptr<std::string> last_changed_ = std::make_shared<std::string>();
};

std::optional<Value> Loop::attribute(std::string_view name) const {
  const std::vector<Value>& items = items_.list().items;
  const std::size_t count = items.size();
  if (name == "index") return Value(index_ + 1);
  if (name == "index0") return Value(index_);
  if (name == "revindex") return Value(count - index_);
  if (name == "revindex0") return Value(count - index_ - 1);
  if (name == "first") return Value(index_ == 0);
  if (name == "last") return Value(index_ + 1 == count);
  if (name == "length") return Value(count);
  if (name == "depth") return Value(depth_ + 1);
  if (name == "depth0") return Value(depth_);
  if (name == "previtem") return index_ > 0 ? items[index_ - 1] : make_undefined("there is no previous item");
  if (name == "nextitem") return index_ + 1 < count ? items[index_ + 1] : make_undefined("there is no next item");
  if (name == "cycle")
    return make_function("cycle", [index = index_](Interpreter& interpreter, Args& args) {
      if (args.positional.empty()) interpreter.fail("no items for cycling given");
      return args.positional[index % args.positional.size()];
    });
  if (name == "changed")
    return make_function("changed", [last = last_changed_](Interpreter&, Args& args) {
      std::string now = repr(make_tuple(args.positional));
      const bool is_new = *last != now;
      *last = std::move(now);
      return Value(is_new);
    });
  return std::nullopt;
}

// The variable `self`: the blocks of the template, to be rendered once more.
class Blocks : public Object {
 public:
  explicit Blocks(const NodeList& body) { collect(body); }
  std::string type_name() const override { return "TemplateReference"; }
  std::optional<Value> attribute(std::string_view name) const override {
    for (const Node* block : blocks_)
      if (block->name == name)
        return make_function(std::string(name), [block](Interpreter& interpreter, Args&) { return Value(interpreter.run_block(*block)); });
    return std::nullopt;
  }

 private:
  void collect(const NodeList& body) {
    for (const NodePtr& node : body) {
      if (node->kind == NodeKind::kBlock) blocks_.push_back(node.get());
      for (const NodeList& inner : node->bodies) collect(inner);
    }
  }
  std::vector<const Node*> blocks_;
};

bool uses_name(const Node& node, std::string_view name);
/// Whether the body of a macro names a variable: it then takes what it did not ask for by a parameter.
bool body_names(const Node& macro, std::string_view name) {
  return std::any_of(macro.bodies[0].begin(), macro.bodies[0].end(), [&](const NodePtr& n) { return uses_name(*n, name); });
}

bool uses_name(const Node& node, std::string_view name) {
  if (node.kind == NodeKind::kName && node.name == name) return true;
  const auto any = [name](const NodeList& list) {
    return std::any_of(list.begin(), list.end(), [name](const NodePtr& n) { return n && uses_name(*n, name); });
  };
  if (any(node.children) || any(node.args.positional)) return true;
  for (const auto& [key, value] : node.args.keyword)
    if (uses_name(*value, name)) return true;
  if ((node.args.star && uses_name(*node.args.star, name)) || (node.args.double_star && uses_name(*node.args.double_star, name)))
    return true;
  return std::any_of(node.bodies.begin(), node.bodies.end(), any);
}

/// -value or +value.
Value with_sign(const Interpreter& interpreter, NodeKind kind, const Value& value) {
  if (value.is_undefined()) interpreter.fail(value.undefined_message());
  if (value.big_integer())
    return kind != NodeKind::kNeg ? value
                                  : make_integer(value.big_integer()->text.front() == '-' ? value.big_integer()->text.substr(1)
                                                                                          : "-" + value.big_integer()->text);
  if (!value.is_number())
    interpreter.fail(fmt::format("bad operand type for unary {}: '{}'", kind == NodeKind::kNeg ? '-' : '+', value.type_name()));
  const int sign = kind == NodeKind::kNeg ? -1 : 1;
  return value.is_float() ? Value(sign * value.number()) : Value(sign * value.integer());
}

}  // namespace

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->parent.get())
    for (const auto& [key, value] : scope->variables)
      if (key == name) return &value;
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  for (auto& [key, old] : variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  variables.emplace_back(std::string(name), std::move(value));
}

Interpreter::Depth::Depth(Interpreter& interpreter) : owner(interpreter) {
  if (++owner.depth_ <= owner.limits_.max_depth) return;
  --owner.depth_;
  owner.fail(fmt::format("evaluation nested deeper than {} levels; does a macro call itself without end?", owner.limits_.max_depth));
}

std::string Interpreter::run(const NodeList& body, std::vector<std::pair<std::string, Value>> variables) {
  auto root = std::make_shared<Scope>(nullptr);
  root->variables = std::move(variables);
  // Names that the template sets live above those it was given, so that a long list of either stays cheap to search.
  auto top = std::make_shared<Scope>(root);
  top_ = top;
  root->variables.emplace_back("self", Value(std::static_pointer_cast<Object>(std::make_shared<Blocks>(body))));
  kept_.emplace();
  struct Cleanup {
    Interpreter& owner;
    ~Cleanup() {
      owner.kept_.reset();
      owner.top_.reset();
    }
  } const cleanup{*this};
  std::string out;
  execute(body, top, out);
  return out;
}

Interpreter::Kept::~Kept() {
  for (const ScopePtr& scope : scopes) scope->variables.clear();
  for (const std::shared_ptr<Object>& object : objects) object->release();
}

void Interpreter::keep(std::shared_ptr<Object> object) {
  charge_bytes(256);
  kept_->objects.push_back(std::move(object));
}

void Interpreter::keep(const ScopePtr& scope) {
  charge_bytes(256);
  if (kept_->scopes.empty() || kept_->scopes.back() != scope) kept_->scopes.push_back(scope);
}

void Interpreter::fail(const std::string& message) const { fail_at(line_, message); }

void Interpreter::charge_step(std::uint64_t count) {
  num_steps_ += count;
  if (num_steps_ > limits_.max_steps) fail(fmt::format("more than {} steps; does the template loop without end?", limits_.max_steps));
}

void Interpreter::charge_bytes(std::size_t bytes) {
  num_bytes_ += bytes;
  if (num_bytes_ > limits_.max_bytes) fail(fmt::format("builds more than {} bytes of values", limits_.max_bytes));
}

void Interpreter::emit(std::string& out, std::string_view text) {
  charge_bytes(text.size());
  if (out.size() + text.size() > limits_.max_output_bytes) fail(fmt::format("output of more than {} bytes", limits_.max_output_bytes));
  out += text;
}

Interpreter::Flow Interpreter::execute(const NodeList& body, const ScopePtr& scope, std::string& out) {
  for (const NodePtr& node : body)
    if (const Flow flow = execute(*node, scope, out); flow != Flow::kNormal) return flow;
  return Flow::kNormal;
}

std::string Interpreter::run_captured(const NodeList& body, const ScopePtr& scope) {
  std::string out;
  execute(body, std::make_shared<Scope>(scope), out);
  return out;
}

Interpreter::Flow Interpreter::execute(const Node& node, const ScopePtr& scope, std::string& out) {
  const Depth depth(*this);
  charge_step();
  line_ = node.line;
  switch (node.kind) {
    case NodeKind::kText: emit(out, node.name); break;
    case NodeKind::kOutput:
      for (const NodePtr& child : node.children) {
        const Value value = evaluate(*child, scope);
        emit(out, value.is_string() ? value.string() : value.str());
      }
      break;
    case NodeKind::kIf: {
      std::size_t branch = 0;
      while (branch < node.children.size() && !evaluate(*node.children[branch], scope).truthy()) ++branch;
      return execute(node.bodies[branch], scope, out);
    }
    case NodeKind::kFor: {
      const Value iterable = evaluate(*node.children[0], scope);
      std::vector<Value> items = iterate(*this, iterable);
      std::size_t consumed = 0;
      Iterator* iterator = as_iterator(iterable);
      if (iterator == nullptr) return loop_over(node, std::move(items), scope, 0, out, consumed);
      const Flow flow = loop_over(node, items, scope, 0, out, consumed);
      iterator->put_back({items.begin() + static_cast<std::ptrdiff_t>(consumed), items.end()});
      return flow;
    }
    case NodeKind::kBlock:
      // A block sees what the template set at its top, and the loops around it only if it says so.
      emit(out, run_captured(node.bodies[0], node.flag ? scope : top_));
      break;
    case NodeKind::kSet: assign(*node.target, evaluate(*node.children[0], scope), scope); break;
    case NodeKind::kSetBlock: {
      Value value(run_captured(node.bodies[0], scope));
      if (node.children[0]) value = evaluate_filter(*node.children[0], std::move(value), scope);
      assign(*node.target, value, scope);
      break;
    }
    case NodeKind::kMacro:
      keep(scope);
      scope->set(node.name, Value(std::make_shared<Macro>(node, scope)));
      break;
    case NodeKind::kCallBlock: {
      keep(scope);
      const Node& call_node = *node.children[0];
      const Value callee = evaluate(*call_node.children[0], scope);
      Args args = evaluate_args(call_node.args, scope);
      args.keyword.emplace_back("caller", Value(std::make_shared<Macro>(node, scope)));
      emit(out, call(callee, args).str());
      break;
    }
    case NodeKind::kFilterBlock:
      emit(out, evaluate_filter(*node.children[0], Value(run_captured(node.bodies[0], scope)), scope).str());
      break;
    case NodeKind::kWith: {
      auto inner = std::make_shared<Scope>(scope);
      for (std::size_t i = 0; i < node.children.size(); ++i) assign(*node.target->children[i], evaluate(*node.children[i], scope), inner);
      return execute(node.bodies[0], inner, out);
    }
    case NodeKind::kScope: return execute(node.bodies[0], std::make_shared<Scope>(scope), out);
    case NodeKind::kBreak: return Flow::kBreak;
    case NodeKind::kContinue: return Flow::kContinue;
    default: fail("an expression where a statement is expected");
  }
  return Flow::kNormal;
}

std::string Interpreter::run_block(const Node& block) {
  const Depth guard(*this);
  return run_captured(block.bodies[0], top_);
}

Interpreter::Flow Interpreter::loop_over(const Node& node, std::vector<Value> all, const ScopePtr& scope, int depth, std::string& out,
                                         std::size_t& consumed) {
  consumed = all.size();
  std::vector<std::size_t> places;  // of the items that the condition lets through
  if (node.children[1]) {
    std::vector<Value> filtered;
    for (std::size_t i = 0; i < all.size(); ++i) {
      charge_step();
      auto inner = std::make_shared<Scope>(scope);
      assign(*node.target, all[i], inner);
      if (!evaluate(*node.children[1], inner).truthy()) continue;
      filtered.push_back(all[i]);
      places.push_back(i);
    }
    all = std::move(filtered);
  }
  if (all.empty()) return execute(node.bodies[1], std::make_shared<Scope>(scope), out);
  if (node.flag) keep(scope);
  const auto loop = std::make_shared<Loop>(node, std::move(all), node.flag ? scope : nullptr, depth);
  const std::vector<Value>& items = loop->items();
  for (std::size_t i = 0; i < items.size(); ++i) {
    charge_step();
    loop->move_to(i);
    auto inner = std::make_shared<Scope>(scope);
    inner->variables.emplace_back("loop", Value(std::static_pointer_cast<Object>(loop)));
    assign(*node.target, items[i], inner);
    const Flow flow = execute(node.bodies[0], inner, out);
    if (flow == Flow::kBreak) {
      consumed = (node.children[1] ? places[i] : i) + 1;
      break;
    }
  }
  return Flow::kNormal;
}

std::string Interpreter::run_loop(const Node& loop, std::vector<Value> items, const ScopePtr& scope, int depth) {
  const Depth guard(*this);
  std::string out;
  std::size_t consumed = 0;
  loop_over(loop, std::move(items), scope, depth, out, consumed);
  return out;
}

std::string Interpreter::call_macro(const Node& macro, const ScopePtr& scope, Args& args) {
  const Depth guard(*this);
  const int line = line_;
  auto inner = std::make_shared<Scope>(scope);
  const std::size_t num_parameters = macro.names.size();
  std::vector<Value> rest(args.positional.begin() + static_cast<std::ptrdiff_t>(std::min(num_parameters, args.positional.size())),
                          args.positional.end());
  std::vector<std::pair<Value, Value>> extra;
  std::vector<std::pair<std::string, Value>*> named(num_parameters, nullptr);
  const auto body_uses = [&](std::string_view name) { return body_names(macro, name); };
  for (auto& entry : args.keyword) {
    const auto place = std::find(macro.names.begin(), macro.names.end(), entry.first);
    if (place != macro.names.end()) {
      const auto index = static_cast<std::size_t>(place - macro.names.begin());
      if (index < args.positional.size()) fail(fmt::format("macro '{}' got multiple values for argument '{}'", macro.name, entry.first));
      named[index] = &entry;
    } else if (entry.first == "caller" && body_uses("caller")) {
      inner->set("caller", entry.second);
    } else {
      extra.emplace_back(Value(entry.first), entry.second);
    }
  }
  if (!rest.empty() && !body_uses("varargs"))
    fail(fmt::format("macro '{}' takes not more than {} argument(s)", macro.name, num_parameters));
  if (!extra.empty() && !body_uses("kwargs"))
    fail(fmt::format("macro '{}' takes no keyword argument '{}'", macro.name, extra.front().first.string()));
  const std::size_t first_default = num_parameters - macro.args.positional.size();
  for (std::size_t i = 0; i < num_parameters; ++i) {
    if (i < args.positional.size())
      inner->set(macro.names[i], args.positional[i]);
    else if (named[i] != nullptr)
      inner->set(macro.names[i], named[i]->second);
    else if (i >= first_default)
      inner->set(macro.names[i], evaluate(*macro.args.positional[i - first_default], inner));
    else
      inner->set(macro.names[i], make_undefined(fmt::format("parameter '{}' was not provided", macro.names[i])));
  }
  inner->set("varargs", make_tuple(std::move(rest)));
  inner->set("kwargs", make_dict(std::move(extra)));
  std::string out;
  execute(macro.bodies[0], inner, out);
  line_ = line;
  return out;
}

void Interpreter::assign(const Node& target, const Value& value, const ScopePtr& scope) {
  if (target.kind == NodeKind::kName) {
    scope->set(target.name, value);
  } else if (target.kind == NodeKind::kNamespaceRef) {
    check_namespace_name(*this, target.names[1]);
    const Value object = lookup(target.names[0], scope);
    if (!object.is_object() || !object.object().set_attribute(target.names[1], value))
      fail(fmt::format("cannot assign attribute '{}' on non-namespace object '{}'", target.names[1], target.names[0]));
  } else {
    const std::vector<Value> items = iterate(*this, value);
    if (items.size() != target.children.size())
      fail(fmt::format("{} values to unpack (expected {}, got {})", items.size() < target.children.size() ? "not enough" : "too many",
                       target.children.size(), items.size()));
    for (std::size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i], scope);
  }
}

Value Interpreter::lookup(const std::string& name, const ScopePtr& scope) const {
  if (const Value* value = scope->find(name)) return *value;
  if (const Value* value = find_global(name)) return *value;
  return make_undefined(fmt::format("'{}' is undefined", name));
}

Args Interpreter::evaluate_args(const CallArgs& args, const ScopePtr& scope) {
  Args out;
  for (const NodePtr& node : args.positional) out.positional.push_back(evaluate(*node, scope));
  if (args.star)
    for (Value& value : iterate(*this, evaluate(*args.star, scope))) out.positional.push_back(std::move(value));
  for (const auto& [name, node] : args.keyword) out.keyword.emplace_back(name, evaluate(*node, scope));
  if (args.double_star) {
    const Value mapping = evaluate(*args.double_star, scope);
    if (!mapping.is_dict()) fail("argument after ** must be a mapping, not " + mapping.type_name());
    for (const auto& [key, value] : mapping.dict().entries) {
      if (!key.is_string()) fail("keywords must be strings");
      out.keyword.emplace_back(key.string(), value);
    }
  }
  return out;
}

Value Interpreter::evaluate_filter(const Node& node, Value input, const ScopePtr& scope) {
  // Inside a filter block or a block set, the innermost filter of a chain has no input of its own.
  if (node.children[0]) input = evaluate_filter(*node.children[0], std::move(input), scope);
  Args args = evaluate_args(node.args, scope);
  line_ = node.line;
  return apply_filter(node.name, input, args);
}

Value Interpreter::evaluate_or_undefined(const NodePtr& node, const ScopePtr& scope, std::string_view what) {
  return node ? evaluate(*node, scope) : make_undefined(std::string(what));
}

Value Interpreter::compare(const Node& node, const ScopePtr& scope) {
  Value left = evaluate(*node.children[0], scope);
  for (std::size_t i = 0; i < node.names.size(); ++i) {
    Value right = evaluate(*node.children[i + 1], scope);
    line_ = node.line;
    const std::string& op = node.names[i];
    bool holds = false;
    if (op == "==")
      holds = left.equals(right);
    else if (op == "!=")
      holds = !left.equals(right);
    else if (op == "in")
      holds = contains(*this, right, left);
    else if (op == "not in")
      holds = !contains(*this, right, left);
    else if (op == "<")
      holds = order(*this, left, right, op) < 0;
    else if (op == ">")
      holds = order(*this, left, right, op) > 0;
    else if (op == "<=")
      holds = order(*this, left, right, op) <= 0;
    else
      holds = order(*this, left, right, op) >= 0;
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::evaluate(const Node& node, const ScopePtr& scope) {
  const Depth depth(*this);
  charge_step();
  line_ = node.line;
  switch (node.kind) {
    case NodeKind::kConst: return node.constant;
    case NodeKind::kName: return lookup(node.name, scope);
    case NodeKind::kList:
    case NodeKind::kTuple: {
      std::vector<Value> items;
      items.reserve(node.children.size());
      for (const NodePtr& child : node.children) items.push_back(evaluate(*child, scope));
      charge_bytes(items.size() * sizeof(Value));
      return make_list(std::move(items), node.kind == NodeKind::kList ? ListFlavor::kList : ListFlavor::kTuple);
    }
    case NodeKind::kDict: {
      std::vector<std::pair<Value, Value>> entries;
      for (std::size_t i = 0; i < node.children.size(); i += 2) {
        Value key = evaluate(*node.children[i], scope);
        check_hashable(*this, key);
        entries.emplace_back(std::move(key), evaluate(*node.children[i + 1], scope));
      }
      charge_bytes(entries.size() * 2 * sizeof(Value));
      return make_dict(std::move(entries));
    }
    case NodeKind::kGetattr: {
      const Value object = evaluate(*node.children[0], scope);
      line_ = node.line;
      return get_attribute(*this, object, node.name);
    }
    case NodeKind::kGetitem: {
      const Value object = evaluate(*node.children[0], scope);
      const Node& index = *node.children[1];
      if (index.kind == NodeKind::kSlice) {
        const auto part = [&](std::size_t i) { return index.children[i] ? evaluate(*index.children[i], scope) : Value(); };
        const Value begin = part(0), end = part(1), step = part(2);
        line_ = node.line;
        return slice(*this, object, begin, end, step);
      }
      const Value key = evaluate(index, scope);
      line_ = node.line;
      return get_item(*this, object, key);
    }
    case NodeKind::kCall:
    case NodeKind::kFilter:
    case NodeKind::kTest: {
      const Value subject = evaluate(*node.children[0], scope);
      Args args = evaluate_args(node.args, scope);
      line_ = node.line;
      if (node.kind == NodeKind::kCall) return call(subject, args);
      return node.kind == NodeKind::kFilter ? apply_filter(node.name, subject, args) : Value(apply_test(node.name, subject, args));
    }
    case NodeKind::kNot: return Value(!evaluate(*node.children[0], scope).truthy());
    case NodeKind::kNeg:
    case NodeKind::kPos: return with_sign(*this, node.kind, evaluate(*node.children[0], scope));
    case NodeKind::kAnd:
    case NodeKind::kOr: {
      Value left = evaluate(*node.children[0], scope);
      return left.truthy() == (node.kind == NodeKind::kAnd) ? evaluate(*node.children[1], scope) : left;
    }
    case NodeKind::kBinary: {
      const Value left = evaluate(*node.children[0], scope);
      const Value right = evaluate(*node.children[1], scope);
      line_ = node.line;
      return binary(*this, node.name, left, right);
    }
    case NodeKind::kConcat: {
      std::string text;
      for (const NodePtr& child : node.children) text += evaluate(*child, scope).str();
      charge_bytes(text.size());
      return Value(std::move(text));
    }
    case NodeKind::kCompare: return compare(node, scope);
    case NodeKind::kCond:
      if (evaluate(*node.children[0], scope).truthy()) return evaluate(*node.children[1], scope);
      return evaluate_or_undefined(node.children[2], scope, "the inline if-expression evaluated to false and no else section was defined");
    default: fail("a statement where an expression is expected");
  }
}

Value Interpreter::call(const Value& callee, Args& args) {
  const Depth guard(*this);
  if (callee.is_undefined()) fail(callee.undefined_message());
  if (!callee.is_object() || !callee.object().is_callable()) fail("'" + callee.type_name() + "' object is not callable");
  return callee.object().call(*this, args);
}

Value Interpreter::apply_filter(std::string_view name, const Value& input, Args& args) {
  const Depth guard(*this);
  FilterFunction filter = find_filter(name);
  if (filter == nullptr) filter = find_sequence_filter(name);
  if (filter == nullptr) filter = find_text_filter(name);
  if (filter == nullptr) fail(fmt::format("No filter named '{}'", name));
  return filter(*this, input, args);
}

bool Interpreter::apply_test(std::string_view name, const Value& input, Args& args) {
  const TestFunction test = find_test(name);
  if (test == nullptr) fail(fmt::format("No test named '{}'", name));
  return test(*this, input, args);
}

}  // namespace prl::text::jinja
