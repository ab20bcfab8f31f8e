#pragma once

#include "config/schema.hpp"

/// The bodies behind ops_of(). They make a handful of small functions for each of some two hundred types, which takes long to compile:
/// only sections.cpp, and tests with structs of their own, include this.
namespace prl::config {

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
TypeOps scalar_ops() {
  TypeOps ops{};
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
    ops.write = [](void* p, const Value& v) { cast<T>(p) = static_cast<T>(as_number(v)); };
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
constexpr Status status_of() {
  if constexpr (requires { T::kStatus; }) return T::kStatus;
  return {};
}

/// "LogConfig" for prl::config::LogConfig.
template <class T>
constexpr std::string_view short_name() {
  std::string_view name = __PRETTY_FUNCTION__;
  const std::size_t begin = name.find("T = ") + 4;
  name = name.substr(begin, name.find_first_of(";]", begin) - begin);
  return name.substr(name.rfind(':') + 1);
}

template <class T>
TypeOps struct_ops() {
  TypeOps ops{};
  ops.kind = TypeOps::Kind::kStruct;
  ops.create = []() -> void* { return new T(); };
  ops.destroy = [](void* p) { delete static_cast<T*>(p); };
  ops.fields = [](void* p, std::vector<Field>& out) {
    FieldSink sink(out);
    cast<T>(p).visit(sink);
  };
  ops.struct_name = short_name<T>();
  ops.status = status_of<T>();
  if constexpr (requires { T::kStatusBelow; }) ops.status_below = T::kStatusBelow;
  return ops;
}

template <class T>
TypeOps optional_ops() {
  TypeOps ops{};
  ops.kind = TypeOps::Kind::kOptional;
  ops.inner = &ops_of<typename T::value_type>();
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
        {A::kType, &ops_of<A>(), [](void* p) -> void* { return &cast<T>(p).template emplace<A>(); }, status_of<A>()}...};
    return list;
  }
  static TypeOps make_ops() {
    TypeOps ops{};
    ops.kind = TypeOps::Kind::kUnion;
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
