#pragma once

#include <boost/json/array.hpp>

#include <string>

namespace prl::text::renderers {

/// The "# Tools" section of a harmony developer message: each tool as a function type of the namespace "functions", its parameters as a
/// TypeScript type with descriptions and defaults as comments.
/// Source: openai-harmony 0.0.8. Error{kInvalidArgument} naming the tool for one without a text for a name or description, or whose
/// parameters are no object.
std::string harmony_tools(const boost::json::array& tools);

}  // namespace prl::text::renderers
