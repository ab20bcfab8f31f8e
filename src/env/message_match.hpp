#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstddef>

namespace prl::env {

/// Whether two OpenAI messages mean the same: role, content (null, absent and "" are one), reasoning, the call that a tool message
/// answers, and of each tool call its id, name and arguments as JSON values (as text where they are no JSON). Other members, their
/// order and nulls do not count: libraries add an `index` here and a null there.
bool is_same_message(const boost::json::value& a, const boost::json::value& b);

/// Whether `messages` begins with all of `prefix`, by meaning.
bool begins_with(const boost::json::array& messages, const boost::json::array& prefix);

/// The message as native environments write it: members that say nothing (nulls, empty lists of calls) are left out, reasoning is
/// `reasoning_content`, and a tool call is {id, type, function {name, arguments}}. Error{kInvalidArgument} naming the member that is
/// missing or of another type.
boost::json::object plain_message(const boost::json::object& message);

/// The tools without null members.
boost::json::array plain_tools(const boost::json::array& tools);

}  // namespace prl::env
