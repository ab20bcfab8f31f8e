#include "server/call_form.hpp"

#include <string_view>
#include <utility>

namespace prl::server {

std::optional<CallForm> call_form_of(const text::Tokenizer& tokenizer, const text::Renderer& renderer) {
  static constexpr std::pair<CallForm, std::string_view> kProbes[] = {
      {CallForm::kTagged, "<tool_call>\n{\"name\": \"probe\", \"arguments\": {}}\n</tool_call>"},
      {CallForm::kHarmony, "<|start|>assistant to=functions.probe<|channel|>commentary json<|message|>{}<|call|>"},
      {CallForm::kKimi,
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.probe:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>"},
      {CallForm::kDeepSeek,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>probe\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {CallForm::kDeepSeek31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>probe<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
  };
  for (const auto& [form, text] : kProbes) {
    const auto parsed = renderer.parse_response(tokenizer.encode(text));
    if (parsed.tool_calls.size() == 1 && parsed.tool_calls.front().name == "probe" &&
        parsed.tool_calls.front().status == text::ToolCallStatus::kOk && parsed.tool_calls.front().arguments_text == "{}")
      return form;
  }
  return std::nullopt;
}

}  // namespace prl::server
