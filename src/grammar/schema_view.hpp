#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace prl::grammar {

/// Typed access to the keywords of one schema object. Errors are Error{kInvalidArgument} that begin with the place.
/// Borrows the schema.
class SchemaView {
 public:
  SchemaView(const boost::json::value& schema, std::string place);

  const std::string& place() const { return place_; }
  std::string place(std::string_view keyword) const;
  const boost::json::value* find(std::string_view keyword) const;
  std::optional<std::string> string(std::string_view keyword) const;
  std::optional<double> number(std::string_view keyword) const;
  /// A whole number in [0, max].
  std::optional<std::int64_t> count(std::string_view keyword, std::int64_t max) const;
  /// Null when absent; an empty array is an error.
  const boost::json::array* array(std::string_view keyword) const;
  const boost::json::object* object(std::string_view keyword) const;
  /// Names of `type`, else those that the other keywords speak of, else all six. "integer" is left out beside "number".
  std::vector<std::string> types() const;

  /// Refuses keywords that restrict values and are not supported.
  void check_keywords() const;
  /// Refuses other restricting keywords beside `keyword`, but for `allowed`.
  void check_alone(std::string_view keyword, std::initializer_list<std::string_view> allowed = {}) const;
  /// Whether `keyword` is the only one that restricts values.
  bool is_alone(std::string_view keyword) const;
  [[noreturn]] void refuse(std::string_view keyword, std::string_view why) const;

 private:
  const boost::json::object* object_;
  std::string place_;
};

/// The members of an object schema. Borrows the schema.
struct Members {
  explicit Members(const SchemaView& view);

  std::vector<std::pair<std::string, const boost::json::value*>> properties;  ///< in order; names only required come last
  std::set<std::string> required;
  const boost::json::value* additional = nullptr;  ///< schema of other members; null: there are none
  bool has_additional_keyword = false;
};

bool has_type(const boost::json::value& value, std::string_view type);
/// The schema that "#/..." points to. Other documents are refused.
const boost::json::value& resolve_ref(const boost::json::value& root, const boost::json::value& ref, const std::string& place);
/// Refuses branches of oneOf of which two might match one value: they must differ in type, in const or enum, or in the const
/// or enum of a member that both require.
void check_exclusive(const boost::json::value& root, const boost::json::array& branches, const std::string& place);

}  // namespace prl::grammar
