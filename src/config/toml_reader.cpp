// The only file that includes toml++: it costs several seconds to compile.
#undef NDEBUG  // toml++ turns its assertions into promises to the optimiser under NDEBUG

#include <stdexcept>

namespace prl::config {
/// toml++ 3.3 checks some properties of its input (an invalid key in a table header, for one) with assertions only. Here
/// they are errors of the file, in every build.
[[noreturn]] inline void fail_toml_assertion(const char* expression) { throw std::invalid_argument(expression); }
}  // namespace prl::config
#define TOML_ASSERT(expression) ((expression) ? void() : ::prl::config::fail_toml_assertion(#expression))
#include <toml++/toml.h>

#include <sstream>

#include "base/error.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

Value convert(const toml::node& node, const std::string& name) {
  Value value;
  if (const toml::table* table = node.as_table()) {
    value = Value::table();
    for (const auto& [key, child] : *table) value.set(std::string_view(key.str()), convert(child, name));
  } else if (const toml::array* array = node.as_array()) {
    Value::List items;
    items.reserve(array->size());
    for (const toml::node& child : *array) items.push_back(convert(child, name));
    value = Value::list(std::move(items));
  } else if (const auto* text = node.as_string()) {
    value = Value(text->get());
  } else if (const auto* integer = node.as_integer()) {
    value = Value(integer->get());
  } else if (const auto* number = node.as_floating_point()) {
    value = Value(number->get());
  } else if (const auto* boolean = node.as_boolean()) {
    value = Value(boolean->get());
  } else if (const auto* date = node.as_date()) {
    value = Value(printed(date->get()));
  } else if (const auto* time = node.as_time()) {
    value = Value(printed(time->get()));
  } else if (const auto* moment = node.as_date_time()) {
    value = Value(printed(moment->get()));
  }
  // Children already carry their own lines, so only this node is marked.
  Value marked = std::move(value);
  const Origin origin{Origin::Kind::kFile, name, static_cast<int>(node.source().begin.line)};
  if (marked.is_table() || marked.is_list()) {
    Value container = marked.is_table() ? Value::table() : Value::list();
    container.set_origin(origin);
    if (marked.is_table()) {
      container.members() = std::move(marked.members());
    } else {
      container.items() = std::move(marked.items());
    }
    return container;
  }
  marked.set_origin(origin);
  return marked;
}

}  // namespace

Value parse_toml(std::string_view text, const std::string& name) {
  try {
    return convert(toml::parse(text, name), name);
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::kInvalidArgument, "Invalid TOML in {}:{}: {}", name, error.source().begin.line, error.description());
  } catch (const std::invalid_argument& error) {
    fail(ErrorCode::kInvalidArgument, "Invalid TOML in {}: the parser gave up at {}", name, error.what());
  }
}

}  // namespace prl::config
