#include "text/jinja/token_stream.hpp"

#include <fmt/format.h>

namespace prl::text::jinja {
namespace {

// Nesting of expressions and blocks that is accepted; Python's own limit is of the same order.
constexpr int kMaxNesting = 150;

}  // namespace

std::string describe(const Token& token) {
  switch (token.type) {
    case TokenType::kData: return "template text";
    case TokenType::kVariableBegin: return "begin of print statement";
    case TokenType::kVariableEnd: return "end of print statement";
    case TokenType::kBlockBegin: return "begin of statement block";
    case TokenType::kBlockEnd: return "end of statement block";
    case TokenType::kEnd: return "end of template";
    case TokenType::kString: return "string";
    default: return token.text;
  }
}

const Token& TokenStream::take() {
  const Token& token = tokens_[position_];
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool TokenStream::at_any_name(Words words) const {
  return at(TokenType::kName) && std::find(words.begin(), words.end(), current().text) != words.end();
}

bool TokenStream::at_tuple_end(Words end_words) const {
  return at(TokenType::kVariableEnd) || at(TokenType::kBlockEnd) || at_op(")") || at_any_name(end_words);
}

void TokenStream::expect(TokenType type, std::string_view what) {
  if (!at(type)) fail_here(fmt::format("expected token '{}', got '{}'", what, describe(current())));
  take();
}

void TokenStream::expect_op(std::string_view text) {
  if (!skip_op(text)) fail_here(fmt::format("expected token '{}', got '{}'", text, describe(current())));
}

std::string TokenStream::expect_name() {
  if (!at(TokenType::kName)) fail_here(fmt::format("expected token 'name', got '{}'", describe(current())));
  return take().text;
}

void TokenStream::expect_word(std::string_view word) {
  if (!skip_name(word)) fail_here(fmt::format("expected token '{}', got '{}'", word, describe(current())));
}

TokenStream::Nesting::Nesting(TokenStream& tokens) : tokens_(tokens) {
  if (++tokens.nesting_ > kMaxNesting) tokens.fail_here(fmt::format("nested deeper than {} levels", kMaxNesting));
}

}  // namespace prl::text::jinja
