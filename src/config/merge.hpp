#pragma once

#include <optional>

#include "config/value.hpp"

namespace prl::config {

/// Lays `over` on `base`, as layers of a configuration are laid on each other.
///
/// Tables merge key by key, everything else is replaced, lists too. A table whose keys are all numbers lays its members on
/// the items of a list ("env.0.id"); the number after the last item appends. A table without `id` and `type` changes the only item of a
/// list of tables ("env.args"). `true` on a table leaves the table (a bare
/// `--ckpt` after a [ckpt] section). Error{kInvalidArgument} for a number beyond the end of the list, or no number
/// where a list has several items.
void merge(Value& base, const Value& over);

/// Turns every string "None" into null: TOML and the command line have no other way to write it.
void none_to_null(Value& value);

/// True for a table with members whose keys are all digits.
bool is_indexed(const Value& value);

/// A table that stands for a list and has keys that are numbers beside others, which are the first entry's ("--env.id a --env.0.args {}"),
/// as a table of numbers alone; nothing if it has no such numbers or nothing else.
std::optional<Value> as_entries(const Value& table);

}  // namespace prl::config
