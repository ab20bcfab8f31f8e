#include <algorithm>
#include <functional>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/iterator.hpp"
#include "text/jinja/operators.hpp"
#include "text/jinja/string_ops.hpp"
#include "text/utf8.hpp"

// Filters on lists and dicts. Source: jinja2/filters.py.
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
      value = get_item(interpreter, value, part);
      if (fallback && value.is_undefined()) value = *fallback;
    }
    return value;
  };
}

/// The pairs of a mapping.
std::vector<Value> items_of(Interpreter& i, const Value& mapping) {
  if (!mapping.is_dict()) i.fail("Can only get item pairs from a mapping.");
  Args none;
  return i.call(*find_method(mapping, "items"), none).list().items;
}

/// Nesting of all that a call holds: a chain of iterators is bounded by it, since each ends in a call of the next.
int depth_of(const Value& source, const Args& args) {
  int depth = depth_of(source);
  for (const Value& value : args.positional) depth = std::max(depth, depth_of(value));
  for (const auto& [name, value] : args.keyword) depth = std::max(depth, depth_of(value));
  return depth;
}

/// An iterator over what `step` makes of the items of `source`, one by one; items for which it gives nothing are left out.
/// Nothing is looked at, and nothing can fail, before the first item is asked for. A source that is not true is empty.
template <typename Step>
Value lazily(Interpreter& interpreter, const Value& source, const Args& args, Step step) {
  return make_iterator(
      interpreter,
      [source, step = std::move(step), cursor = std::shared_ptr<Cursor>()](Interpreter& i) mutable -> std::optional<Value> {
        if (!cursor) cursor = std::make_shared<Cursor>(i, source.truthy() ? source : make_list({}));
        while (std::optional<Value> item = cursor->next(i)) {
          i.charge_step();
          if (std::optional<Value> out = step(i, *item)) return out;
        }
        return std::nullopt;
      },
      depth_of(source, args));
}

/// An iterator over a list that is computed when its first item is asked for.
template <typename Make>
Value lazy_list(Interpreter& interpreter, const Value& source, const Args& args, Make make) {
  return make_iterator(
      interpreter,
      [make = std::move(make), items = std::vector<Value>(), at = std::size_t{0},
       is_begun = false](Interpreter& i) mutable -> std::optional<Value> {
        if (!is_begun) items = make(i);
        is_begun = true;
        return at < items.size() ? std::optional(items[at++]) : std::nullopt;
      },
      depth_of(source, args) + 1);
}

Value fold_case(const Value& value) { return value.is_string() ? Value(to_lower(value.string())) : value; }

Value result(Interpreter& interpreter, std::vector<Value> items) {
  interpreter.charge_bytes(items.size() * sizeof(Value));
  return make_list(std::move(items));
}

void sort_by(Interpreter& i, std::vector<Value>& items, const std::function<Value(const Value&)>& key, bool reverse) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  for (const Value& item : items) keyed.emplace_back(key(item), item);
  const auto before = [&i](const auto& a, const auto& b) {
    i.charge_step();
    return order(i, a.first, b.first) < 0;
  };
  // Python keeps equal items in their order also when it sorts in reverse.
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  std::stable_sort(keyed.begin(), keyed.end(), before);
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  for (std::size_t n = 0; n < items.size(); ++n) items[n] = std::move(keyed[n].second);
}

Value filter_length(Interpreter& i, const Value& input, Args&) { return Value(length(i, input)); }

Value filter_first(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "first", args, {});
  return Cursor(i, input).next(i).value_or(make_undefined("No first item, sequence was empty."));
}

Value filter_last(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "last", args, {});
  if (as_iterator(input) != nullptr) i.fail("'generator' object is not reversible");
  const std::vector<Value> items = iterate(i, input);
  if (items.empty()) return make_undefined("No last item, sequence was empty.");
  return input.is_string() ? make_text(items.back().string(), input.is_markup()) : items.back();
}

Value filter_list(Interpreter& i, const Value& input, Args&) { return make_list(iterate(i, input)); }

Value filter_join(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "join", args, {"d", "attribute"});
  const std::string separator = reader.value_or(0, Value("")).str();
  const KeyFunction key = attribute_getter(i, reader.value_or(1, Value()));
  std::string out;
  bool is_first = true;
  for (const Value& item : iterate(i, input)) {
    if (!is_first) out += separator;
    is_first = false;
    const std::string text = key(item).str();
    i.charge_bytes(text.size() + separator.size());
    out += text;
  }
  return Value(std::move(out));
}

Value filter_reverse(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "reverse", args, {});
  std::vector<Value> items = iterate(i, input);
  std::reverse(items.begin(), items.end());
  if (input.is_string()) {
    std::string out;
    for (const Value& item : items) out += item.string();
    return make_text(std::move(out), input.is_markup());
  }
  if (as_iterator(input) != nullptr) return result(i, std::move(items));
  return lazily(i, make_list(std::move(items)), args, [](Interpreter&, Value& item) { return std::optional(std::move(item)); });
}

Value filter_items(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "items", args, {});
  return make_iterator(
      i,
      [input, items = std::vector<Value>(), at = std::size_t{0},
       is_begun = false](Interpreter& interpreter) mutable -> std::optional<Value> {
        if (!is_begun && !input.is_undefined()) items = items_of(interpreter, input);
        is_begun = true;
        return at < items.size() ? std::optional(items[at++]) : std::nullopt;
      },
      depth_of(input) + 1);
}

Value filter_dictsort(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "dictsort", args, {"case_sensitive", "by", "reverse"});
  const bool case_sensitive = reader.bool_or(0, false);
  const std::string by = reader.has(1) ? reader.string(1) : "key";
  if (by != "key" && by != "value") i.fail("You can only sort by either \"key\" or \"value\"");
  if (input.is_undefined()) i.fail(input.undefined_message());
  std::vector<Value> items = items_of(i, input);
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
  std::vector<Value> items = iterate(i, input);
  sort_by(
      i, items,
      [&](const Value& item) {
        std::vector<Value> parts;
        for (const KeyFunction& key : keys) parts.push_back(case_sensitive ? key(item) : fold_case(key(item)));
        return make_list(std::move(parts));  // a list: equal parts, undefined ones too, need no order
      },
      reader.bool_or(0, false));
  return result(i, std::move(items));
}

Value filter_unique(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "unique", args, {"case_sensitive", "attribute"});
  const bool case_sensitive = reader.bool_or(0, false);
  return lazy_list(i, input, args, [input, case_sensitive, attribute = reader.value_or(1, Value())](Interpreter& interpreter) {
    const KeyFunction key = attribute_getter(interpreter, attribute);
    std::vector<Value> items, seen;
    for (const Value& item : iterate(interpreter, input)) {
      const Value mark = case_sensitive ? key(item) : fold_case(key(item));
      check_hashable(interpreter, mark);
      interpreter.charge_bytes(seen.size());
      if (std::any_of(seen.begin(), seen.end(), [&](const Value& other) { return other.equals(mark); })) continue;
      seen.push_back(mark);
      items.push_back(item);
    }
    return items;
  });
}

template <bool kLargest>
Value filter_extreme(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, kLargest ? "max" : "min", args, {"case_sensitive", "attribute"});
  const bool case_sensitive = reader.bool_or(0, false);
  const KeyFunction key = attribute_getter(i, reader.value_or(1, Value()));
  const auto mark = [&](const Value& item) { return case_sensitive ? key(item) : fold_case(key(item)); };
  const std::vector<Value> items = iterate(i, input);
  if (items.empty()) return make_undefined("No aggregated item, sequence was empty.");
  std::size_t best = 0;
  Value best_mark = mark(items.front());
  for (std::size_t n = 1; n < items.size(); ++n) {
    Value other = mark(items[n]);
    const int sign = order(i, other, best_mark);
    if (kLargest ? sign <= 0 : sign >= 0) continue;
    best = n;
    best_mark = std::move(other);
  }
  return items[best];
}

Value filter_sum(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "sum", args, {"attribute", "start"});
  const KeyFunction key = attribute_getter(i, reader.value_or(0, Value()));
  Value total = reader.value_or(1, Value(0));
  for (const Value& item : iterate(i, input)) total = binary(i, "+", total, key(item));
  return total;
}

// map("filter", args...) or map(attribute="name", default=...)
Value filter_map(Interpreter& i, const Value& input, Args& args) {
  return lazily(i, input, args, [args, key = KeyFunction()](Interpreter& interpreter, Value& item) mutable -> std::optional<Value> {
    if (args.positional.empty()) {
      if (!key) {
        const ArgReader reader(interpreter, "map", args, {"attribute", "default"});
        std::optional<Value> fallback;
        if (reader.has(1)) fallback = reader.required(1);
        key = attribute_getter(interpreter, reader.required(0), fallback);
      }
      return key(item);
    }
    if (!args.positional[0].is_string()) interpreter.fail("map requires a filter argument");
    Args rest{{args.positional.begin() + 1, args.positional.end()}, args.keyword};
    return interpreter.apply_filter(args.positional[0].string(), item, rest);
  });
}

// select, reject: ("test", args...); selectattr, rejectattr: ("attribute", "test", args...)
template <bool kKeep, bool kByAttribute>
Value filter_select(Interpreter& i, const Value& input, Args& args) {
  return lazily(i, input, args, [args, key = KeyFunction()](Interpreter& interpreter, Value& item) mutable -> std::optional<Value> {
    std::size_t used = 0;
    if (kByAttribute) {
      if (args.positional.empty()) interpreter.fail("Missing parameter for attribute name");
      if (!key) key = attribute_getter(interpreter, args.positional[0]);
      ++used;
    }
    const Value value = kByAttribute ? key(item) : item;
    bool holds = false;
    if (used < args.positional.size()) {
      if (!args.positional[used].is_string()) interpreter.fail("the name of a test must be a string");
      Args rest{{args.positional.begin() + static_cast<std::ptrdiff_t>(used) + 1, args.positional.end()}, args.keyword};
      holds = interpreter.apply_test(args.positional[used].string(), value, rest);
    } else {
      holds = value.truthy();
    }
    return holds == kKeep ? std::optional(item) : std::nullopt;
  });
}

Value filter_groupby(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "groupby", args, {"attribute", "default", "case_sensitive"});
  std::optional<Value> fallback;
  if (reader.has(1)) fallback = reader.required(1);
  const KeyFunction get = attribute_getter(i, reader.required(0), fallback);
  const bool case_sensitive = reader.bool_or(2, false);
  const auto key = [&](const Value& item) { return case_sensitive ? get(item) : fold_case(get(item)); };
  std::vector<Value> items = iterate(i, input);
  sort_by(i, items, key, false);
  std::vector<Value> groups;
  for (std::size_t begin = 0; begin < items.size();) {
    std::size_t end = begin + 1;
    while (end < items.size() && key(items[begin]).equals(key(items[end]))) ++end;
    std::vector<Value> members(items.begin() + static_cast<std::ptrdiff_t>(begin), items.begin() + static_cast<std::ptrdiff_t>(end));
    const Value name = get(items[begin]);
    groups.push_back(make_list({name, make_list(std::move(members))}, ListFlavor::kGroup));
    begin = end;
  }
  return result(i, std::move(groups));
}

Value filter_batch(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "batch", args, {"linecount", "fill_with"});
  return lazy_list(i, input, args, [input, size = reader.required(0), fill = reader.value_or(1, Value())](Interpreter& interpreter) {
    std::vector<Value> rows, row;
    for (const Value& item : iterate(interpreter, input)) {
      if (Value(row.size()).equals(size)) rows.push_back(make_list(std::exchange(row, {})));
      row.push_back(item);
    }
    if (row.empty()) return rows;
    if (!fill.is_none() && order(interpreter, Value(row.size()), size) < 0) {
      const Int missing = binary(interpreter, "-", size, Value(row.size())).integer();
      if (missing > 100'000) interpreter.fail("batch: the last row would be filled with too many items");
      interpreter.charge_bytes(static_cast<std::size_t>(missing) * sizeof(Value));
      row.insert(row.end(), static_cast<std::size_t>(missing), fill);
    }
    rows.push_back(make_list(std::move(row)));
    interpreter.charge_bytes(rows.size() * sizeof(Value));
    return rows;
  });
}

Value filter_slice(Interpreter& i, const Value& input, Args& args) {
  const ArgReader reader(i, "slice", args, {"slices", "fill_with"});
  return lazy_list(i, input, args, [input, slices = reader.required(0), fill = reader.value_or(1, Value())](Interpreter& interpreter) {
    const std::vector<Value> items = iterate(interpreter, input);
    if (!slices.is_int() && !slices.is_bool())
      interpreter.fail("slice: the number of slices must be an integer, not " + slices.type_name());
    if (slices.integer() == 0 || slices.integer() > 100'000) interpreter.fail("slice: the number of slices must be between 1 and 100000");
    std::vector<Value> out;
    if (slices.integer() < 0) return out;
    const auto count = static_cast<std::size_t>(slices.integer());
    const std::size_t each = items.size() / count, extra = items.size() % count;
    auto next = items.begin();
    for (std::size_t n = 0; n < count; ++n) {
      const auto size = static_cast<std::ptrdiff_t>(each + (n < extra));
      std::vector<Value> part(next, next + size);
      next += size;
      if (!fill.is_none() && n >= extra) part.push_back(fill);
      out.push_back(make_list(std::move(part)));
    }
    interpreter.charge_bytes(out.size() * sizeof(Value));
    return out;
  });
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
