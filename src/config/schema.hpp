#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "config/value.hpp"

/// How a plain struct becomes a configuration section. A struct lists each field once:
///
///   template <class V> void visit(V& v) { v.field("lr", lr, "Peak learning rate", {.min = 0}); }
///
/// and from that one list come parsing, range checks, --help, dumps and the nearest-name errors. The visitor is FieldSink:
/// it turns each field into a Field with type-erased operations, so that the code using them is compiled once.
///
/// Field types: bool, integers, double, std::string, std::filesystem::path, enums with an enum_entries() overload,
/// IntOrWord, Value (anything), std::map<std::string, std::string>, structs with visit(), std::vector and std::optional of
/// these, and std::variant of structs with a kType name (a tagged union chosen by the key `type`).
namespace prl::config {

/// What a field's type cannot say.
struct Meta {
  std::string_view unit = {};                             ///< "tokens", "seconds", ...; shown in --help
  double min = -std::numeric_limits<double>::infinity();  ///< smallest allowed number (each item of a list)
  double max = std::numeric_limits<double>::infinity();   ///< largest allowed number
  bool is_open_min = false;                               ///< `min` itself is not allowed
  std::string_view words = {};                            ///< IntOrWord: allowed words, separated by '|'
};

/// A whole number or one of a few words, such as 4096 | "auto" | "disabled" (the words are in Meta::words).
struct IntOrWord {
  std::optional<std::int64_t> number;
  std::string word = "auto";
};

/// Name of one enum value. Enums used in configurations overload `std::span<const EnumEntry> enum_entries(E)`.
struct EnumEntry {
  int value;
  std::string_view name;
};

template <class E>
std::string_view enum_name(E value) {
  for (const EnumEntry& entry : enum_entries(value))
    if (entry.value == static_cast<int>(value)) return entry.name;
  return "?";
}

struct TypeOps;

/// One field of one live object.
struct Field {
  std::string_view name;
  std::string_view doc;
  Meta meta;
  const TypeOps* ops;
  void* target;
};

/// What the generic code can do with a field's type. Entries that do not apply to the kind are null.
struct TypeOps {
  enum class Kind { kBool, kInt, kFloat, kString, kPath, kEnum, kIntOrWord, kFree, kStringMap, kStruct, kOptional, kList, kUnion };
  struct Alternative {
    std::string_view type_name;
    const TypeOps* ops;
    void* (*emplace)(void* target);
  };
  Kind kind;
  const TypeOps* inner = nullptr;                            ///< element of an optional or a list
  Value (*read)(const void*) = nullptr;                      ///< scalars
  void (*write)(void*, const Value&) = nullptr;              ///< scalars; the value has been checked to have the right kind
  std::span<const EnumEntry> (*entries)() = nullptr;         ///< enums
  void (*fields)(void*, std::vector<Field>&) = nullptr;      ///< structs
  std::shared_ptr<void> (*make)() = nullptr;                 ///< a default-made object
  void* (*peek)(void*) = nullptr;                            ///< optionals (null if empty) and unions: the held object
  void* (*emplace)(void*) = nullptr;                         ///< optionals: a fresh held object
  void (*clear)(void*) = nullptr;                            ///< optionals and lists
  void* (*append)(void*) = nullptr;                          ///< lists: one more default-made item
  std::size_t (*size)(const void*) = nullptr;                ///< lists
  void* (*at)(void*, std::size_t) = nullptr;                 ///< lists
  std::size_t (*index)(const void*) = nullptr;               ///< unions: which alternative is held
  std::span<const Alternative> (*alternatives)() = nullptr;  ///< unions
};

template <class T>
const TypeOps& ops_of();

/// The visitor that structs are visited with.
class FieldSink {
 public:
  explicit FieldSink(std::vector<Field>& fields) : fields_(fields) {}
  template <class T>
  void field(std::string_view name, T& target, std::string_view doc, Meta meta = {}) {
    fields_.push_back(Field{name, doc, meta, &ops_of<T>(), &target});
  }

 private:
  std::vector<Field>& fields_;
};

/// The fields of a struct with visit(), in their order.
template <class T>
std::vector<Field> fields_of(T& object) {
  std::vector<Field> fields;
  FieldSink sink(fields);
  object.visit(sink);
  return fields;
}

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <class T>
inline constexpr bool is_vector = false;
template <class T>
inline constexpr bool is_vector<std::vector<T>> = true;
template <class T>
inline constexpr bool is_variant = false;
template <class... T>
inline constexpr bool is_variant<std::variant<T...>> = true;

Value read_string_map(const std::map<std::string, std::string>& map);
void write_string_map(std::map<std::string, std::string>& map, const Value& value);
Value read_int_or_word(const IntOrWord& value);
void write_int_or_word(IntOrWord& target, const Value& value);

template <class T>
T& cast(void* p) {
  return *static_cast<T*>(p);
}
template <class T>
const T& cast(const void* p) {
  return *static_cast<const T*>(p);
}
template <class T>
std::shared_ptr<void> make() {
  return std::make_shared<T>();
}

template <class T>
TypeOps scalar_ops() {
  TypeOps ops{};
  ops.make = &make<T>;
  if constexpr (std::is_same_v<T, bool>) {
    ops.kind = TypeOps::Kind::kBool;
    ops.read = [](const void* p) { return Value(cast<T>(p)); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = v.as_bool(); };
  } else if constexpr (std::is_integral_v<T>) {
    ops.kind = TypeOps::Kind::kInt;
    ops.read = [](const void* p) { return Value(static_cast<std::int64_t>(cast<T>(p))); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = static_cast<T>(v.as_int()); };
  } else if constexpr (std::is_floating_point_v<T>) {
    ops.kind = TypeOps::Kind::kFloat;
    ops.read = [](const void* p) { return Value(static_cast<double>(cast<T>(p))); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = static_cast<T>(v.as_number()); };
  } else if constexpr (std::is_same_v<T, std::string>) {
    ops.kind = TypeOps::Kind::kString;
    ops.read = [](const void* p) { return Value(cast<T>(p)); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = v.as_string(); };
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    ops.kind = TypeOps::Kind::kPath;
    ops.read = [](const void* p) { return Value(cast<T>(p).string()); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = v.as_string(); };
  } else if constexpr (std::is_enum_v<T>) {
    ops.kind = TypeOps::Kind::kEnum;
    ops.entries = [] { return enum_entries(T{}); };
    ops.read = [](const void* p) { return Value(enum_name(cast<T>(p))); };
    ops.write = [](void* p, const Value& v) {
      for (const EnumEntry& entry : enum_entries(T{}))
        if (entry.name == v.as_string()) cast<T>(p) = static_cast<T>(entry.value);
    };
  } else if constexpr (std::is_same_v<T, IntOrWord>) {
    ops.kind = TypeOps::Kind::kIntOrWord;
    ops.read = [](const void* p) { return read_int_or_word(cast<T>(p)); };
    ops.write = [](void* p, const Value& v) { write_int_or_word(cast<T>(p), v); };
  } else if constexpr (std::is_same_v<T, Value>) {
    ops.kind = TypeOps::Kind::kFree;
    ops.read = [](const void* p) { return cast<T>(p); };
    ops.write = [](void* p, const Value& v) { cast<T>(p) = v; };
  } else {
    static_assert(std::is_same_v<T, std::map<std::string, std::string>>, "not a configuration type");
    ops.kind = TypeOps::Kind::kStringMap;
    ops.read = [](const void* p) { return read_string_map(cast<T>(p)); };
    ops.write = [](void* p, const Value& v) { write_string_map(cast<T>(p), v); };
  }
  return ops;
}

template <class T>
TypeOps struct_ops() {
  TypeOps ops{};
  ops.kind = TypeOps::Kind::kStruct;
  ops.make = &make<T>;
  ops.fields = [](void* p, std::vector<Field>& out) {
    FieldSink sink(out);
    cast<T>(p).visit(sink);
  };
  return ops;
}

template <class T>
TypeOps optional_ops() {
  TypeOps ops{};
  ops.kind = TypeOps::Kind::kOptional;
  ops.inner = &ops_of<typename T::value_type>();
  ops.make = &make<T>;
  ops.peek = [](void* p) -> void* { return cast<T>(p) ? &*cast<T>(p) : nullptr; };
  ops.emplace = [](void* p) -> void* { return &cast<T>(p).emplace(); };
  ops.clear = [](void* p) { cast<T>(p).reset(); };
  return ops;
}

template <class T>
TypeOps list_ops() {
  static_assert(!std::is_same_v<T, std::vector<bool>>, "lists of bool are not supported");
  TypeOps ops{};
  ops.kind = TypeOps::Kind::kList;
  ops.inner = &ops_of<typename T::value_type>();
  ops.make = &make<T>;
  ops.clear = [](void* p) { cast<T>(p).clear(); };
  ops.append = [](void* p) -> void* { return &cast<T>(p).emplace_back(); };
  ops.size = [](const void* p) { return cast<T>(p).size(); };
  ops.at = [](void* p, std::size_t i) -> void* { return &cast<T>(p)[i]; };
  return ops;
}

template <class T>
struct UnionOps;
template <class... A>
struct UnionOps<std::variant<A...>> {
  using T = std::variant<A...>;
  static std::span<const TypeOps::Alternative> alternatives() {
    static const TypeOps::Alternative list[] = {
        {A::kType, &ops_of<A>(), [](void* p) -> void* { return &cast<T>(p).template emplace<A>(); }}...};
    return list;
  }
  static TypeOps make_ops() {
    TypeOps ops{};
    ops.kind = TypeOps::Kind::kUnion;
    ops.make = &make<T>;
    ops.peek = [](void* p) { return std::visit([](auto& held) -> void* { return &held; }, cast<T>(p)); };
    ops.index = [](const void* p) { return cast<T>(p).index(); };
    ops.alternatives = &alternatives;
    return ops;
  }
};

}  // namespace detail

template <class T>
const TypeOps& ops_of() {
  static const TypeOps ops = [] {
    if constexpr (detail::is_optional<T>) {
      return detail::optional_ops<T>();
    } else if constexpr (detail::is_vector<T>) {
      return detail::list_ops<T>();
    } else if constexpr (detail::is_variant<T>) {
      return detail::UnionOps<T>::make_ops();
    } else if constexpr (requires(T & t, FieldSink & s) { t.visit(s); }) {
      return detail::struct_ops<T>();
    } else {
      return detail::scalar_ops<T>();
    }
  }();
  return ops;
}

}  // namespace prl::config
