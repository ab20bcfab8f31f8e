#pragma once

#include <boost/json/object.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace prl::env::python {

/// Frames of the protocol prl-env/1 (docs/developers/env-protocol.md): four bytes of length, little-endian, one of codec, the payload.
constexpr std::size_t kFrameHeaderBytes = 5;
constexpr std::size_t kDefaultMaxFrameBytes = std::size_t{64} << 20;
using FrameHeader = std::array<unsigned char, kFrameHeaderBytes>;

/// The frame of a message. `more` are the pieces of the text of its last members, where that is JSON already. Error{kInvalidArgument}
/// naming its type and size if the payload is longer than `max_bytes`.
std::string encode_frame(const boost::json::object& message, std::size_t max_bytes = kDefaultMaxFrameBytes,
                         std::initializer_list<std::string_view> more = {});
/// Length of the payload that follows. Error{kCorrupt} for another codec or a length above `max_bytes`.
std::size_t decode_header(const FrameHeader& header, std::size_t max_bytes = kDefaultMaxFrameBytes);
/// The message of a payload; it has a text `t`. In memory of its own (text::parse_json_together). Error{kCorrupt} saying what is wrong.
boost::json::object decode_payload(std::string_view payload);

// Members of messages from the other side. Each throws Error{kCorrupt} naming type and member if it is missing or of another type;
// the optional_ ones take null and absent as the default.
std::string text_member(const boost::json::object& message, std::string_view key);
std::int64_t integer_member(const boost::json::object& message, std::string_view key);
const boost::json::object& object_member(const boost::json::object& message, std::string_view key);
const boost::json::array& array_member(const boost::json::object& message, std::string_view key);
std::string optional_text(const boost::json::object& message, std::string_view key);
std::int64_t optional_integer(const boost::json::object& message, std::string_view key, std::int64_t fallback);
double optional_number(const boost::json::object& message, std::string_view key, double fallback);
bool optional_bool(const boost::json::object& message, std::string_view key, bool fallback);
const boost::json::object& optional_object(const boost::json::object& message, std::string_view key);
const boost::json::array& optional_array(const boost::json::object& message, std::string_view key);

}  // namespace prl::env::python
