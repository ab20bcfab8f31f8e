#pragma once

#include <string_view>

#include "text/jinja/ast.hpp"

namespace prl::text::jinja {

/// Parses a template. Error{kInvalidArgument} naming the line. Source: jinja2/parser.py.
NodeList parse_template(std::string_view source);

}  // namespace prl::text::jinja
