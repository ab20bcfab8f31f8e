#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "config/value.hpp"

/// Reading and writing configuration files.
namespace prl::config {

/// Reads a .toml or .json file; every node's origin is the file (TOML with its line). A top-level key `toml_files` lists
/// files, relative to this one, that are loaded first and then overridden. Files are limited to 16 MiB, inheritance to 16
/// levels. Error{kNotFound} for a missing file; {kInvalidArgument} for bad syntax, YAML or another extension.
Value read_config_file(const std::filesystem::path& path);

/// Parses text; `name` is used in origins and messages. Error{kInvalidArgument} names the line for TOML.
Value parse_toml(std::string_view text, const std::string& name);
Value parse_json(std::string_view text, const std::string& name);

/// TOML with tables after scalars. Nulls are written as "None", which reads back as null.
std::string to_toml(const Value& table);
/// JSON with two spaces of indent; floats always show a point or an exponent.
std::string to_json(const Value& value);
/// The same on one line.
std::string to_compact_json(const Value& value);

}  // namespace prl::config
