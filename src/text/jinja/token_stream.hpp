#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/lexer.hpp"

namespace prl::text::jinja {

using Words = std::initializer_list<std::string_view>;

/// A cursor over the tokens of a template. What is expected and not there fails with Error{kInvalidArgument} naming the line.
class TokenStream {
 public:
  explicit TokenStream(std::string_view source) : tokens_(tokenize(source)) {}

  const Token& current() const { return tokens_[position_]; }
  const Token& look() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  /// The current token; the last one, kEnd, stays.
  const Token& take();
  bool at(TokenType type) const { return current().type == type; }
  bool at_op(std::string_view text) const { return at(TokenType::kOperator) && current().text == text; }
  bool at_name(std::string_view text) const { return at(TokenType::kName) && current().text == text; }
  bool at_any_name(Words words) const;
  /// The end of a tuple without parentheses, which one of `end_words` may mark too.
  bool at_tuple_end(Words end_words) const;
  bool skip_op(std::string_view text) { return at_op(text) && (take(), true); }
  bool skip_name(std::string_view text) { return at_name(text) && (take(), true); }

  [[noreturn]] void fail_here(const std::string& message) const { fail_at(current().line, message); }
  void expect(TokenType type, std::string_view what);
  void expect_op(std::string_view text);
  std::string expect_name();
  void expect_word(std::string_view word);

  /// Counts one level of nested expressions or blocks for as long as it lives; fails beyond a fixed number.
  class Nesting {
   public:
    explicit Nesting(TokenStream& tokens);
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;
    ~Nesting() { --tokens_.nesting_; }

   private:
    TokenStream& tokens_;
  };

 private:
  std::vector<Token> tokens_;
  std::size_t position_ = 0;
  int nesting_ = 0;
};

/// A token as messages name it.
std::string describe(const Token& token);

}  // namespace prl::text::jinja
