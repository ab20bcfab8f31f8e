#include <boost/json.hpp>

#include <limits>

#include "base/error.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

Value convert(const boost::json::value& node) {
  switch (node.kind()) {
    case boost::json::kind::null: return Value();
    case boost::json::kind::bool_: return Value(node.get_bool());
    case boost::json::kind::int64: return Value(static_cast<std::int64_t>(node.get_int64()));
    case boost::json::kind::uint64: return Value(static_cast<double>(node.get_uint64()));
    case boost::json::kind::double_: return Value(node.get_double());
    case boost::json::kind::string: return Value(std::string_view(node.get_string()));
    case boost::json::kind::array: {
      Value::List items;
      for (const boost::json::value& child : node.get_array()) items.push_back(convert(child));
      return Value(std::move(items));
    }
    case boost::json::kind::object: {
      Value table = Value::table();
      for (const auto& member : node.get_object()) table.set(std::string_view(member.key()), convert(member.value()));
      return table;
    }
  }
  return Value();
}

}  // namespace

Value parse_json(std::string_view text, const std::string& name) {
  boost::json::error_code error;
  const boost::json::value parsed = boost::json::parse(text, error);
  if (error) fail(ErrorCode::kInvalidArgument, "Invalid JSON in {}: {}", name, error.message());
  Value value = convert(parsed);
  value.set_origin(Origin{Origin::Kind::kFile, name, 0});
  return value;
}

}  // namespace prl::config
