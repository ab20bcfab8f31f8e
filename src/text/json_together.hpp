#pragma once

#include <boost/json/value.hpp>

#include <string_view>

#include "text/json_python.hpp"

namespace prl::text {

/// parse_json into one piece of memory, for messages that are read and dropped: it goes when the value and whatever was copied or moved out
/// of it have gone. Nothing of it may be changed while another thread changes another part. Assigning to a value of one's own copies.
boost::json::value parse_json_together(std::string_view text, std::size_t max_depth = kJsonDepth,
                                       LargeNumbers large_numbers = LargeNumbers::kAsDoubles);

}  // namespace prl::text
