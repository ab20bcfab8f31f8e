#pragma once

#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "text/json_scan.hpp"
#include "text/renderer.hpp"
#include "text/renderers/token_text.hpp"

namespace prl::text::renderers {

/// How a family writes its tool calls.
enum class ToolSyntax : std::uint8_t {
  kNone,
  kHermes,      ///< <tool_call>{"name": ..., "arguments": {...}}</tool_call>
  kXml,         ///< <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>, values typed by the tool's schema
  kGlm,         ///< <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>, values typed by the tool's schema
  kMiniMax,     ///< <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke>...</minimax:tool_call>, ditto
  kDeepSeek,    ///< calls section of DeepSeek V3 and R1: type, separator, name, arguments in a fence of JSON
  kDeepSeek31,  ///< that of DeepSeek V3.1: name, separator, arguments
  kHarmony,     ///< messages to "functions.NAME" of gpt-oss, which have channels for reasoning and content too; see harmony_parser.hpp
  kKimi,        ///< calls section of Kimi K2: "functions.NAME:INDEX", argument marker, arguments
};

/// The marker that opens the first call; empty for kNone and kHarmony.
std::string_view tool_open_mark(ToolSyntax syntax) noexcept;
/// The syntax that a tool parser of this name reads, by the names of vLLM and of the `renderers` package; nullopt for an unknown one.
std::optional<ToolSyntax> tool_syntax_of(std::string_view parser) noexcept;

/// Markup of calls, [begin, end) in bytes, and what was read in it.
struct ToolBlock {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::vector<ParsedToolCall> calls;
};
/// Every attempt at a call at `begin` or later, in order. Calls have no id yet but for those of Kimi, which the model names.
std::vector<ToolBlock> read_tool_blocks(const TokenText& text, std::size_t begin, const boost::json::array& tools, ToolSyntax syntax);

/// One block's inside, [begin, end), in the three forms with a value per argument.
ParsedToolCall read_xml_call(const TokenText& text, std::size_t begin, std::size_t end, const boost::json::array& tools);
ParsedToolCall read_glm_call(const TokenText& text, std::size_t begin, std::size_t end, const boost::json::array& tools);
std::vector<ParsedToolCall> read_minimax_calls(const TokenText& text, std::size_t begin, std::size_t end, const boost::json::array& tools);

/// Name and arguments of a call from the members of its JSON object; an absent or wrong name is empty, absent arguments are {}.
void read_call_members(const std::vector<RawMember>& members, std::initializer_list<std::string_view> argument_names, ParsedToolCall& call);
/// Sets the arguments of the call to JSON text; false if it is none, and then they are the text.
bool read_json_arguments(std::string arguments, ParsedToolCall& call);
/// "call_" and 24 hex digits that no other call of this process has.
std::string new_call_id();

}  // namespace prl::text::renderers
