#include "text/renderers/tool_calls.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/message_view.hpp"

namespace prl::text::renderers {
namespace {

namespace json = boost::json;

constexpr std::string_view kToolOpen = "<tool_call>", kToolClose = "</tool_call>";
constexpr std::string_view kMiniMaxOpen = "<minimax:tool_call>", kMiniMaxClose = "</minimax:tool_call>";

// The markers of a section of calls: the section's, each call's, and the one between the head of a call and what follows.
struct SectionMarks {
  std::string_view begin, end, call, call_end, separator;
};
constexpr SectionMarks kDeepSeekMarks{"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                                      "<｜tool▁sep｜>"};
constexpr SectionMarks kKimiMarks{"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
                                  "<|tool_call_argument_begin|>"};

constexpr std::pair<std::string_view, ToolSyntax> kParsers[] = {
    {"hermes", ToolSyntax::kHermes},
    {"qwen3", ToolSyntax::kHermes},
    {"qwen3.5", ToolSyntax::kXml},
    {"qwen3_coder", ToolSyntax::kXml},
    {"glm", ToolSyntax::kGlm},
    {"glm45", ToolSyntax::kGlm},
    {"glm47", ToolSyntax::kGlm},
    {"minimax_m2", ToolSyntax::kMiniMax},
    {"deepseek_v3", ToolSyntax::kDeepSeek},
    {"deepseek_v31", ToolSyntax::kDeepSeek31},
    {"kimi_k2", ToolSyntax::kKimi},
    {"openai", ToolSyntax::kHarmony},
    {"gpt_oss", ToolSyntax::kHarmony},
};

ParsedToolCall read_hermes_call(std::string_view block) {
  ParsedToolCall call;
  call.raw = strip(block);
  const auto members = scan_json_object(call.raw);
  if (!members) {
    try {
      parse_json(call.raw);
      call.status = ToolCallStatus::kMissingName;  // some other JSON value
    } catch (const Error&) {
      call.status = ToolCallStatus::kInvalidJson;
    }
    return call;
  }
  read_call_members(*members, {"arguments"}, call);
  if (call.name.empty()) call.status = ToolCallStatus::kMissingName;
  return call;
}

// Where the block that begins at `inside` is closed; kNowhere if it is not. A closing tag inside a value of the call does not count.
std::size_t find_close(const TokenText& text, std::size_t inside, ToolSyntax syntax) {
  const std::string& bytes = text.bytes();
  const std::size_t first = text.find(kToolClose, inside);
  if (first == kNowhere || syntax == ToolSyntax::kGlm) return first;
  if (syntax == ToolSyntax::kHermes) {
    JsonObjectScanner scanner;
    std::size_t at = inside;
    while (at < bytes.size() && scanner.state() == JsonObjectScanner::State::kOpen) scanner.push(bytes[at++]);
    if (scanner.state() != JsonObjectScanner::State::kComplete) return first;
    const std::size_t close = text.find(kToolClose, at);
    return close != kNowhere && strip(std::string_view(bytes).substr(at, close - at)).empty() ? close : first;
  }
  const std::size_t next_open = text.find(kToolOpen, inside);
  for (std::size_t close = first; close != kNowhere && close < next_open; close = text.find(kToolClose, close + 1))
    if (strip(std::string_view(bytes).substr(inside, close - inside)).ends_with("</function>")) return close;
  return first;
}

ToolBlock read_block(const TokenText& text, std::size_t at, const json::array& tools, ToolSyntax syntax) {
  const bool is_minimax = syntax == ToolSyntax::kMiniMax;
  const std::size_t inside = at + tool_open_mark(syntax).size();
  const std::size_t close = is_minimax ? text.find(kMiniMaxClose, inside) : find_close(text, inside, syntax);
  if (close == kNowhere) {
    ParsedToolCall call;
    call.raw = text.text(inside, text.size());
    if (syntax == ToolSyntax::kHermes) call.raw = strip(call.raw);
    call.status = ToolCallStatus::kUnclosedBlock;
    return {at, text.size(), {std::move(call)}};
  }
  ToolBlock block{at, close + (is_minimax ? kMiniMaxClose : kToolClose).size(), {}};
  switch (syntax) {
    case ToolSyntax::kHermes: block.calls.push_back(read_hermes_call(text.text(inside, close))); break;
    case ToolSyntax::kGlm: block.calls.push_back(read_glm_call(text, inside, close, tools)); break;
    case ToolSyntax::kMiniMax: block.calls = read_minimax_calls(text, inside, close, tools); break;
    default: block.calls.push_back(read_xml_call(text, inside, close, tools)); break;
  }
  return block;
}

// What stands between ```json and ``` if that is all there is; otherwise the text itself.
std::string without_fence(std::string_view text) {
  constexpr std::string_view kFence = "```", kLanguage = "json";
  if (text.size() < 2 * kFence.size() || !text.starts_with(kFence) || !text.ends_with(kFence)) return std::string(text);
  text = text.substr(kFence.size(), text.size() - 2 * kFence.size());
  if (text.starts_with(kLanguage)) text.remove_prefix(kLanguage.size());
  return strip(text);
}

ParsedToolCall read_deepseek_call(const TokenText& text, std::size_t begin, std::size_t end, bool is_unclosed, bool is_v31) {
  ParsedToolCall call;
  call.raw = text.text(begin, end);
  const std::size_t separator = text.find(kDeepSeekMarks.separator, begin, end);
  if (separator == kNowhere) {
    call.status = ToolCallStatus::kMalformed;
    return call;
  }
  const std::string tail = strip(text.text(separator + kDeepSeekMarks.separator.size(), end));
  std::string arguments;
  if (is_v31) {
    call.name = strip(text.text(begin, separator));
    arguments = tail;
  } else {
    const std::size_t line_end = tail.find('\n');
    call.name = strip(std::string_view(tail).substr(0, line_end));
    if (line_end != kNowhere) arguments = without_fence(strip(std::string_view(tail).substr(line_end + 1)));
  }
  const bool is_json = read_json_arguments(arguments.empty() ? "{}" : std::move(arguments), call);
  if (is_unclosed)
    call.status = ToolCallStatus::kUnclosedBlock;
  else if (call.name.empty())
    call.status = ToolCallStatus::kMissingName;
  else if (!is_json)
    call.status = ToolCallStatus::kInvalidJson;
  return call;
}

// "functions.NAME:INDEX", the argument marker at `separator`, the arguments. The whole head is the id of the call, which later turns
// repeat.
ParsedToolCall read_kimi_call(const TokenText& text, std::size_t begin, std::size_t separator, std::size_t end, bool is_unclosed) {
  ParsedToolCall call;
  call.raw = text.text(begin, end);
  call.id = strip(text.text(begin, separator));
  std::string_view name = std::string_view(call.id).substr(0, call.id.find(':'));
  if (const std::size_t dot = name.find('.'); dot != kNowhere) name.remove_prefix(dot + 1);
  call.name = std::string(name);
  const bool is_json = read_json_arguments(strip(text.text(separator + kKimiMarks.separator.size(), end)), call);
  if (is_unclosed)
    call.status = ToolCallStatus::kUnclosedBlock;
  else if (call.name.empty())
    call.status = ToolCallStatus::kMissingName;
  else if (!is_json)
    call.status = ToolCallStatus::kInvalidJson;
  return call;
}

std::vector<ToolBlock> read_section(const TokenText& text, std::size_t begin, ToolSyntax syntax) {
  const bool is_kimi = syntax == ToolSyntax::kKimi;
  const SectionMarks& marks = is_kimi ? kKimiMarks : kDeepSeekMarks;
  std::vector<ToolBlock> blocks;
  const std::size_t inside = begin + marks.begin.size();
  const std::size_t end = std::min(text.find(marks.end, inside), text.size());
  for (std::size_t at = text.find(marks.call, inside, end); at != kNowhere;) {
    const std::size_t head = at + marks.call.size();
    const std::size_t separator = is_kimi ? text.find(marks.separator, head, end) : head;
    if (separator == kNowhere) {
      ParsedToolCall call;
      call.raw = text.text(head, end);
      call.status = ToolCallStatus::kMalformed;
      blocks.push_back({at, end, {std::move(call)}});
      break;
    }
    const std::size_t close = text.find(marks.call_end, separator, end);
    const bool is_unclosed = close == kNowhere;
    const std::size_t call_end = std::min(close, end);
    const std::size_t block_end = is_unclosed ? end : close + marks.call_end.size();
    blocks.push_back({at, block_end, {}});
    blocks.back().calls.push_back(is_kimi ? read_kimi_call(text, head, separator, call_end, is_unclosed)
                                          : read_deepseek_call(text, head, call_end, is_unclosed, syntax == ToolSyntax::kDeepSeek31));
    at = is_unclosed ? kNowhere : text.find(marks.call, block_end, end);
  }
  return blocks;
}

}  // namespace

std::string_view tool_open_mark(ToolSyntax syntax) noexcept {
  switch (syntax) {
    case ToolSyntax::kHarmony:
    case ToolSyntax::kNone: return {};
    case ToolSyntax::kHermes:
    case ToolSyntax::kXml:
    case ToolSyntax::kGlm: return kToolOpen;
    case ToolSyntax::kMiniMax: return kMiniMaxOpen;
    case ToolSyntax::kDeepSeek:
    case ToolSyntax::kDeepSeek31: return kDeepSeekMarks.begin;
    case ToolSyntax::kKimi: return kKimiMarks.begin;
  }
  return {};
}

std::optional<ToolSyntax> tool_syntax_of(std::string_view parser) noexcept {
  for (const auto& [name, syntax] : kParsers)
    if (name == parser) return syntax;
  return std::nullopt;
}

std::vector<ToolBlock> read_tool_blocks(const TokenText& text, std::size_t begin, const json::array& tools, ToolSyntax syntax) {
  std::vector<ToolBlock> blocks;
  if (tool_open_mark(syntax).empty()) return blocks;
  const std::string_view mark = tool_open_mark(syntax);
  std::size_t at = text.find(mark, begin);
  if (at == kNowhere) return blocks;
  if (syntax == ToolSyntax::kDeepSeek || syntax == ToolSyntax::kDeepSeek31 || syntax == ToolSyntax::kKimi)
    return read_section(text, at, syntax);
  for (; at != kNowhere; at = text.find(mark, blocks.back().end)) blocks.push_back(read_block(text, at, tools, syntax));
  return blocks;
}

void read_call_members(const std::vector<RawMember>& members, std::initializer_list<std::string_view> argument_names,
                       ParsedToolCall& call) {
  call.arguments = json::object();
  call.arguments_text = "{}";
  const auto decode = [](std::string_view raw) {
    try {
      return parse_json(replace_lone_surrogates(raw));
    } catch (const Error&) {
      return json::value();
    }
  };
  for (const RawMember& member : members) {  // of equal names the last wins, as in Python
    if (member.key == "name") {
      const json::value name = decode(member.value);
      call.name = name.is_string() ? std::string(name.get_string().data(), name.get_string().size()) : "";
    } else if (std::find(argument_names.begin(), argument_names.end(), member.key) != argument_names.end()) {
      call.arguments = decode(member.value);
      call.arguments_text = member.value;
    }
  }
}

bool read_json_arguments(std::string arguments, ParsedToolCall& call) {
  call.arguments_text = std::move(arguments);
  try {
    call.arguments = parse_json(replace_lone_surrogates(call.arguments_text));
    return true;
  } catch (const Error&) {
    call.arguments = json::string(call.arguments_text);
    return false;
  }
}

std::string new_call_id() {
  static const std::uint64_t kProcess = std::random_device()() * std::uint64_t{0x100000001} ^ std::random_device()();
  static std::atomic<std::uint64_t> next{1};
  return fmt::format("call_{:016x}{:08x}", kProcess, static_cast<std::uint32_t>(next.fetch_add(1)));
}

}  // namespace prl::text::renderers

namespace prl::text {

std::vector<std::string_view> tool_parser_names() {
  std::vector<std::string_view> names;
  for (const auto& parser : renderers::kParsers) names.push_back(parser.first);
  return names;
}

std::string_view tool_parser_of_template(std::string_view chat_template) noexcept {
  const auto writes = [&](std::string_view mark) { return chat_template.find(mark) != std::string_view::npos; };
  if (writes("<|channel|>") && writes("<|call|>")) return "openai";
  if (writes(renderers::kMiniMaxOpen)) return "minimax_m2";
  if (writes(renderers::kKimiMarks.begin)) return "kimi_k2";
  if (writes(renderers::kDeepSeekMarks.begin)) return writes("```json") ? "deepseek_v3" : "deepseek_v31";
  if (!writes(renderers::kToolOpen)) return {};
  return writes("<function=") ? "qwen3_coder" : writes("<arg_key>") ? "glm45" : "hermes";
}

}  // namespace prl::text
