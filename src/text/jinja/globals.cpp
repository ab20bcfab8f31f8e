#include <algorithm>
#include <array>
#include <ctime>
#include <map>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/operators.hpp"

// The functions a chat template sees, and how functions read their arguments.
namespace prl::text::jinja {
namespace {

// The sandbox's own limit.
constexpr Int kMaxRange = 100'000;

class Namespace : public Object {
 public:
  std::string type_name() const override { return "Namespace"; }
  std::optional<Value> attribute(std::string_view name) const override {
    for (const auto& [key, value] : members_)
      if (key == name) return value;
    return std::nullopt;
  }
  bool set_attribute(std::string_view name, Value value) override {
    for (auto& [key, old] : members_) {
      if (key == name) {
        old = std::move(value);
        return true;
      }
    }
    members_.emplace_back(std::string(name), std::move(value));
    return true;
  }
  void release() override { members_.clear(); }

 private:
  std::vector<std::pair<std::string, Value>> members_;
};

// dict(mapping_or_pairs, name=value, ...)
std::vector<std::pair<Value, Value>> dict_entries(Interpreter& interpreter, Args& args, std::string_view function) {
  std::vector<std::pair<Value, Value>> entries;
  if (args.positional.size() > 1) interpreter.fail(std::string(function) + " expected at most 1 argument");
  if (!args.positional.empty()) {
    const Value& source = args.positional[0];
    if (source.is_undefined()) interpreter.fail(source.undefined_message());
    if (source.is_dict()) {
      entries = source.dict().entries;
    } else {
      for (const Value& pair : iterate(interpreter, source)) {
        std::vector<Value> parts = iterate(interpreter, pair);
        if (parts.size() != 2) interpreter.fail("dictionary update sequence element has a length other than 2");
        entries.emplace_back(std::move(parts[0]), std::move(parts[1]));
      }
    }
  }
  for (auto& [name, value] : args.keyword) entries.emplace_back(Value(name), value);
  interpreter.charge_bytes(entries.size() * 2 * sizeof(Value));
  return entries;
}

Value make_range(Interpreter& interpreter, Args& args) {
  if (args.positional.empty() || args.positional.size() > 3 || !args.keyword.empty()) interpreter.fail("range expected 1 to 3 arguments");
  std::array<Int, 3> bounds = {0, 0, 1};
  for (std::size_t i = 0; i < args.positional.size(); ++i) {
    const Value& value = args.positional[i];
    if (value.is_undefined()) interpreter.fail(value.undefined_message());
    if (!value.is_int() && !value.is_bool()) interpreter.fail("'" + value.type_name() + "' object cannot be interpreted as an integer");
    bounds[args.positional.size() == 1 ? 1 : i] = value.integer();
  }
  const auto [begin, end, step] = bounds;
  if (step == 0) interpreter.fail("range() arg 3 must not be zero");
  const Int count = step > 0 ? (end - begin + step - 1) / step : (begin - end - step - 1) / -step;
  if (count > kMaxRange) interpreter.fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  std::vector<Value> items;
  for (Int i = 0; i < count; ++i) items.emplace_back(begin + i * step);
  interpreter.charge_bytes(items.size() * sizeof(Value));
  return make_range(std::move(items), begin, end, step);
}

// dict(...), and dict.fromkeys(...)
class DictType : public Object {
 public:
  std::string type_name() const override { return "TemplateDict"; }
  bool is_callable() const override { return true; }
  Value call(Interpreter& interpreter, Args& args) const override { return make_dict(dict_entries(interpreter, args, "dict")); }
  std::optional<Value> attribute(std::string_view name) const override {
    return name == "fromkeys" ? find_method(make_dict({}), name) : std::nullopt;
  }
};

Value make_namespace(Interpreter& interpreter, Args& args) {
  auto object = std::make_shared<Namespace>();
  for (auto& [key, value] : dict_entries(interpreter, args, "namespace")) {
    if (!key.is_string()) interpreter.fail("namespace names must be strings");
    check_namespace_name(interpreter, key.string());
    object->set_attribute(key.string(), value);
  }
  interpreter.keep(object);
  return Value(std::static_pointer_cast<Object>(object));
}

// next(), current and reset() over fixed items.
class Cycler : public Object {
 public:
  explicit Cycler(std::vector<Value> items) : state_(std::make_shared<State>(State{std::move(items), 0})) {}
  std::string type_name() const override { return "Cycler"; }
  std::optional<Value> attribute(std::string_view name) const override {
    if (name == "items") return make_tuple(state_->items);
    if (name == "pos") return Value(state_->position);
    if (name == "current") return state_->items[state_->position];
    if (name == "next")
      return make_function("next", [state = state_](Interpreter& interpreter, Args&) {
        if (state->items.empty()) interpreter.fail("the cycler has ended");
        return state->items[std::exchange(state->position, (state->position + 1) % state->items.size())];
      });
    if (name == "reset") return make_function("reset", [state = state_](Interpreter&, Args&) { return state->position = 0, Value(); });
    return std::nullopt;
  }
  void release() override { state_->items.clear(); }

 private:
  struct State {
    std::vector<Value> items;
    std::size_t position = 0;
  };
  std::shared_ptr<State> state_;
};

Value format_time(Interpreter& interpreter, Args& args) {
  const ArgReader reader(interpreter, "strftime_now", args, {"format"});
  const std::string format = reader.string(0);
  const std::time_t now = interpreter.now();
  std::tm local = {};
  localtime_r(&now, &local);
  std::string out(format.size() * 16 + 256, '\0');
  if (format.empty() || format.size() > 4096) return Value("");
  out.resize(std::strftime(out.data(), out.size(), format.c_str(), &local));
  return Value(std::move(out));
}

std::map<std::string, Value, std::less<>> make_globals() {
  std::map<std::string, Value, std::less<>> out;
  const auto add = [&out](const char* name, Function::Body body) { out.emplace(name, make_function(name, std::move(body))); };
  add("range", make_range);
  add("namespace", make_namespace);
  add("strftime_now", format_time);
  out.emplace("dict", Value(std::static_pointer_cast<Object>(std::make_shared<DictType>())));
  add("raise_exception", [](Interpreter& interpreter, Args& args) -> Value {
    interpreter.fail(ArgReader(interpreter, "raise_exception", args, {"message"}).required(0).str());
  });
  add("cycler", [](Interpreter& interpreter, Args& args) {
    if (args.positional.empty()) interpreter.fail("at least one item has to be provided");
    auto object = std::make_shared<Cycler>(args.positional);
    interpreter.keep(object);
    return Value(std::static_pointer_cast<Object>(std::move(object)));
  });
  add("joiner", [](Interpreter& interpreter, Args& args) {
    const ArgReader reader(interpreter, "joiner", args, {"sep"});
    return make_function("joiner", [separator = reader.value_or(0, Value(", ")), used = std::make_shared<bool>(false)](
                                       Interpreter&, Args&) { return std::exchange(*used, true) ? separator : Value(""); });
  });
  return out;
}

}  // namespace

void check_namespace_name(const Interpreter& interpreter, std::string_view name) {
  if (name.starts_with('_'))
    interpreter.fail("Chat templates cannot store underscore-prefixed attributes on a namespace, but got '" + std::string(name) + "'");
}

Value make_function(std::string name, Function::Body body, int depth) {
  return Value(std::static_pointer_cast<Object>(std::make_shared<Function>(std::move(name), std::move(body), depth)));
}

const Value* find_global(std::string_view name) {
  static const auto kGlobals = make_globals();  // immutable, shared by all renderings
  const auto entry = kGlobals.find(name);
  return entry == kGlobals.end() ? nullptr : &entry->second;
}

ArgReader::ArgReader(Interpreter& interpreter, std::string_view function, Args& args, std::initializer_list<std::string_view> names)
    : interpreter_(interpreter), function_(function), names_(names), values_(names.size(), nullptr) {
  if (args.positional.size() > names_.size())
    interpreter.fail(std::string(function) + "() takes at most " + std::to_string(names_.size()) + " arguments, got " +
                     std::to_string(args.positional.size()));
  for (std::size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.keyword) {
    const auto place = std::find(names_.begin(), names_.end(), name);
    if (place == names_.end()) interpreter.fail(std::string(function) + "() got an unexpected keyword argument '" + name + "'");
    values_[static_cast<std::size_t>(place - names_.begin())] = &value;
  }
}

const Value& ArgReader::required(std::size_t index) const {
  if (!has(index)) interpreter_.fail(std::string(function_) + "() is missing the argument '" + std::string(names_[index]) + "'");
  return *values_[index];
}

std::int64_t ArgReader::int_or(std::size_t index, std::int64_t fallback) const {
  if (!has(index) || values_[index]->is_none()) return fallback;
  const Value& value = *values_[index];
  if (value.is_undefined()) interpreter_.fail(value.undefined_message());
  if (!value.is_int() && !value.is_bool())
    interpreter_.fail(std::string(function_) + "(): argument '" + std::string(names_[index]) + "' must be an integer, not " +
                      value.type_name());
  return static_cast<std::int64_t>(std::clamp<Int>(value.integer(), -(Int{1} << 60), Int{1} << 60));
}

std::string ArgReader::string(std::size_t index) const {
  const Value& value = required(index);
  if (value.is_undefined()) interpreter_.fail(value.undefined_message());
  if (!value.is_string())
    interpreter_.fail(std::string(function_) + "(): argument '" + std::string(names_[index]) + "' must be str, not " + value.type_name());
  return value.string();
}

}  // namespace prl::text::jinja
