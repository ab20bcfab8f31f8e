#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <string>

namespace prl::grammar {

/// One schema for the values that match all `branches` of an allOf and what stands beside it (`rest`, perhaps empty). References are
/// followed in `root`. Members of several branches are asked for together. Error{kInvalidArgument} that begins with the place and names
/// the keyword where two branches say different things that no one keyword says.
boost::json::value merge_schemas(const boost::json::value& root, const boost::json::array& branches, const boost::json::object& rest,
                                 const std::string& place);

}  // namespace prl::grammar
