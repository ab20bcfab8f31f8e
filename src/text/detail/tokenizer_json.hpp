#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <string_view>

/// Parts of tokenizer.json and its companions that are written in more than one place.
namespace prl::text::detail {

/// Qwen 2's splitting pattern.
inline constexpr std::string_view kQwenPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
/// Llama 3's: up to three digits together.
inline constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// An entry of "added_tokens".
boost::json::object added_token(std::int32_t id, std::string_view content, bool special);
/// A ByteLevel step: pre-tokenizer, post-processor and decoder share its form.
boost::json::object byte_level(bool add_prefix_space, bool trim_offsets, bool use_regex);
/// Isolated splits at `pattern`, then bytes.
boost::json::object split_then_bytes(std::string_view pattern, bool trim_offsets);
/// "added_tokens_decoder" of tokenizer_config.json from "added_tokens".
boost::json::object added_tokens_decoder(const boost::json::array& added);

}  // namespace prl::text::detail
