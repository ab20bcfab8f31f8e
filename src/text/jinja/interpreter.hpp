#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.hpp"
#include "text/jinja/value.hpp"

namespace prl::text::jinja {

/// What one rendering may use; each keeps a hostile template from hanging or filling memory.
struct Limits {
  std::uint64_t max_steps = 5'000'000;                 ///< expressions and statements evaluated
  std::uint64_t max_bytes = std::uint64_t{256} << 20;  ///< bytes of text and items built, thrown away or not
  std::size_t max_output_bytes = std::size_t{64} << 20;
  int max_depth = 900;  ///< nested evaluations, macro calls included
};

/// Variables of one block. Loops, macros and `with` open a new one; `if` does not.
struct Scope {
  explicit Scope(std::shared_ptr<Scope> outer) : parent(std::move(outer)) {}
  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);

  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string, Value>> variables;
};
using ScopePtr = std::shared_ptr<Scope>;

/// Runs one parsed template once. Single-threaded; make one per rendering.
///
/// Behaves as transformers' ImmutableSandboxedEnvironment with loop controls. Every failure is Error{kInvalidArgument} with
/// the line.
class Interpreter {
 public:
  Interpreter(const Limits& limits, std::function<std::time_t()> clock) : limits_(limits), clock_(std::move(clock)) {}

  std::string run(const NodeList& body, std::vector<std::pair<std::string, Value>> variables);

  // ---- for filters, tests, methods and objects
  [[noreturn]] void fail(const std::string& message) const;
  /// Counts work against the limits.
  void charge_bytes(std::size_t bytes);
  void charge_step(std::uint64_t count = 1);
  std::time_t now() const { return clock_(); }
  /// Keeps something that may take part in a ring or a long chain of references alive until the end of the rendering, where
  /// it is emptied: nothing leaks, and no destructor recurses deeply.
  void keep(std::shared_ptr<Object> object);
  void keep(const ScopePtr& scope);
  /// Renders the body of {% block %} again, as self.name() asks.
  std::string run_block(const Node& block);

  Value call(const Value& callee, Args& args);
  Value apply_filter(std::string_view name, const Value& input, Args& args);
  bool apply_test(std::string_view name, const Value& input, Args& args);

  // ---- for macros and loops
  std::string call_macro(const Node& macro, const ScopePtr& scope, Args& args);
  std::string run_loop(const Node& loop, std::vector<Value> items, const ScopePtr& scope, int depth);

  /// Counts one nested evaluation for as long as it lives.
  struct Depth {
    explicit Depth(Interpreter& interpreter);
    ~Depth() { --owner.depth_; }
    Interpreter& owner;
  };

 private:
  enum class Flow : std::uint8_t { kNormal, kBreak, kContinue };

  Flow execute(const NodeList& body, const ScopePtr& scope, std::string& out);
  Flow execute(const Node& node, const ScopePtr& scope, std::string& out);
  /// `consumed`: how many items the loop took before it ended.
  Flow loop_over(const Node& loop, std::vector<Value> items, const ScopePtr& scope, int depth, std::string& out, std::size_t& consumed);
  void emit(std::string& out, std::string_view text);
  void assign(const Node& target, const Value& value, const ScopePtr& scope);
  Value evaluate(const Node& node, const ScopePtr& scope);
  Value evaluate_or_undefined(const NodePtr& node, const ScopePtr& scope, std::string_view what);
  Value compare(const Node& node, const ScopePtr& scope);
  Value lookup(const std::string& name, const ScopePtr& scope) const;
  Args evaluate_args(const CallArgs& args, const ScopePtr& scope);
  Value evaluate_filter(const Node& node, Value input, const ScopePtr& scope);
  std::string run_captured(const NodeList& body, const ScopePtr& scope);

  Limits limits_;
  std::function<std::time_t()> clock_;
  /// What lives until the end of a rendering. A macro holds the scope that holds the macro, and a namespace may hold itself.
  struct Kept {
    ~Kept();
    std::vector<std::shared_ptr<Object>> objects;
    std::vector<ScopePtr> scopes;
  };
  std::optional<Kept> kept_;
  ScopePtr top_;  ///< what the template itself sets, outside all blocks and loops
  std::uint64_t num_steps_ = 0;
  std::uint64_t num_bytes_ = 0;
  int depth_ = 0;
  int line_ = 1;
};

/// Reads the arguments of a filter, test, method or function by position or name, as a Python signature would.
class ArgReader {
 public:
  /// Fails if there are more arguments than `names`, or a keyword that is not one of them.
  ArgReader(Interpreter& interpreter, std::string_view function, Args& args, std::initializer_list<std::string_view> names);
  bool has(std::size_t index) const { return index < values_.size() && values_[index] != nullptr; }
  const Value& required(std::size_t index) const;
  Value value_or(std::size_t index, Value fallback) const { return has(index) ? *values_[index] : fallback; }
  bool bool_or(std::size_t index, bool fallback) const { return has(index) ? values_[index]->truthy() : fallback; }
  std::int64_t int_or(std::size_t index, std::int64_t fallback) const;
  std::string string(std::size_t index) const;

 private:
  Interpreter& interpreter_;
  std::string_view function_;
  std::vector<std::string_view> names_;
  std::vector<const Value*> values_;
};

/// A function of C++ seen by templates.
class Function : public Object {
 public:
  using Body = std::function<Value(Interpreter&, Args&)>;
  /// `depth` is that of the values the body holds.
  Function(std::string name, Body body, int depth) : name_(std::move(name)), body_(std::move(body)), depth_(depth) {}
  int depth() const override { return depth_; }
  std::string type_name() const override { return "function " + name_; }
  bool is_callable() const override { return true; }
  Value call(Interpreter& interpreter, Args& args) const override { return body_(interpreter, args); }

 private:
  std::string name_;
  Body body_;
  int depth_;
};
Value make_function(std::string name, Function::Body body, int depth = 0);

/// range, dict, namespace, cycler, joiner, raise_exception, strftime_now.
const Value* find_global(std::string_view name);
/// A method of str, dict or list bound to `object`; nullopt if the type has none of this name.
std::optional<Value> find_method(const Value& object, std::string_view name);
/// Names of a namespace's members do not begin with an underscore.
void check_namespace_name(const Interpreter& interpreter, std::string_view name);
/// What keys(), values() and items() of a dict give: can be iterated, has a length and no elements.
bool is_view(const Value& value);
/// Fails for what cannot be a key of a dict: lists and dicts.
void check_hashable(const Interpreter& interpreter, const Value& value);
/// text % values; what goes into a Markup is escaped.
Value percent_format(Interpreter& interpreter, const Value& text, const Value& values);
/// text.format(*args); `mapping` is looked up in place of keyword arguments if it is not null.
Value brace_format(Interpreter& interpreter, const Value& text, const Args& args, const Value* mapping);
/// str(int(text, base)) and float(text) of Python; nullopt where they would raise.
std::optional<Int> parse_int(const std::string& text, int base);
std::optional<double> parse_float(const std::string& text);

/// Filters and tests by name; null if there is none.
using FilterFunction = Value (*)(Interpreter&, const Value& input, Args&);
using TestFunction = bool (*)(Interpreter&, const Value& input, Args&);
FilterFunction find_filter(std::string_view name);
FilterFunction find_sequence_filter(std::string_view name);
FilterFunction find_text_filter(std::string_view name);
TestFunction find_test(std::string_view name);

}  // namespace prl::text::jinja
