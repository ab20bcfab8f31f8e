#include <algorithm>
#include <array>
#include <cmath>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/markup.hpp"
#include "text/jinja/operators.hpp"
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

/// Text of the same kind as `self`: what a method makes of a Markup is one.
Value same_kind(const Value& self, std::string text) { return make_text(std::move(text), self.is_markup()); }

/// What a method puts into `self`: escaped if that is a Markup and this is not.
std::string inserted(const Value& self, const Value& part) {
  return self.is_markup() && !part.is_markup() ? escape_html(part.string()) : part.string();
}

Value strings(Interpreter& interpreter, const Value& self, std::vector<std::string> parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  interpreter.charge_bytes(parts.size() * 2 * sizeof(Value));
  for (std::string& part : parts) items.push_back(same_kind(self, std::move(part)));
  return make_list(std::move(items));
}

template <bool kLeft, bool kRight>
Value strip_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "strip", args, {"chars"});
  return same_kind(self, strip(self.string(), optional_string(reader, 0), kLeft, kRight));
}

template <bool kFromRight>
Value split_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "split", args, {"sep", "maxsplit"});
  const std::optional<std::string> separator = optional_string(reader, 0);
  if (separator && separator->empty()) i.fail("empty separator");
  i.charge_bytes(self.string().size() * 2);
  const std::int64_t limit = reader.int_or(1, -1);
  return strings(i, self, kFromRight ? split_from_right(self.string(), separator, limit) : split(self.string(), separator, limit));
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
  const auto part = [&](std::string piece) { return same_kind(self, std::move(piece)); };
  if (hit == std::string::npos) return kFromRight ? make_tuple({part(""), part(""), self}) : make_tuple({self, part(""), part("")});
  return make_tuple({part(text.substr(0, hit)), part(separator), part(text.substr(hit + separator.size()))});
}

template <Align kAlign>
Value pad_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "justify", args, {"width", "fillchar"});
  const auto width = static_cast<std::size_t>(std::max<std::int64_t>(reader.int_or(0, 0), 0));
  if (width > kMaxPadding) i.fail("the width is too large");
  i.charge_bytes(width);
  reader.required(0);
  const std::string fill = reader.has(1) ? (reader.string(1), inserted(self, reader.required(1))) : " ";
  if (count_code_points(fill) != 1) i.fail("The fill character must be exactly one character long");
  return same_kind(self, pad(self.string(), width, fill, kAlign));
}

enum class CharClass : std::uint8_t { kAlpha, kDecimal, kDigit, kNumeric, kAlnum, kSpace, kPrintable, kAscii };

template <CharClass kClass>
Value class_method(Interpreter& interpreter, const Value& self, Args& args) {
  const ArgReader reader(interpreter, "this method", args, {});
  const std::string& text = self.string();
  if (text.empty()) return Value(kClass == CharClass::kPrintable || kClass == CharClass::kAscii);
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    bool holds = false;
    switch (kClass) {
      case CharClass::kAlpha: holds = is_alpha(c); break;
      case CharClass::kDecimal: holds = decimal_value(c) >= 0; break;
      case CharClass::kDigit: holds = is_digit(c); break;
      case CharClass::kNumeric: holds = is_numeric(c); break;
      case CharClass::kAlnum: holds = is_alpha(c) || is_numeric(c); break;
      case CharClass::kSpace: holds = is_python_space(c); break;
      case CharClass::kPrintable: holds = is_printable(c); break;
      case CharClass::kAscii: holds = c < 0x80; break;
    }
    if (!holds) return Value(false);
  }
  return Value(true);
}

// Words begin with an upper or title case letter and go on in lower case.
Value istitle_method(Interpreter& interpreter, const Value& self, Args& args) {
  const ArgReader reader(interpreter, "istitle", args, {});
  bool is_cased = false, was_cased = false;
  for (std::size_t i = 0; i < self.string().size();) {
    const std::size_t begin = i;
    next_code_point(self.string(), i);
    const std::string_view c = std::string_view(self.string()).substr(begin, i - begin);
    const bool is_capital = to_lower(c) != c, is_small = !is_capital && to_upper(c) != c;
    if ((is_capital && was_cased) || (is_small && !was_cased)) return Value(false);
    is_cased = is_cased || is_capital;
    was_cased = is_capital || is_small;
  }
  return Value(is_cased);
}

Value isidentifier_method(Interpreter& interpreter, const Value& self, Args& args) {
  const ArgReader reader(interpreter, "isidentifier", args, {});
  const std::string& text = self.string();
  for (std::size_t i = 0; i < text.size();) {
    const bool is_first = i == 0;
    const char32_t c = next_code_point(text, i);
    if (!(c == '_' || is_alpha(c) || (!is_first && (decimal_value(c) >= 0 || (c >= 0x80 && is_word_character(c)))))) return Value(false);
  }
  return Value(!text.empty());
}

Value expandtabs_method(Interpreter& interpreter, const Value& self, Args& args) {
  const ArgReader reader(interpreter, "expandtabs", args, {"tabsize"});
  const auto size = static_cast<std::size_t>(std::clamp<std::int64_t>(reader.int_or(0, 8), 0, 1000));
  std::string out;
  std::size_t column = 0;
  for (const char c : self.string()) {
    if (c == '\t') {
      const std::size_t spaces = size == 0 ? 0 : size - column % size;
      interpreter.charge_bytes(spaces);
      out.append(spaces, ' ');
      column += spaces;
      continue;
    }
    out.push_back(c);
    if (c == '\n' || c == '\r')
      column = 0;
    else if ((static_cast<unsigned char>(c) & 0xC0) != 0x80)
      ++column;
  }
  return make_text(std::move(out), self.is_markup());
}

// Keys are code points, values texts, code points or none.
Value translate_method(Interpreter& interpreter, const Value& self, Args& args) {
  const ArgReader reader(interpreter, "translate", args, {"table"});
  const Value& table = reader.required(0);
  if (!table.is_dict()) interpreter.fail("translate: wanted a dict, found " + table.type_name());
  std::string out;
  for (std::size_t i = 0; i < self.string().size();) {
    const char32_t c = next_code_point(self.string(), i);
    interpreter.charge_step();
    const Value* to = table.dict().find(Value(static_cast<Int>(c)));
    if (to == nullptr)
      append_code_point(out, c);
    else if (to->is_string())
      out += to->string();
    else if (to->is_int() && to->integer() >= 0 && to->integer() < 0x110000)
      append_code_point(out, static_cast<char32_t>(to->integer()));
    else if (!to->is_none())
      interpreter.fail("character mapping must return integer, None or str");
  }
  interpreter.charge_bytes(out.size());
  return make_text(std::move(out), self.is_markup());
}

Value join_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "join", args, {"iterable"});
  std::string out;
  bool is_first = true;
  for (const Value& item : iterate(i, reader.required(0))) {
    if (!item.is_string() && !self.is_markup()) i.fail("sequence item: expected str instance, " + item.type_name() + " found");
    if (!is_first) out += self.string();
    is_first = false;
    i.charge_bytes((item.is_string() ? item.string().size() : 64) + self.string().size());
    out += item.is_string() ? inserted(self, item) : escape_html(item.str());
  }
  return same_kind(self, std::move(out));
}

Value replace_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "replace", args, {"old", "new", "count"});
  const std::string from = reader.string(0), to = (reader.string(1), inserted(self, reader.required(1)));
  i.charge_bytes(self.string().size() + count(self.string(), from) * to.size());
  return same_kind(self, replace(self.string(), from, to, reader.int_or(2, -1)));
}

Value format_method(Interpreter& i, const Value& self, Args& args) { return brace_format(i, self, args, nullptr); }
Value format_map_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "format_map", args, {"mapping"});
  return brace_format(i, self, {}, &reader.required(0));
}

template <std::string (*kMap)(std::string_view)>
Value mapped_method(Interpreter& i, const Value& self, Args& args) {
  const ArgReader reader(i, "this method", args, {});
  return same_kind(self, kMap(self.string()));
}

// Case folding: what upper and lower case have in common. A dotless i is no i.
std::string fold(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t begin = i;
    const char32_t c = next_code_point(text, i);
    const std::string_view one = text.substr(begin, i - begin);
    out += c == 0x131 ? std::string(one) : to_lower(to_upper(to_lower(one)));
  }
  return out;
}

Value swapcase_method(Interpreter&, const Value& self, Args&) {
  std::string out;
  for (std::size_t i = 0; i < self.string().size();) {
    const std::size_t begin = i;
    next_code_point(self.string(), i);
    const std::string_view c = std::string_view(self.string()).substr(begin, i - begin);
    const std::string upper = to_upper(c);
    const bool is_title = upper != c && to_lower(c) != c;  // neither upper nor lower case
    out += is_title ? std::string(c) : upper != c ? upper : to_lower(c);
  }
  return same_kind(self, std::move(out));
}

constexpr MethodEntry kStringMethods[] = {
    {"strip", strip_method<true, true>},
    {"lstrip", strip_method<true, false>},
    {"rstrip", strip_method<false, true>},
    {"split", split_method<false>},
    {"rsplit", split_method<true>},
    {"splitlines",
     [](Interpreter& i, const Value& self, Args& args) {
       return strings(i, self, split_lines(self.string(), ArgReader(i, "splitlines", args, {"keepends"}).bool_or(0, false)));
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
    {"upper", mapped_method<to_upper>},
    {"lower", mapped_method<to_lower>},
    {"casefold", mapped_method<fold>},
    {"title", mapped_method<to_title>},
    {"capitalize", mapped_method<capitalize>},
    {"expandtabs", expandtabs_method},
    {"translate", translate_method},
    {"format_map", format_map_method},
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
       reader.required(0);
       return same_kind(
           self, text.substr(0, has_sign) + pad(text.substr(has_sign), width - std::min<std::size_t>(width, has_sign), "0", Align::kRight));
     }},
    {"removeprefix",
     [](Interpreter& i, const Value& self, Args& args) {
       const std::string affix = ArgReader(i, "removeprefix", args, {"prefix"}).string(0);
       return self.string().starts_with(affix) ? same_kind(self, self.string().substr(affix.size())) : self;
     }},
    {"removesuffix",
     [](Interpreter& i, const Value& self, Args& args) {
       const std::string affix = ArgReader(i, "removesuffix", args, {"suffix"}).string(0);
       return self.string().ends_with(affix) ? same_kind(self, self.string().substr(0, self.string().size() - affix.size())) : self;
     }},
    {"isalpha", class_method<CharClass::kAlpha>},
    {"isdigit", class_method<CharClass::kDigit>},
    {"isdecimal", class_method<CharClass::kDecimal>},
    {"isnumeric", class_method<CharClass::kNumeric>},
    {"isalnum", class_method<CharClass::kAlnum>},
    {"isspace", class_method<CharClass::kSpace>},
    {"isprintable", class_method<CharClass::kPrintable>},
    {"isascii", class_method<CharClass::kAscii>},
    {"istitle", istitle_method},
    {"isidentifier", isidentifier_method},
    {"isupper", [](Interpreter& i, const Value& self, Args& args) { return Value(find_test("upper")(i, self, args)); }},
    {"islower", [](Interpreter& i, const Value& self, Args& args) { return Value(find_test("lower")(i, self, args)); }},
};

// What a Markup has beside the methods of str.
constexpr MethodEntry kMarkupMethods[] = {
    {"unescape", [](Interpreter&, const Value& self, Args&) { return Value(unescape_html(self.string())); }},
    {"striptags", [](Interpreter&, const Value& self, Args&) { return Value(strip_tags(self.string())); }},
};

constexpr MethodEntry kIntMethods[] = {
    {"bit_length",
     [](Interpreter&, const Value& self, Args&) {
       auto rest = self.integer() < 0 ? -static_cast<unsigned __int128>(self.integer()) : static_cast<unsigned __int128>(self.integer());
       int bits = 0;
       for (; rest != 0; rest >>= 1) ++bits;
       return Value(bits);
     }},
    {"bit_count",
     [](Interpreter&, const Value& self, Args&) {
       auto rest = self.integer() < 0 ? -static_cast<unsigned __int128>(self.integer()) : static_cast<unsigned __int128>(self.integer());
       int bits = 0;
       for (; rest != 0; rest >>= 1) bits += static_cast<int>(rest & 1);
       return Value(bits);
     }},
    {"conjugate", [](Interpreter&, const Value& self, Args&) { return Value(self.integer()); }},
    {"as_integer_ratio",
     [](Interpreter&, const Value& self, Args&) {
       return make_tuple({Value(self.integer()), Value(1)});
     }},
};

constexpr MethodEntry kFloatMethods[] = {
    {"is_integer", [](Interpreter&, const Value& self,
                      Args&) { return Value(std::isfinite(self.number()) && std::trunc(self.number()) == self.number()); }},
    {"conjugate", [](Interpreter&, const Value& self, Args&) { return self; }},
};

constexpr MethodEntry kDictMethods[] = {
    {"get",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "get", args, {"key", "default"});
       check_hashable(i, reader.required(0));
       const Value* value = self.dict().find(reader.required(0));
       return value != nullptr ? *value : reader.value_or(1, Value());
     }},
    {"items",
     [](Interpreter& i, const Value& self, Args&) {
       std::vector<Value> items;
       i.charge_bytes(self.dict().entries.size() * 4 * sizeof(Value));
       for (const auto& [key, value] : self.dict().entries) items.push_back(make_tuple({key, value}));
       return make_list(std::move(items), ListFlavor::kItems);
     }},
    {"keys", [](Interpreter& i, const Value& self, Args&) { return make_list(iterate(i, self), ListFlavor::kKeys); }},
    {"values",
     [](Interpreter& i, const Value& self, Args&) {
       std::vector<Value> items;
       i.charge_bytes(self.dict().entries.size() * sizeof(Value));
       for (const auto& entry : self.dict().entries) items.push_back(entry.second);
       return make_list(std::move(items), ListFlavor::kValues);
     }},
    {"copy", [](Interpreter&, const Value& self, Args&) { return self; }},
    {"fromkeys",
     [](Interpreter& i, const Value&, Args& args) {
       const ArgReader reader(i, "fromkeys", args, {"iterable", "value"});
       std::vector<std::pair<Value, Value>> entries;
       for (const Value& key : iterate(i, reader.required(0))) {
         check_hashable(i, key);
         entries.emplace_back(key, reader.value_or(1, Value()));
       }
       return make_dict(std::move(entries));
     }},
};

constexpr MethodEntry kListMethods[] = {
    {"index",
     [](Interpreter& i, const Value& self, Args& args) {
       const ArgReader reader(i, "index", args, {"value", "start", "stop"});
       if (self.list().flavor == ListFlavor::kRange && args.positional.size() > 1) i.fail("range.index() takes exactly one argument");
       const std::vector<Value>& items = self.list().items;
       const auto size = static_cast<std::int64_t>(items.size());
       const auto place = [size](std::int64_t at) { return std::clamp<std::int64_t>(at < 0 ? at + size : at, 0, size); };
       const std::int64_t begin = place(reader.int_or(1, 0)), end = std::max(begin, place(reader.int_or(2, size)));
       const auto hit =
           std::find_if(items.begin() + begin, items.begin() + end, [&](const Value& v) { return v.equals(reader.required(0)); });
       if (hit == items.begin() + end) i.fail(repr(reader.required(0)) + " is not in list");
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
    if (entry == nullptr && object.is_markup()) entry = search(kMarkupMethods, name);
  } else if (object.is_int() || object.is_bool()) {
    if (name == "real" || name == "numerator") return Value(object.integer());
    if (name == "imag") return Value(0);
    if (name == "denominator") return Value(1);
    entry = search(kIntMethods, name);
  } else if (object.is_float()) {
    if (name == "real") return object;
    if (name == "imag") return Value(0.0);
    entry = search(kFloatMethods, name);
  } else if (object.is_dict()) {
    entry = search(kDictMethods, name);
    is_mutator = std::find(kDictMutators.begin(), kDictMutators.end(), name) != kDictMutators.end();
  } else if (object.is_list() && !is_view(object)) {
    const List& list = object.list();
    if (list.flavor == ListFlavor::kRange && (name == "start" || name == "stop" || name == "step"))
      return Value(name == "start" ? list.begin : name == "stop" ? list.end : list.step);
    if (list.flavor == ListFlavor::kList || name != "copy") entry = search(kListMethods, name);
    is_mutator =
        object.list().flavor == ListFlavor::kList && std::find(kListMutators.begin(), kListMutators.end(), name) != kListMutators.end();
  }
  if (is_mutator)
    return make_undefined("access to attribute '" + std::string(name) + "' of '" + object.type_name() + "' object is unsafe.");
  if (entry == nullptr) return std::nullopt;
  return make_function(
      std::string(name),
      [method = entry->method, object](Interpreter& interpreter, Args& args) { return method(interpreter, object, args); },
      depth_of(object) + 1);
}

}  // namespace prl::text::jinja
