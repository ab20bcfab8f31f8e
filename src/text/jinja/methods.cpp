#include <algorithm>
#include <array>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// Methods of str, dict and list. Those that change a list or dict are refused, as the immutable sandbox does.
namespace prl::text::jinja {
namespace {

using Method = Value (*)(Interpreter&, const Value& self, Args&);
struct MethodEntry {
  std::string_view name;
  Method method;
};

constexpr std::size_t kMaxPadding = 1'000'000;

std::optional<std::string> optional_string(const ArgReader& reader, std::size_t index) {
  if (!reader.has(index) || reader.value_or(index, Value()).is_none()) return std::nullopt;
  return reader.string(index);
}

Value strings(Interpreter& interpreter, std::vector<std::string> parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  interpreter.charge_bytes(parts.size() * 2 * sizeof(Value));
  for (std::string& part : parts) items.emplace_back(std::move(part));
  return Value::list(std::move(items));
}

template <bool kLeft, bool kRight>
Value strip_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "strip", args, {"chars"});
  return Value(strip(self.string(), optional_string(reader, 0), kLeft, kRight));
}

template <bool kFromRight>
Value split_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "split", args, {"sep", "maxsplit"});
  const std::optional<std::string> separator = optional_string(reader, 0);
  if (separator && separator->empty()) i.fail("empty separator");
  i.charge_bytes(self.string().size() * 2);
  const std::int64_t limit = reader.int_or(1, -1);
  return strings(i, kFromRight ? split_from_right(self.string(), separator, limit) : split(self.string(), separator, limit));
}

// The part of the text that start and end arguments select, with its first byte.
std::pair<std::string_view, std::size_t> window(const Value& self, const ArgReader& reader) {
  const std::string& text = self.string();
  const auto length = static_cast<std::int64_t>(count_code_points(text));
  const auto clip = [length](std::int64_t index) { return std::clamp<std::int64_t>(index < 0 ? index + length : index, 0, length); };
  const std::int64_t begin = clip(reader.int_or(1, 0)), end = clip(reader.int_or(2, length));
  const std::size_t first = byte_of_code_point(text, static_cast<std::size_t>(begin));
  const std::size_t last = byte_of_code_point(text, static_cast<std::size_t>(std::max(begin, end)));
  return {std::string_view(text).substr(first, last - first), first};
}

template <bool kAtEnd>
Value affix_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, kAtEnd ? "endswith" : "startswith", args, {"prefix", "start", "end"});
  const std::string_view text = window(self, reader).first;
  const auto matches = [&](const Value& affix) {
    if (!affix.is_string()) i.fail("startswith and endswith take str or a tuple of str, not " + affix.type_name());
    return kAtEnd ? text.ends_with(affix.string()) : text.starts_with(affix.string());
  };
  const Value& affix = reader.required(0);
  if (!affix.is_list()) return Value(matches(affix));
  return Value(std::any_of(affix.list().items.begin(), affix.list().items.end(), matches));
}

template <bool kFromRight, bool kMustExist>
Value find_method_of_str(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "find", args, {"sub", "start", "end"});
  const auto [text, first] = window(self, reader);
  const std::string needle = reader.string(0);
  const std::size_t hit = kFromRight ? text.rfind(needle) : text.find(needle);
  if (hit == std::string_view::npos) {
    if (kMustExist) i.fail("substring not found");
    return Value(-1);
  }
  return Value(count_code_points(std::string_view(self.string()).substr(0, first + hit)));
}

template <bool kFromRight>
Value partition_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "partition", args, {"sep"});
  const std::string separator = reader.string(0);
  const std::string& text = self.string();
  if (separator.empty()) i.fail("empty separator");
  const std::size_t hit = kFromRight ? text.rfind(separator) : text.find(separator);
  if (hit == std::string::npos) return kFromRight ? Value::tuple({"", "", self}) : Value::tuple({self, "", ""});
  return Value::tuple({text.substr(0, hit), separator, text.substr(hit + separator.size())});
}

template <Align kAlign>
Value pad_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "justify", args, {"width", "fillchar"});
  const auto width = static_cast<std::size_t>(std::max<std::int64_t>(reader.int_or(0, 0), 0));
  if (width > kMaxPadding) i.fail("the width is too large");
  i.charge_bytes(width);
  return Value(pad(self.string(), width, reader.has(1) ? reader.string(1) : " ", kAlign));
}

enum class CharClass : std::uint8_t { kAlpha, kDigit, kAlnum, kSpace };

template <CharClass kClass>
Value class_method(Interpreter&, const Value& self, Args&) {
  const std::string& text = self.string();
  if (text.empty()) return Value(false);
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    const bool is_digit = c >= '0' && c <= '9';
    const bool is_alpha = c < 0x80 ? (c | 0x20) >= 'a' && (c | 0x20) <= 'z' : is_word_character(c);
    const bool holds = kClass == CharClass::kAlpha   ? is_alpha
                       : kClass == CharClass::kDigit ? is_digit
                       : kClass == CharClass::kAlnum ? is_alpha || is_digit
                                                     : is_python_space(c);
    if (!holds) return Value(false);
  }
  return Value(true);
}

Value join_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "join", args, {"iterable"});
  std::string out;
  bool is_first = true;
  for (const Value& item : i.iterate(reader.required(0))) {
    if (!item.is_string()) i.fail("sequence item: expected str instance, " + item.type_name() + " found");
    if (!is_first) out += self.string();
    is_first = false;
    i.charge_bytes(item.string().size() + self.string().size());
    out += item.string();
  }
  return Value(std::move(out));
}

Value replace_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "replace", args, {"old", "new", "count"});
  const std::string from = reader.string(0), to = reader.string(1);
  i.charge_bytes(self.string().size() + count(self.string(), from) * to.size());
  return Value(replace(self.string(), from, to, reader.int_or(2, -1)));
}

// str.format with positional and named fields and no format specification.
Value format_method(Interpreter& i, const Value& self, Args& args) {
  const std::string& text = self.string();
  std::string out;
  std::size_t next_index = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c != '{' && c != '}') {
      out.push_back(c);
      continue;
    }
    if (at + 1 < text.size() && text[at + 1] == c) {
      out.push_back(c);
      ++at;
      continue;
    }
    const std::size_t close = text.find('}', at);
    if (c == '}' || close == std::string::npos) i.fail("single '{' or '}' encountered in format string");
    std::string field = text.substr(at + 1, close - at - 1);
    if (field.find_first_of(":!.[") != std::string::npos)
      i.fail("str.format supports plain {} and {name} fields only, not '{" + field + "}'");
    at = close;
    const Value* value = nullptr;
    if (field.empty() || field.find_first_not_of("0123456789") == std::string::npos) {
      const std::size_t index = field.empty() ? next_index++ : static_cast<std::size_t>(std::stoul(field.substr(0, 6)));
      if (index < args.positional.size()) value = &args.positional[index];
    } else {
      for (const auto& [name, argument] : args.keyword)
        if (name == field) value = &argument;
    }
    if (value == nullptr) i.fail("str.format has no value for the field '{" + field + "}'");
    out += value->str();
  }
  i.charge_bytes(out.size());
  return Value(std::move(out));
}

Value title_method(Interpreter&, const Value& self, Args&) { return Value(to_title(self.string())); }

Value swapcase_method(Interpreter&, const Value& self, Args&) {
  std::string out;
  for (std::size_t i = 0; i < self.string().size();) {
    const std::size_t begin = i;
    next_code_point(self.string(), i);
    const std::string_view c = std::string_view(self.string()).substr(begin, i - begin);
    const std::string upper = to_upper(c);
    out += upper != c ? upper : to_lower(c);
  }
  return Value(std::move(out));
}

constexpr MethodEntry kStringMethods[] = {
    {"strip", strip_method<true, true>},
    {"lstrip", strip_method<true, false>},
    {"rstrip", strip_method<false, true>},
    {"split", split_method<false>},
    {"rsplit", split_method<true>},
    {"splitlines",
     [](Interpreter& i, const Value& self, Args& args) {
       return strings(i, split_lines(self.string(), ArgReader(i, "splitlines", args, {"keepends"}).bool_or(0, false)));
     }},
    {"startswith", affix_method<false>},
    {"endswith", affix_method<true>},
    {"find", find_method_of_str<false, false>},
    {"rfind", find_method_of_str<true, false>},
    {"index", find_method_of_str<false, true>},
    {"rindex", find_method_of_str<true, true>},
    {"count",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "count", args, {"sub", "start", "end"});
       return Value(count(window(self, reader).first, reader.string(0)));
     }},
    {"upper", [](Interpreter&, const Value& self, Args&) { return Value(to_upper(self.string())); }},
    {"lower", [](Interpreter&, const Value& self, Args&) { return Value(to_lower(self.string())); }},
    {"casefold", [](Interpreter&, const Value& self, Args&) { return Value(replace(to_lower(self.string()), "\xC3\x9F", "ss", -1)); }},
    {"title", title_method},
    {"capitalize", [](Interpreter&, const Value& self, Args&) { return Value(capitalize(self.string())); }},
    {"swapcase", swapcase_method},
    {"join", join_method},
    {"replace", replace_method},
    {"format", format_method},
    {"partition", partition_method<false>},
    {"rpartition", partition_method<true>},
    {"ljust", pad_method<Align::kLeft>},
    {"rjust", pad_method<Align::kRight>},
    {"center", pad_method<Align::kCenter>},
    {"zfill",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "zfill", args, {"width"});
       const auto width = static_cast<std::size_t>(std::clamp<std::int64_t>(reader.int_or(0, 0), 0, kMaxPadding));
       const std::string& text = self.string();
       const bool has_sign = text.starts_with('-') || text.starts_with('+');
       return Value(text.substr(0, has_sign) +
                    pad(text.substr(has_sign), width - std::min<std::size_t>(width, has_sign), "0", Align::kRight));
     }},
    {"removeprefix",
     [](Interpreter& i, const Value& self, Args& args) {
       const std::string affix = ArgReader(i, "removeprefix", args, {"prefix"}).string(0);
       return self.string().starts_with(affix) ? Value(self.string().substr(affix.size())) : self;
     }},
    {"removesuffix",
     [](Interpreter& i, const Value& self, Args& args) {
       const std::string affix = ArgReader(i, "removesuffix", args, {"suffix"}).string(0);
       return self.string().ends_with(affix) ? Value(self.string().substr(0, self.string().size() - affix.size())) : self;
     }},
    {"isalpha", class_method<CharClass::kAlpha>},
    {"isdigit", class_method<CharClass::kDigit>},
    {"isdecimal", class_method<CharClass::kDigit>},
    {"isnumeric", class_method<CharClass::kDigit>},
    {"isalnum", class_method<CharClass::kAlnum>},
    {"isspace", class_method<CharClass::kSpace>},
    {"isupper", [](Interpreter& i, const Value& self, Args& args) { return Value(find_test("upper")(i, self, args)); }},
    {"islower", [](Interpreter& i, const Value& self, Args& args) { return Value(find_test("lower")(i, self, args)); }},
};

constexpr MethodEntry kDictMethods[] = {
    {"get",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "get", args, {"key", "default"});
       const Value* value = self.dict().find(reader.required(0));
       return value != nullptr ? *value : reader.value_or(1, Value());
     }},
    {"items",
     [](Interpreter& i, const Value& self, Args&) {
       std::vector<Value> items;
       i.charge_bytes(self.dict().entries.size() * 4 * sizeof(Value));
       for (const auto& [key, value] : self.dict().entries) items.push_back(Value::tuple({key, value}));
       return Value::list(std::move(items), ListFlavor::kItems);
     }},
    {"keys", [](Interpreter& i, const Value& self, Args&) { return Value::list(i.iterate(self), ListFlavor::kKeys); }},
    {"values",
     [](Interpreter& i, const Value& self, Args&) {
       std::vector<Value> items;
       i.charge_bytes(self.dict().entries.size() * sizeof(Value));
       for (const auto& entry : self.dict().entries) items.push_back(entry.second);
       return Value::list(std::move(items), ListFlavor::kValues);
     }},
    {"copy", [](Interpreter&, const Value& self, Args&) { return self; }},
};

constexpr MethodEntry kListMethods[] = {
    {"index",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "index", args, {"value"});
       const std::vector<Value>& items = self.list().items;
       const auto hit = std::find_if(items.begin(), items.end(), [&](const Value& v) { return v.equals(reader.required(0)); });
       if (hit == items.end()) i.fail(reader.required(0).repr() + " is not in list");
       return Value(static_cast<std::size_t>(hit - items.begin()));
     }},
    {"count",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "count", args, {"value"});
       const std::vector<Value>& items = self.list().items;
       return Value(static_cast<std::size_t>(
           std::count_if(items.begin(), items.end(), [&](const Value& v) { return v.equals(reader.required(0)); })));
     }},
    {"copy", [](Interpreter&, const Value& self, Args&) { return self; }},
};

constexpr std::array<std::string_view, 9> kListMutators = {"append", "clear",   "extend", "insert",     "pop",
                                                           "remove", "reverse", "sort",   "__setitem__"};
constexpr std::array<std::string_view, 5> kDictMutators = {"clear", "pop", "popitem", "setdefault", "update"};

template <std::size_t kCount>
const MethodEntry* search(const MethodEntry (&entries)[kCount], std::string_view name) {
  const MethodEntry* entry = std::find_if(std::begin(entries), std::end(entries), [name](const MethodEntry& e) { return e.name == name; });
  return entry == std::end(entries) ? nullptr : entry;
}

}  // namespace

std::optional<Value> find_method(const Value& object, std::string_view name) {
  const MethodEntry* entry = nullptr;
  bool is_mutator = false;
  if (object.is_string()) {
    entry = search(kStringMethods, name);
  } else if (object.is_dict()) {
    entry = search(kDictMethods, name);
    is_mutator = std::find(kDictMutators.begin(), kDictMutators.end(), name) != kDictMutators.end();
  } else if (object.is_list()) {
    entry = search(kListMethods, name);
    is_mutator =
        object.list().flavor == ListFlavor::kList && std::find(kListMutators.begin(), kListMutators.end(), name) != kListMutators.end();
  }
  if (is_mutator)
    return Value::undefined("access to attribute '" + std::string(name) + "' of '" + object.type_name() + "' object is unsafe.");
  if (entry == nullptr) return std::nullopt;
  return make_function(
      std::string(name),
      [method = entry->method, object](Interpreter& interpreter, Args& args) { return method(interpreter, object, args); },
      object.depth() + 1);
}

}  // namespace prl::text::jinja
