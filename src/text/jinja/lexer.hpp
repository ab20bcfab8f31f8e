#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.hpp"

namespace prl::text::jinja {

enum class TokenType : std::uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd
};

struct Token {
  TokenType type;
  std::string text;  ///< data, name, operator or the unescaped string
  Value number;      ///< of kInteger and kFloat
  int line;
};

/// Cuts a template into tokens with trim_blocks and lstrip_blocks on, as transformers sets them.
/// Error{kInvalidArgument} naming the line. Source: jinja2/lexer.py.
std::vector<Token> tokenize(std::string_view source);

/// "[chat template] line N: message".
[[noreturn]] void fail_at(int line, const std::string& message);

}  // namespace prl::text::jinja
