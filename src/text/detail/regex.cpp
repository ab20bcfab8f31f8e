#include "text/detail/regex.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <utility>

#include "base/error.hpp"

namespace prl::text::detail {
namespace {

// Far above what real patterns need per match, low enough that a hostile pattern ends within seconds.
constexpr std::uint32_t kMatchLimit = 50'000'000;
constexpr std::size_t kMaxPatternBytes = 64 * 1024;
constexpr std::size_t kJitStackMax = std::size_t{64} << 20;

// White_Space, as Oniguruma's \s; PCRE2's own \s also holds U+180E.
constexpr std::string_view kSpaceClass = R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kWordClass = R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc})";
constexpr std::string_view kHexClass = "0-9A-Fa-f";

}  // namespace

std::string translate_oniguruma(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escape = pattern[++i];
      std::string_view expansion;
      if (escape == 's' || escape == 'S') expansion = kSpaceClass;
      if (escape == 'w' || escape == 'W') expansion = kWordClass;
      if (escape == 'h' || escape == 'H') expansion = kHexClass;
      const bool negated = escape == 'S' || escape == 'W' || escape == 'H';
      if (expansion.empty() || (in_class && negated))
        out.append({c, escape});
      else if (in_class)
        out.append(expansion);
      else
        out.append(negated ? "[^" : "[").append(expansion).append("]");
      continue;
    }
    if (c == '[' && !in_class) {
      in_class = true;
      out.push_back(c);
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out.push_back(pattern[++i]);
      // A bracket directly after the opening stands for itself.
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') out.append("\\").push_back(pattern[++i]);
      continue;
    }
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool has_jit = false;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, std::string_view where) : code_(std::make_unique<Code>()) {
  if (pattern.size() > kMaxPatternBytes)
    fail(ErrorCode::kCorrupt, "{}: pattern of {} bytes, at most {} are accepted", where, pattern.size(), kMaxPatternBytes);
  const std::string translated = translate_oniguruma(pattern);
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE position = 0;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &position, context.get());
  if (code_->code == nullptr) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(error, message, sizeof message);
    fail(ErrorCode::kCorrupt, "{}: '{}' is no valid pattern: {} near position {}", where, pattern,
         reinterpret_cast<const char*>(message), position);
  }
  code_->has_jit = pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE) == 0;
}

Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

struct Regex::Scan::State {
  const Code* code;
  std::string_view text;
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  std::size_t position = 0;
  bool is_done = false;

  ~State() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
  int run() {
    return pcre2_match(code->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position, PCRE2_NO_UTF_CHECK,
                       match, context);
  }
};

Regex::Scan::Scan(const Regex& regex, std::string_view text) : state_(std::make_unique<State>()) {
  state_->code = regex.code_.get();
  state_->text = text.data() == nullptr ? std::string_view("") : text;
  state_->match = pcre2_match_data_create_from_pattern(regex.code_->code, nullptr);
  state_->context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(state_->context, kMatchLimit);
}
Regex::Scan::~Scan() = default;

bool Regex::Scan::next(std::size_t& begin, std::size_t& end) {
  State& s = *state_;
  if (s.is_done || s.position > s.text.size()) return false;
  int rc = s.run();
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT && s.stack == nullptr) {
    s.stack = pcre2_jit_stack_create(std::size_t{1} << 20, kJitStackMax, nullptr);
    pcre2_jit_stack_assign(s.context, nullptr, s.stack);
    rc = s.run();
  }
  if (rc == PCRE2_ERROR_NOMATCH) {
    s.is_done = true;
    return false;
  }
  if (rc < 0) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(rc, message, sizeof message);
    fail(ErrorCode::kInvalidArgument, "[tokenizer] the pre-tokenizer's pattern gave up at byte {} of a text of {} bytes: {}",
         s.position, s.text.size(), reinterpret_cast<const char*>(message));
  }
  const PCRE2_SIZE* vector = pcre2_get_ovector_pointer(s.match);
  begin = vector[0];
  end = vector[1];
  s.position = end;
  if (begin == end) {  // an empty match: go on behind the next character
    ++s.position;
    while (s.position < s.text.size() && (static_cast<unsigned char>(s.text[s.position]) & 0xC0) == 0x80) ++s.position;
  }
  return true;
}

}  // namespace prl::text::detail
