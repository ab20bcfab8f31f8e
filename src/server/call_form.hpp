#pragma once

#include <cstdint>
#include <optional>

#include "text/renderer.hpp"
#include "text/tokenizer.hpp"

namespace prl::server {

/// How a model writes calls whose arguments are JSON, which is what a forced tool_choice needs.
enum class CallForm : std::uint8_t {
  kTagged,      ///< <tool_call>{"name": ..., "arguments": ...}</tool_call> of Qwen3, SmolLM2 and others (Hermes)
  kHarmony,     ///< gpt-oss: a message of the commentary channel to functions.NAME
  kKimi,        ///< Kimi K2: a section of calls with ids "functions.NAME:INDEX"
  kDeepSeek,    ///< DeepSeek V3 and R1: a section of calls with arguments in a fence of JSON
  kDeepSeek31,  ///< DeepSeek V3.1: a section of calls with arguments behind the name
};

/// The form that the renderer's parser reads; nullopt if it reads none of these.
std::optional<CallForm> call_form_of(const text::Tokenizer& tokenizer, const text::Renderer& renderer);

}  // namespace prl::server
