#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace prl::env {

/// Reads the `args` of one environment, key by key. Error{kInvalidArgument} naming environment, key, value and range.
class Args {
 public:
  Args(std::string env_id, boost::json::object values);

  std::int64_t integer(const std::string& key, std::int64_t fallback, std::int64_t min, std::int64_t max);
  double number(const std::string& key, double fallback, double min, double max);
  bool boolean(const std::string& key, bool fallback);
  std::string string(const std::string& key, const std::string& fallback);
  /// Null stands for "none"; a missing key gives the fallback.
  std::optional<std::string> optional_string(const std::string& key, const std::optional<std::string>& fallback);
  /// One of `choices`.
  std::string choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& choices);
  bool contains(const std::string& key) const { return values_.contains(key); }
  const boost::json::object& values() const noexcept { return values_; }
  /// A key that means nothing here and is no mistake.
  void ignore(const std::string& key) { known_.push_back(key); }
  /// Call last: any key nobody asked for is an error that lists the known ones.
  void finish() const;

 private:
  const boost::json::value* take(const std::string& key);
  [[noreturn]] void wrong(const std::string& key, const boost::json::value& found, const std::string& wanted) const;

  std::string env_id_;
  boost::json::object values_;
  std::vector<std::string> known_;
};

}  // namespace prl::env
