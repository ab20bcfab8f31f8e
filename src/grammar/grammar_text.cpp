#include "grammar/grammar_text.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "grammar/char_class.hpp"
#include "grammar/regex.hpp"
#include "text/utf8.hpp"

namespace prl::grammar {
namespace {

constexpr int kMaxGroups = 100;

/// The right side of a rule.
struct Expr {
  enum class Kind { kConcat, kAlternate, kRepeat, kPattern, kRule };
  Kind kind = Kind::kConcat;  ///< kConcat without parts: the empty text
  std::vector<Expr> parts = {};
  int min_count = 0, max_count = 0;  ///< kRepeat of the one part; max_count -1: no bound
  Regex pattern = {};                ///< kPattern
  std::string name = {};             ///< kRule
  bool is_token = false;             ///< kPattern: what %ignore names may stand before it
};

Expr of_chars(CharClass chars, bool is_token) {
  return Expr{.kind = Expr::Kind::kPattern, .pattern = Regex{.kind = Regex::Kind::kChar, .chars = std::move(chars)}, .is_token = is_token};
}

struct Grammar {
  std::map<std::string, Expr, std::less<>> rules;
  std::string start;
  std::vector<Expr> ignored;
};

/// What both languages share: a place in the text, errors, names, counts.
class GrammarReader {
 public:
  GrammarReader(std::string_view source, bool names_have_dashes) : source_(source), names_have_dashes_(names_have_dashes) {}

 protected:
  [[noreturn]] void error(std::string_view what) const {
    const auto line =
        std::count(source_.begin(), source_.begin() + static_cast<std::ptrdiff_t>(std::min(place_, source_.size())), '\n') + 1;
    fail(ErrorCode::kInvalidArgument, "grammar, line {}: {}", line, what);
  }
  bool at_end() const { return place_ >= source_.size(); }
  char peek(std::size_t ahead = 0) const { return place_ + ahead < source_.size() ? source_[place_ + ahead] : '\0'; }
  bool accept(std::string_view text) {
    if (!source_.substr(std::min(place_, source_.size())).starts_with(text)) return false;
    place_ += text.size();
    return true;
  }
  bool is_name_char(char c) const { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || (c == '-' && names_have_dashes_); }
  std::string name() {
    const std::size_t begin = place_;
    while (is_name_char(peek())) ++place_;
    if (place_ == begin) error(at_end() ? "wanted a name, found the end" : fmt::format("wanted a name, found '{}'", character()));
    return std::string(source_.substr(begin, place_ - begin));
  }
  /// The one at place_, whole.
  std::string_view character() const {
    std::size_t end = place_;
    text::next_code_point(source_, end);
    return source_.substr(place_, end - place_);
  }
  int number() {
    int value = 0;
    if (!std::isdigit(static_cast<unsigned char>(peek()))) error("wanted a number");
    while (std::isdigit(static_cast<unsigned char>(peek()))) {
      value = value * 10 + (source_[place_++] - '0');
      if (value > Regex::kMaxCount) error(fmt::format("a repeat count is above {}", Regex::kMaxCount));
    }
    return value;
  }
  std::uint32_t code_point() {
    if (at_end()) error("the grammar ends too early");
    return text::next_code_point(source_, place_);
  }
  std::uint32_t escaped() {
    const std::uint32_t c = code_point();
    const auto hex = [&](int digits) {
      std::uint32_t value = 0;
      for (int i = 0; i < digits; ++i, ++place_) {
        if (!std::isxdigit(static_cast<unsigned char>(peek()))) error("a hexadecimal digit is missing");
        const char digit = static_cast<char>(std::tolower(static_cast<unsigned char>(peek())));
        value = value * 16 + static_cast<std::uint32_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
      }
      if (value > CharClass::kLast || (value >= 0xD800 && value <= 0xDFFF)) error("this is no character");
      return value;
    };
    switch (c) {
      case 'n': return '\n';
      case 't': return '\t';
      case 'r': return '\r';
      case 'f': return '\f';
      case 'x': return hex(2);
      case 'u': return hex(4);
      case 'U': return hex(8);
      default: return c;
    }
  }
  /// Behind the opening quote, to behind the closing one.
  std::vector<std::uint32_t> literal() {
    std::vector<std::uint32_t> out;
    while (peek() != '"') {
      if (at_end() || peek() == '\n') error("a literal is not closed");
      const bool is_escaped = accept("\\");
      out.push_back(is_escaped ? escaped() : code_point());
    }
    ++place_;
    return out;
  }
  static Expr text_of(const std::vector<std::uint32_t>& characters, bool ignores_case) {
    Expr out{.kind = Expr::Kind::kPattern, .pattern = Regex{.kind = Regex::Kind::kConcat}, .is_token = true};
    for (const std::uint32_t c : characters) {
      CharClass chars(c, c);
      if (ignores_case && c < 128 && std::isalpha(static_cast<int>(c))) chars.add(c ^ 0x20, c ^ 0x20);
      out.pattern.parts.push_back(Regex{.kind = Regex::Kind::kChar, .chars = std::move(chars)});
    }
    return out;
  }
  static Expr repeated(Expr what, int min_count, int max_count) {
    Expr out{.kind = Expr::Kind::kRepeat, .min_count = min_count, .max_count = max_count};
    out.parts.push_back(std::move(what));
    return out;
  }

  std::string_view source_;
  bool names_have_dashes_;
  std::size_t place_ = 0;
};

class GbnfReader : public GrammarReader {
 public:
  explicit GbnfReader(std::string_view source) : GrammarReader(source, true) {}
  Grammar read() {
    Grammar out;
    out.start = "root";
    for (skip(true); !at_end(); skip(true)) {
      std::string rule = name();
      skip(false);
      if (!accept("::=")) error(fmt::format("wanted '::=' behind the name {}", rule));
      skip(true);
      if (!out.rules.emplace(rule, alternatives(0)).second) error(fmt::format("{} is defined twice", rule));
    }
    return out;
  }

 private:
  void skip(bool with_lines) {
    for (;; ++place_) {
      if (peek() == '#')
        while (!at_end() && peek() != '\n') ++place_;
      const bool is_blank = peek() == ' ' || peek() == '\t' || (with_lines && (peek() == '\n' || peek() == '\r'));
      if (at_end() || !is_blank) return;
    }
  }
  Expr alternatives(int nesting) {
    if (nesting > kMaxGroups) error("groups nest too deep");
    Expr out{.kind = Expr::Kind::kAlternate};
    do {
      skip(true);
      out.parts.push_back(sequence(nesting));
    } while (accept("|"));
    return out;
  }
  Expr sequence(int nesting) {
    Expr out;
    for (;;) {
      skip(nesting > 0);
      const std::size_t before = place_;
      if (nesting == 0) {
        // An alternative may go on in the next line, if that does not begin a rule.
        skip(true);
        if (peek() == '|') return out;
        place_ = before;
      }
      const char c = peek();
      if (at_end() || c == '|' || c == ')' || c == '\n' || c == '\r') return out;
      out.parts.push_back(quantified(nesting));
    }
  }
  Expr quantified(int nesting) {
    Expr out = atom(nesting);
    for (;;) {
      if (accept("*"))
        out = repeated(std::move(out), 0, -1);
      else if (accept("+"))
        out = repeated(std::move(out), 1, -1);
      else if (accept("?"))
        out = repeated(std::move(out), 0, 1);
      else if (accept("{")) {
        const int low = peek() == ',' ? 0 : number();
        const bool has_comma = accept(",");
        const int high = !has_comma ? low : peek() == '}' ? -1 : number();
        if (!accept("}")) error("wanted '}' behind a repeat count");
        if (high >= 0 && high < low) error("repeat counts are in the wrong order");
        out = repeated(std::move(out), low, high);
      } else {
        return out;
      }
    }
  }
  Expr atom(int nesting) {
    if (accept("(")) {
      Expr out = alternatives(nesting + 1);
      skip(true);
      if (!accept(")")) error("a group is not closed");
      return out;
    }
    if (accept("\"")) return text_of(literal(), false);
    if (accept("[")) return of_chars(bracket(), true);
    if (accept(".")) return of_chars(CharClass(0, CharClass::kLast), true);
    return Expr{.kind = Expr::Kind::kRule, .name = name()};
  }
  CharClass bracket() {
    const bool is_negated = accept("^");
    CharClass out;
    const auto item = [&] {
      const bool is_escaped = accept("\\");
      return is_escaped ? escaped() : code_point();
    };
    while (peek() != ']') {
      if (at_end()) error("a class is not closed");
      const std::uint32_t first = item();
      std::uint32_t last = first;
      if (peek() == '-' && peek(1) != ']') {
        ++place_;
        last = item();
      }
      if (last < first) error("a range is in the wrong order");
      out.add(first, last);
    }
    ++place_;
    return is_negated ? out.complement() : out;
  }
};

/// Terminals of Lark's own library, as expressions.
constexpr std::pair<std::string_view, std::string_view> kCommonTerminals[] = {
    {"DIGIT", "[0-9]"},
    {"HEXDIGIT", "[0-9a-fA-F]"},
    {"INT", "[0-9]+"},
    {"SIGNED_INT", "[+-]?[0-9]+"},
    {"DECIMAL", "[0-9]+\\.[0-9]*|\\.[0-9]+"},
    {"FLOAT", "[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?"},
    {"SIGNED_FLOAT", "[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)"},
    {"NUMBER", "[0-9]+|[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?"},
    {"SIGNED_NUMBER", "[+-]?([0-9]+|[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)"},
    {"ESCAPED_STRING", "\"([^\"\\\\\\n]|\\\\[^\\n])*\""},
    {"LCASE_LETTER", "[a-z]"},
    {"UCASE_LETTER", "[A-Z]"},
    {"LETTER", "[a-zA-Z]"},
    {"WORD", "[a-zA-Z]+"},
    {"CNAME", "[_a-zA-Z][_a-zA-Z0-9]*"},
    {"WS_INLINE", "[ \\t]+"},
    {"WS", "[ \\t\\f\\r\\n]+"},
    {"CR", "\\r"},
    {"LF", "\\n"},
    {"NEWLINE", "(\\r?\\n)+"},
};

class LarkReader : public GrammarReader {
 public:
  explicit LarkReader(std::string_view source) : GrammarReader(source, false) {}
  Grammar read() {
    out_.start = "start";
    for (skip_lines(); !at_end(); skip_lines()) {
      if (accept("%"))
        directive();
      else
        definition();
    }
    return std::move(out_);
  }

 private:
  void skip() {
    while (peek() == ' ' || peek() == '\t') ++place_;
    if ((peek() == '/' && peek(1) == '/') || peek() == '#')
      while (!at_end() && peek() != '\n') ++place_;
  }
  void skip_lines() {
    for (skip(); peek() == '\n' || peek() == '\r'; skip()) ++place_;
  }
  /// True, and there, if what follows (perhaps in a later line) is `text`.
  bool accept_below(std::string_view text) {
    const std::size_t before = place_;
    skip_lines();
    if (accept(text)) return true;
    place_ = before;
    return false;
  }
  static bool is_terminal(std::string_view name) {
    const auto letter = name.find_first_not_of('_');
    return letter != std::string_view::npos && std::isupper(static_cast<unsigned char>(name[letter]));
  }
  void define(const std::string& name, Expr expr) {
    if (!out_.rules.emplace(name, std::move(expr)).second) error(fmt::format("{} is defined twice", name));
  }
  void definition() {
    while (peek() == '?' || peek() == '!') ++place_;
    const std::string rule = name();
    if (peek() == '{') error("templates are not supported");
    if (accept(".")) number();
    skip();
    if (!accept(":")) error(fmt::format("wanted ':' behind the name {}", rule));
    in_terminal_ = is_terminal(rule);
    define(rule, alternatives(0));
    skip();
    if (!at_end() && peek() != '\n' && peek() != '\r') error(fmt::format("'{}' does not belong here", character()));
  }
  void directive() {
    const std::string what = name();
    skip();
    if (what == "ignore") {
      in_terminal_ = true;
      out_.ignored.push_back(alternatives(0));
      return;
    }
    if (what != "import") error(fmt::format("the directive %{} is not supported", what));
    if (!accept("common.")) error("only terminals of `common` can be imported");
    const auto import_one = [&] {
      const std::string terminal = name();
      const auto* known = std::find_if(std::begin(kCommonTerminals), std::end(kCommonTerminals),
                                       [&](const auto& entry) { return entry.first == terminal; });
      if (known == std::end(kCommonTerminals)) error(fmt::format("common.{} is not known", terminal));
      skip();
      std::string alias = terminal;
      if (accept("->")) {
        skip();
        alias = name();
      }
      define(alias, Expr{.kind = Expr::Kind::kPattern, .pattern = parse_regex(known->second)});
    };
    import_one();
  }
  Expr alternatives(int nesting) {
    if (nesting > kMaxGroups) error("groups nest too deep");
    Expr out{.kind = Expr::Kind::kAlternate};
    accept_below("|");
    do {
      out.parts.push_back(sequence(nesting));
    } while (accept_below("|"));
    return out;
  }
  Expr sequence(int nesting) {
    Expr out;
    for (;;) {
      skip();
      if (nesting > 0) skip_lines();
      const char c = peek();
      if (at_end() || c == '|' || c == ')' || c == ']' || c == '\n' || c == '\r') return out;
      if (accept("->")) {
        skip();
        name();
        continue;
      }
      out.parts.push_back(quantified(nesting));
    }
  }
  Expr quantified(int nesting) {
    Expr out = atom(nesting);
    for (;;) {
      skip();
      if (accept("*")) {
        out = repeated(std::move(out), 0, -1);
      } else if (accept("+")) {
        out = repeated(std::move(out), 1, -1);
      } else if (accept("?")) {
        out = repeated(std::move(out), 0, 1);
      } else if (accept("~")) {
        skip();
        const int low = number();
        skip();
        const int high = accept("..") ? number() : low;
        if (high < low) error("repeat counts are in the wrong order");
        out = repeated(std::move(out), low, high);
      } else {
        return out;
      }
    }
  }
  Expr atom(int nesting) {
    if (accept("(")) return group(nesting, ")");
    if (accept("[")) return repeated(group(nesting, "]"), 0, 1);
    if (accept("\"")) return quoted();
    if (accept("/")) return expression();
    std::string rule = name();
    if (peek() == '{') error("templates are not supported");
    const bool is_token = !in_terminal_ && is_terminal(rule);
    return Expr{.kind = Expr::Kind::kRule, .name = std::move(rule), .is_token = is_token};
  }
  Expr group(int nesting, std::string_view end) {
    Expr out = alternatives(nesting + 1);
    if (!accept_below(end)) error(fmt::format("wanted '{}'", end));
    return out;
  }
  Expr quoted() {
    const std::vector<std::uint32_t> first = literal();
    if (accept("..")) {
      if (!accept("\"")) error("wanted the end of a range");
      const std::vector<std::uint32_t> last = literal();
      if (first.size() != 1 || last.size() != 1 || last[0] < first[0]) error("a range goes from one character to a later one");
      return of_chars(CharClass(first[0], last[0]), !in_terminal_);
    }
    Expr out = text_of(first, accept("i"));
    out.is_token = !in_terminal_;
    return out;
  }
  Expr expression() {
    const std::size_t begin = place_;
    for (; peek() != '/'; ++place_) {
      if (at_end() || peek() == '\n') error("an expression is not closed");
      if (peek() == '\\') ++place_;
    }
    const std::string_view pattern = source_.substr(begin, place_ - begin);
    ++place_;
    if (std::isalpha(static_cast<unsigned char>(peek()))) error("flags of expressions are not supported; write the letters of both cases");
    return Expr{.kind = Expr::Kind::kPattern, .pattern = parse_regex(pattern), .is_token = !in_terminal_};
  }

  Grammar out_;
  bool in_terminal_ = false;
};

class GrammarEmitter {
 public:
  GrammarEmitter(AutomatonBuilder& builder, const Grammar& grammar) : builder_(builder), grammar_(grammar) {}

  NodeId emit(NodeId from) {
    if (!grammar_.rules.count(grammar_.start))
      fail(ErrorCode::kInvalidArgument, "grammar: there is no rule {}, where texts begin", grammar_.start);
    const Expr start{.kind = Expr::Kind::kRule, .name = grammar_.start};
    const NodeId end = emit_ignored(emit_expr(from, start));
    while (!unfilled_.empty()) {
      const auto [rule, expr] = unfilled_.back();
      unfilled_.pop_back();
      builder_.add_empty(emit_expr(builder_.rule_start(rule), *expr), builder_.rule_accept(rule));
    }
    return end;
  }

 private:
  NodeId emit_expr(NodeId from, const Expr& expr) {
    switch (expr.kind) {
      case Expr::Kind::kConcat:
        for (const Expr& part : expr.parts) from = emit_expr(from, part);
        return from;
      case Expr::Kind::kAlternate: {
        const NodeId to = builder_.add_node();
        for (const Expr& part : expr.parts) builder_.add_empty(emit_expr(fresh(from), part), to);
        return to;
      }
      case Expr::Kind::kRepeat: return emit_repeat(from, expr);
      case Expr::Kind::kPattern:
        if (expr.is_token) from = emit_ignored(from);
        return emit_regex(builder_, from, expr.pattern, Spelling::kPlain, Anchoring::kFull);
      case Expr::Kind::kRule: break;
    }
    if (expr.is_token) from = emit_ignored(from);
    return builder_.emit_call(from, rule_of(expr.name));
  }
  NodeId emit_repeat(NodeId from, const Expr& expr) {
    const Expr& body = expr.parts.front();
    for (int i = 0; i < expr.min_count; ++i) from = emit_expr(from, body);
    if (expr.max_count < 0) {
      const NodeId loop = fresh(from);
      builder_.add_empty(emit_expr(loop, body), loop);
      return fresh(loop);
    }
    const NodeId end = builder_.add_node();
    for (int i = expr.min_count; i < expr.max_count; ++i) {
      from = fresh(from);
      builder_.add_empty(from, end);
      from = emit_expr(from, body);
    }
    builder_.add_empty(from, end);
    return end;
  }
  NodeId fresh(NodeId from) {
    const NodeId node = builder_.add_node();
    builder_.add_empty(from, node);
    return node;
  }
  /// Any number of what %ignore names.
  NodeId emit_ignored(NodeId from) {
    if (grammar_.ignored.empty()) return from;
    if (!ignored_) {
      ignored_ = builder_.add_rule();
      const NodeId loop = fresh(builder_.rule_start(*ignored_));
      for (const Expr& expr : grammar_.ignored) builder_.add_empty(emit_expr(fresh(loop), expr), loop);
      builder_.add_empty(loop, builder_.rule_accept(*ignored_));
    }
    return builder_.emit_call(from, *ignored_);
  }
  RuleId rule_of(const std::string& name) {
    const auto found = rules_.find(name);
    if (found != rules_.end()) return found->second;
    const auto rule = grammar_.rules.find(name);
    if (rule == grammar_.rules.end()) fail(ErrorCode::kInvalidArgument, "grammar: the name {} is used and not defined", name);
    const RuleId id = builder_.add_rule();
    rules_.emplace(name, id);
    unfilled_.emplace_back(id, &rule->second);
    return id;
  }

  AutomatonBuilder& builder_;
  const Grammar& grammar_;
  std::map<std::string, RuleId, std::less<>> rules_;
  std::vector<std::pair<RuleId, const Expr*>> unfilled_;  // rules that were referred to and have no text yet
  std::optional<RuleId> ignored_;
};

}  // namespace

NodeId emit_grammar(AutomatonBuilder& builder, NodeId from, std::string_view grammar) {
  if (grammar.size() > kMaxGrammarBytes)
    fail(ErrorCode::kInvalidArgument, "grammar: {} bytes, at most {} are allowed", grammar.size(), kMaxGrammarBytes);
  if (!text::is_valid_utf8(grammar)) fail(ErrorCode::kInvalidArgument, "grammar: not valid UTF-8");
  const bool is_gbnf = grammar.find("::=") != std::string_view::npos;
  const Grammar read = is_gbnf ? GbnfReader(grammar).read() : LarkReader(grammar).read();
  return GrammarEmitter(builder, read).emit(from);
}

}  // namespace prl::grammar
