#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace prl::config {

/// Where a value was written, for messages such as "from rl.toml:12".
struct Origin {
  enum class Kind { kDefault, kEnvironment, kFile, kFlag };
  Kind kind = Kind::kDefault;
  std::string where;  ///< file path, "--flag" or variable name; empty for a default
  int line = 0;       ///< 1-based line of a file, 0 when not known

  /// "configs/rl.toml:12", "flag --max-steps", "variable PRIME_MAX_STEPS" or "default".
  std::string describe() const;
};

struct Member;

/// A configuration tree: null, bool, integer, float, string, list or table. Tables keep their order and have unique keys.
/// Every node knows where it came from. A plain value type.
class Value {
 public:
  enum class Kind { kNull, kBool, kInt, kFloat, kString, kList, kTable };
  using List = std::vector<Value>;
  using Table = std::vector<Member>;

  Value();
  Value(bool value);
  Value(int value);
  Value(std::int64_t value);
  Value(double value);
  Value(const char* value);
  Value(std::string_view value);
  Value(std::string value);
  Value(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(Value) noexcept;
  ~Value();
  explicit Value(List items);
  static Value table();

  Kind kind() const noexcept;
  bool is_null() const noexcept { return kind() == Kind::kNull; }
  bool is_bool() const noexcept { return kind() == Kind::kBool; }
  bool is_int() const noexcept { return kind() == Kind::kInt; }
  bool is_float() const noexcept { return kind() == Kind::kFloat; }
  bool is_string() const noexcept { return kind() == Kind::kString; }
  bool is_list() const noexcept { return kind() == Kind::kList; }
  bool is_table() const noexcept { return kind() == Kind::kTable; }

  /// The held value; the kind must match (checked).
  bool as_bool() const;
  std::int64_t as_int() const;
  const std::string& as_string() const;
  const List& items() const;
  List& items();
  const Table& members() const;
  Table& members();

  /// The member of a table, or nullptr if there is none or this is no table.
  const Value* find(std::string_view key) const noexcept;
  Value* find(std::string_view key) noexcept;
  /// Sets or replaces a member of a table and returns it.
  Value& set(std::string_view key, Value value);
  /// Removes a member of a table; false if there was none.
  bool erase(std::string_view key);

  const Origin& origin() const noexcept { return origin_; }
  /// Marks this node and everything below as written at `origin`.
  void set_origin(const Origin& origin);

  /// Loose values were written as text (flags and environment variables): "3", "true", "1,2" and "[1,2]" are read as the
  /// type the key wants. Values of files are strict.
  bool is_loose() const noexcept { return is_loose_; }
  void set_loose(bool loose) noexcept { is_loose_ = loose; }

  /// An integer or a float (checked).
  friend double as_number(const Value& value);

 private:
  std::variant<std::monostate, bool, std::int64_t, double, std::string, List, Table> data_;
  Origin origin_;
  bool is_loose_ = false;
};

/// One key of a table.
struct Member {
  std::string key;
  Value value;
};

/// Walks "a.b.c" through tables, and "xs.0.id" through lists. nullptr where the path ends early.
const Value* find_path(const Value& tree, std::string_view dotted) noexcept;
Value* find_path(Value& tree, std::string_view dotted) noexcept;
/// Sets "a.b.c", making the tables on the way (a null, bool or scalar on the way is replaced by a table).
Value& set_path(Value& tree, std::string_view dotted, Value value);
/// Removes "a.b.c" and the tables on the way that are empty then; false if it was not there.
bool erase_path(Value& tree, std::string_view dotted);

/// Same kind and content, whatever the origins. An integer equals a float of the same value.
bool equals(const Value& a, const Value& b) noexcept;

/// Short form for messages: scalars as JSON, long ones cut, "a table with 3 keys", "a list of 2".
std::string to_display(const Value& value);
/// "an integer", "a table", ... for messages.
std::string_view kind_name(const Value& value) noexcept;

}  // namespace prl::config
