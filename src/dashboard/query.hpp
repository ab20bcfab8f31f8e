#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_message.hpp"

namespace prl::dashboard {

/// Typed access to the parameters of a request. Each getter throws a 400 that names the parameter where its value is no such thing or
/// out of range.
class Query {
 public:
  explicit Query(const net::Fields& fields) : fields_(fields) {}
  std::optional<std::string> text(std::string_view name, std::size_t max_bytes = 1024) const;
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t min, std::int64_t max) const;
  std::optional<double> number(std::string_view name) const;
  std::optional<bool> flag(std::string_view name) const;
  /// All values of a parameter that may come several times.
  std::vector<std::string> all(std::string_view name, std::size_t max_count, std::size_t max_bytes = 1024) const;

 private:
  const net::Fields& fields_;
};

/// ", found "value"" for messages, cut and escaped.
std::string found_text(std::string_view value);

/// Writers of JSON text: numbers that are not finite become null, text is escaped and ill-formed UTF-8 replaced.
void put(std::string& out, double value);
void put(std::string& out, std::int64_t value);
void put(std::string& out, std::string_view text);
/// "key":
void put_key(std::string& out, std::string_view key);
void put_list(std::string& out, const std::vector<double>& values);
void put_list(std::string& out, const std::vector<std::int64_t>& values);

}  // namespace prl::dashboard
