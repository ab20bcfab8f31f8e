#include <algorithm>
#include <functional>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// Filters on lists and dicts. What Jinja gives as a generator is a list here. Source: jinja2/filters.py.
namespace prl::text::jinja {
namespace {

struct SequenceFilterEntry {
  std::string_view name;
  FilterFunction filter;
};

using KeyFunction = std::function<Value(const Value&)>;

// The attribute argument: "name", "a.b.0" or an index.
KeyFunction attribute_getter(Interpreter& interpreter, const Value& attribute, std::optional<Value> fallback = std::nullopt) {
  std::vector<Value> parts;
  if (attribute.is_string()) {
    for (const std::string& part : split(attribute.string(), ".", -1)) {
      const bool is_index = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
      parts.push_back(is_index ? Value(static_cast<Int>(std::stol(part))) : Value(part));
    }
  } else if (!attribute.is_none()) {
    parts.push_back(attribute);
  }
  return [&interpreter, parts, fallback](const Value& item) {
    Value value = item;
    for (const Value& part : parts) {
      value = interpreter.get_item(value, part);
      if (fallback && value.is_undefined()) value = *fallback;
    }
    return value;
  };
}

Value fold_case(const Value& value) { return value.is_string() ? Value(to_lower(value.string())) : value; }

Value result(Interpreter& interpreter, std::vector<Value> items) {
  interpreter.charge_bytes(items.size() * sizeof(Value));
  return Value::list(std::move(items));
}

void sort_by(Interpreter& i, std::vector<Value>& items, const std::function<Value(const Value&)>& key, bool reverse) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  for (const Value& item : items) keyed.emplace_back(key(item), item);
  const auto before = [&i](const auto& a, const auto& b) {
    i.charge_step();
    return i.order(a.first, b.first) < 0;
  };
  // Python keeps equal items in their order also when it sorts in reverse.
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  std::stable_sort(keyed.begin(), keyed.end(), before);
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  for (std::size_t n = 0; n < items.size(); ++n) items[n] = std::move(keyed[n].second);
}

Value filter_length(Interpreter& i, const Value& input, Args&) { return Value(i.length(input)); }

Value filter_first(Interpreter& i, const Value& input, Args&) {
  const std::vector<Value> items = i.iterate(input);
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

Value filter_last(Interpreter& i, const Value& input, Args&) {
  const std::vector<Value> items = i.iterate(input);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value filter_list(Interpreter& i, const Value& input, Args&) { return Value::list(i.iterate(input)); }

Value filter_join(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "join", args, {"d", "attribute"});
  const std::string separator = reader.value_or(0, Value("")).str();
  const KeyFunction key = attribute_getter(i, reader.value_or(1, Value()));
  std::string out;
  bool is_first = true;
  for (const Value& item : i.iterate(input)) {
    if (!is_first) out += separator;
    is_first = false;
    const std::string text = key(item).str();
    i.charge_bytes(text.size() + separator.size());
    out += text;
  }
  return Value(std::move(out));
}

Value filter_reverse(Interpreter& i, const Value& input, Args&) {
  std::vector<Value> items = i.iterate(input);
  std::reverse(items.begin(), items.end());
  if (!input.is_string()) return Value::list(std::move(items));
  std::string out;
  for (const Value& item : items) out += item.string();
  return Value(std::move(out));
}

Value filter_items(Interpreter& i, const Value& input, Args& args) {
  if (input.is_undefined()) return Value::list({});
  if (!input.is_dict()) i.fail("Can only get item pairs from a mapping.");
  const Value method = *find_method(input, "items");
  return i.call(method, args);
}

Value filter_dictsort(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "dictsort", args, {"case_sensitive", "by", "reverse"});
  const bool case_sensitive = reader.bool_or(0, false);
  const std::string by = reader.has(1) ? reader.string(1) : "key";
  if (by != "key" && by != "value") i.fail("You can only sort by either \"key\" or \"value\"");
  Args none;
  std::vector<Value> items = i.iterate(filter_items(i, input, none));
  const std::size_t column = by == "key" ? 0 : 1;
  sort_by(
      i, items,
      [&](const Value& pair) {
        const Value& value = pair.list().items[column];
        return case_sensitive ? value : fold_case(value);
      },
      reader.bool_or(2, false));
  return result(i, std::move(items));
}

Value filter_sort(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "sort", args, {"reverse", "case_sensitive", "attribute"});
  const bool case_sensitive = reader.bool_or(1, false);
  const Value attribute = reader.value_or(2, Value());
  std::vector<KeyFunction> keys;
  if (attribute.is_string()) {
    for (const std::string& part : split(attribute.string(), ",", -1)) keys.push_back(attribute_getter(i, Value(part)));
  } else {
    keys.push_back(attribute_getter(i, attribute));
  }
  std::vector<Value> items = i.iterate(input);
  sort_by(
      i, items,
      [&](const Value& item) {
        std::vector<Value> parts;
        for (const KeyFunction& key : keys) parts.push_back(case_sensitive ? key(item) : fold_case(key(item)));
        return parts.size() == 1 ? parts[0] : Value::list(std::move(parts));
      },
      reader.bool_or(0, false));
  return result(i, std::move(items));
}

Value filter_unique(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "unique", args, {"case_sensitive", "attribute"});
  const bool case_sensitive = reader.bool_or(0, false);
  const KeyFunction key = attribute_getter(i, reader.value_or(1, Value()));
  std::vector<Value> items, seen;
  for (const Value& item : i.iterate(input)) {
    const Value mark = case_sensitive ? key(item) : fold_case(key(item));
    i.charge_bytes(seen.size());
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& other) { return other.equals(mark); })) continue;
    seen.push_back(mark);
    items.push_back(item);
  }
  return result(i, std::move(items));
}

template <bool kLargest>
Value filter_extreme(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, kLargest ? "max" : "min", args, {"case_sensitive", "attribute"});
  const bool case_sensitive = reader.bool_or(0, false);
  const KeyFunction key = attribute_getter(i, reader.value_or(1, Value()));
  const auto mark = [&](const Value& item) { return case_sensitive ? key(item) : fold_case(key(item)); };
  const std::vector<Value> items = i.iterate(input);
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  Value best = items.front();
  for (const Value& item : items) {
    const int order = i.order(mark(item), mark(best));
    if (kLargest ? order > 0 : order < 0) best = item;
  }
  return best;
}

Value filter_sum(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "sum", args, {"attribute", "start"});
  const KeyFunction key = attribute_getter(i, reader.value_or(0, Value()));
  Value total = reader.value_or(1, Value(0));
  for (const Value& item : i.iterate(input)) total = i.binary("+", total, key(item));
  return total;
}

// map("filter", args...) or map(attribute="name", default=...)
Value filter_map(Interpreter& i, const Value& input, Args& args) {
  std::vector<Value> items = i.iterate(input);
  if (args.positional.empty()) {
    const ArgReader reader(i, "map", args, {"attribute", "default"});
    std::optional<Value> fallback;
    if (reader.has(1)) fallback = reader.required(1);
    const KeyFunction key = attribute_getter(i, reader.required(0), fallback);
    for (Value& item : items) item = key(item);
    return result(i, std::move(items));
  }
  if (!args.positional[0].is_string()) i.fail("map requires a filter argument");
  const std::string name = args.positional[0].string();
  Args rest{{args.positional.begin() + 1, args.positional.end()}, args.keyword};
  for (Value& item : items) {
    i.charge_step();
    item = i.apply_filter(name, item, rest);
  }
  return result(i, std::move(items));
}

// select, reject: ("test", args...); selectattr, rejectattr: ("attribute", "test", args...)
template <bool kKeep, bool kByAttribute>
Value filter_select(Interpreter& i, const Value& input, Args& args) {
  std::size_t used = 0;
  KeyFunction key = [](const Value& item) { return item; };
  if (kByAttribute) {
    if (args.positional.empty()) i.fail("Missing parameter for attribute name");
    key = attribute_getter(i, args.positional[used++]);
  }
  std::string test;
  if (used < args.positional.size()) {
    if (!args.positional[used].is_string()) i.fail("the name of a test must be a string");
    test = args.positional[used++].string();
  }
  Args rest{{args.positional.begin() + static_cast<std::ptrdiff_t>(used), args.positional.end()}, args.keyword};
  std::vector<Value> items;
  for (const Value& item : i.iterate(input)) {
    i.charge_step();
    const Value value = key(item);
    const bool holds = test.empty() ? value.truthy() : i.apply_test(test, value, rest);
    if (holds == kKeep) items.push_back(item);
  }
  return result(i, std::move(items));
}

Value filter_groupby(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "groupby", args, {"attribute", "default", "case_sensitive"});
  std::optional<Value> fallback;
  if (reader.has(1)) fallback = reader.required(1);
  const KeyFunction get = attribute_getter(i, reader.required(0), fallback);
  const bool case_sensitive = reader.bool_or(2, false);
  const auto key = [&](const Value& item) { return case_sensitive ? get(item) : fold_case(get(item)); };
  std::vector<Value> items = i.iterate(input);
  sort_by(i, items, key, false);
  std::vector<Value> groups;
  for (std::size_t begin = 0; begin < items.size();) {
    std::size_t end = begin + 1;
    while (end < items.size() && key(items[begin]).equals(key(items[end]))) ++end;
    std::vector<Value> members(items.begin() + static_cast<std::ptrdiff_t>(begin), items.begin() + static_cast<std::ptrdiff_t>(end));
    const Value name = get(items[begin]);
    groups.push_back(Value::list({name, Value::list(std::move(members))}, ListFlavor::kGroup));
    begin = end;
  }
  return result(i, std::move(groups));
}

Value filter_batch(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "batch", args, {"linecount", "fill_with"});
  const std::int64_t size = reader.int_or(0, 0);
  if (size < 1) i.fail("batch: linecount must be at least 1");
  std::vector<Value> rows, row;
  for (const Value& item : i.iterate(input)) {
    if (static_cast<std::int64_t>(row.size()) == size) rows.push_back(Value::list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty()) {
    if (reader.has(1) && !reader.required(1).is_none() && size < 100'000)
      while (static_cast<std::int64_t>(row.size()) < size) row.push_back(reader.required(1));
    rows.push_back(Value::list(std::move(row)));
  }
  return result(i, std::move(rows));
}

Value filter_slice(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "slice", args, {"slices", "fill_with"});
  const std::int64_t slices = reader.int_or(0, 0);
  if (slices < 1 || slices > 100'000) i.fail("slice: the number of slices must be between 1 and 100000");
  const std::vector<Value> items = i.iterate(input);
  const std::size_t count = static_cast<std::size_t>(slices), each = items.size() / count, extra = items.size() % count;
  std::vector<Value> out;
  auto next = items.begin();
  for (std::size_t n = 0; n < count; ++n) {
    const auto size = static_cast<std::ptrdiff_t>(each + (n < extra));
    std::vector<Value> part(next, next + size);
    next += size;
    if (reader.has(1) && !reader.required(1).is_none() && n >= extra && extra != 0) part.push_back(reader.required(1));
    out.push_back(Value::list(std::move(part)));
  }
  return result(i, std::move(out));
}

constexpr SequenceFilterEntry kSequenceFilters[] = {
    {"length", filter_length},
    {"count", filter_length},
    {"first", filter_first},
    {"last", filter_last},
    {"list", filter_list},
    {"join", filter_join},
    {"reverse", filter_reverse},
    {"items", filter_items},
    {"dictsort", filter_dictsort},
    {"sort", filter_sort},
    {"unique", filter_unique},
    {"max", filter_extreme<true>},
    {"min", filter_extreme<false>},
    {"sum", filter_sum},
    {"map", filter_map},
    {"select", filter_select<true, false>},
    {"reject", filter_select<false, false>},
    {"selectattr", filter_select<true, true>},
    {"rejectattr", filter_select<false, true>},
    {"groupby", filter_groupby},
    {"batch", filter_batch},
    {"slice", filter_slice},
};

}  // namespace

FilterFunction find_sequence_filter(std::string_view name) {
  const auto* entry = std::find_if(std::begin(kSequenceFilters), std::end(kSequenceFilters),
                                   [name](const SequenceFilterEntry& e) { return e.name == name; });
  return entry == std::end(kSequenceFilters) ? nullptr : entry->filter;
}

}  // namespace prl::text::jinja
