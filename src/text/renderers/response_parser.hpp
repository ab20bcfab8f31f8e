#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "text/renderer.hpp"
#include "text/renderers/tool_calls.hpp"

namespace prl::text::renderers {

struct ParseOptions {
  std::vector<std::int32_t> stop_ids;  ///< ascending
  ToolSyntax tools = ToolSyntax::kHermes;
  bool reads_thinking = true;
  bool keeps_empty_reasoning = false;                             ///< an empty think block is "" instead of absent
  bool tool_closes_reasoning = true;                              ///< a call ends a think block that is not closed
  std::string_view assistant_header = "<|im_start|>assistant\n";  ///< of a literal; what opens an assistant turn
};

/// Takes a completion apart: reasoning first, then content, then tool calls. Where the tokenizer has a token for a marker only
/// that token counts, so text that looks like one stays text. Never throws on model output.
ParsedResponse parse_tagged(const Tokenizer& tokenizer, std::span<const std::int32_t> completion_ids,
                            std::span<const std::int32_t> prompt_ids, const boost::json::array& tools, const ParseOptions& options);
/// True if the completion ends inside its think block.
bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const std::int32_t> completion_ids, std::span<const std::int32_t> prompt_ids,
                       const ParseOptions& options);
/// The ids before the first that ends a turn.
std::span<const std::int32_t> before_stop(std::span<const std::int32_t> ids, const std::vector<std::int32_t>& stops);
/// Puts the calls of the blocks into `out`, with ids; the markup of blocks with a call that cannot be used goes behind the content.
void add_tool_blocks(ParsedResponse& out, const TokenText& text, std::vector<ToolBlock> blocks);

}  // namespace prl::text::renderers
