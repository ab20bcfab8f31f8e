#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::nn {

/// Typed access to the keys of a config.json object. JSON null counts as absent.
/// Errors    Error{kCorrupt} names the file, the key, what was wanted and what was found.
class ConfigReader {
 public:
  ConfigReader(std::string subject, const boost::json::object& object) : subject_(std::move(subject)), object_(&object) {}

  bool has(std::string_view key) const { return get(key) != nullptr; }
  /// Whether the key is there, be it with null.
  bool names(std::string_view key) const { return object_->contains(boost::json::string_view(key.data(), key.size())); }
  bool empty() const noexcept { return object_->empty(); }
  /// The keys whose values are objects.
  std::vector<std::string> keys_of_objects() const;
  /// In [min, max]; absent: `fallback`, or an error where there is none.
  std::int64_t integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t min, std::int64_t max) const;
  double number(std::string_view key, std::optional<double> fallback, double min, double max) const;
  bool boolean(std::string_view key, bool fallback) const;
  std::string string(std::string_view key, std::string_view fallback) const;
  /// One id or a list of ids, or of what `wanted` says; empty if absent.
  std::vector<std::int32_t> ids(std::string_view key, std::string_view wanted = "a token id or a list of them") const;
  /// A list of numbers in [min, max], which may be infinity; absent: an error.
  std::vector<double> numbers(std::string_view key, double min, double max) const;
  /// nullopt if absent.
  std::optional<ConfigReader> object(std::string_view key) const;
  std::vector<std::string> strings(std::string_view key) const;

  /// Error{kNotImplemented} that names key and value unless `value` is `wanted`.
  void require_string(std::string_view key, std::string_view fallback, std::string_view wanted) const;
  const std::string& subject() const noexcept { return subject_; }

 private:
  const boost::json::value* get(std::string_view key) const;
  [[noreturn]] void bad(std::string_view key, std::string_view wanted, const boost::json::value* found) const;
  std::string subject_;
  const boost::json::object* object_;  ///< the caller keeps it
};

/// JSON text with two spaces of indentation and a final newline, as Hugging Face writes it.
std::string pretty_json(const boost::json::value& value);

}  // namespace prl::nn
