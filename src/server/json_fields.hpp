#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::server {

/// The upper bound of integer() where a field has none.
inline constexpr std::int64_t kAnyInt = std::numeric_limits<std::int64_t>::max();

/// Typed access to the members of a request object. A member that is absent or null is nullopt or nullptr; one of the wrong
/// type or out of range is a 400 (net::HttpError) that names it. Unknown members are ignored by never asking for them.
class JsonFields {
 public:
  /// `prefix` is put before names in errors: "sampling_params." for example. Borrows `object`.
  explicit JsonFields(const boost::json::object& object, std::string prefix = {}) : object_(&object), prefix_(std::move(prefix)) {}

  const boost::json::value* find(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }
  std::optional<bool> boolean(std::string_view name) const;
  /// Whole numbers written as 3.0 count as integers.
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t min, std::int64_t max) const;
  std::optional<double> number(std::string_view name, double min, double max) const;
  std::optional<std::string> string(std::string_view name) const;
  const boost::json::object* object(std::string_view name) const;
  const boost::json::array* array(std::string_view name) const;
  /// A list of token ids in [0, vocab_size).
  std::optional<std::vector<std::int32_t>> token_ids(std::string_view name, std::int64_t vocab_size) const;
  /// One string, or a list of at most `max_items`.
  std::optional<std::vector<std::string>> strings(std::string_view name, std::size_t max_items) const;
  std::string full_name(std::string_view name) const { return prefix_ + std::string(name); }

  /// Throws the 400: "<name>: wanted <wanted>, found <value>".
  [[noreturn]] void fail_type(std::string_view name, std::string_view wanted, const boost::json::value& found) const;

 private:
  const boost::json::object* object_;
  std::string prefix_;
};

/// Ids of one JSON array; `name` is used in errors.
std::vector<std::int32_t> read_token_ids(const boost::json::array& array, const std::string& name, std::int64_t vocab_size);

/// Parses a request body: a JSON object, with the members of an `extra_body` object merged in below the top-level ones. In
/// members that go on to a template or a schema, numbers beyond doubles keep their text (text::LargeNumbers::kKeepInRequest).
boost::json::object parse_body(std::string_view body);

}  // namespace prl::server
