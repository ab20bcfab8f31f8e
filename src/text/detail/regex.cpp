#include "text/detail/regex.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::text::detail {
namespace {

// Far above what real patterns need per match, low enough that a hostile pattern ends within seconds.
constexpr std::uint32_t kMatchLimit = 50'000'000;
constexpr std::size_t kMaxPatternBytes = 64 * 1024;
constexpr std::size_t kJitStackMax = std::size_t{64} << 20;

// White_Space, as Oniguruma's \s; PCRE2's own \s also holds U+180E.
constexpr std::string_view kSpaceClass =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kHexClass = "0-9A-Fa-f";

// Characters assigned between the Unicode version of PCRE2 10.42 (14) and that of the Oniguruma in `tokenizers` (16), which
// a property must match too. Measured by matching every code point with \p{...} through `tokenizers` 0.23.
#define PRL_NEW_LU R"(\x{1C89}\x{A7CB}-\x{A7CC}\x{A7DA}\x{A7DC}\x{10D50}-\x{10D65})"
#define PRL_NEW_LL R"(\x{1C8A}\x{A7CD}\x{A7DB}\x{10D70}-\x{10D85}\x{1DF25}-\x{1DF2A})"
#define PRL_NEW_LM R"(\x{10D4E}\x{10D6F}\x{16D40}-\x{16D42}\x{16D6B}-\x{16D6C}\x{1E030}-\x{1E06D}\x{1E4EB})"
#define PRL_NEW_LO                                                                                                       \
  R"(\x{105C0}-\x{105F3}\x{10D4A}-\x{10D4D}\x{10D4F}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B})" \
  R"(\x{1138E}\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"            \
  R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16D43}-\x{16D6A})"          \
  R"(\x{18CFF}\x{1B132}\x{1B155}\x{1E4D0}-\x{1E4EA}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D})"            \
  R"(\x{31350}-\x{323AF})"
#define PRL_NEW_M                                                                                                        \
  R"(\x{897}\x{CF3}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241}\x{113B8}-\x{113C0}\x{113C2}\x{113C5})"         \
  R"(\x{113C7}-\x{113CA}\x{113CC}-\x{113D0}\x{113D2}\x{113E1}-\x{113E2}\x{11F00}-\x{11F01}\x{11F03}\x{11F34}-\x{11F3A})" \
  R"(\x{11F3E}-\x{11F42}\x{11F5A}\x{13440}\x{13447}-\x{13455}\x{1611E}-\x{1612F}\x{1E08F}\x{1E4EC}-\x{1E4EF})"           \
  R"(\x{1E5EE}-\x{1E5EF})"
#define PRL_NEW_N                                                                                      \
  R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})" \
  R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})"

struct Property {
  std::string_view name, members;
};
constexpr Property kProperties[] = {
    {"L", R"(\p{L})" PRL_NEW_LU PRL_NEW_LL PRL_NEW_LM PRL_NEW_LO},
    {"Lu", R"(\p{Lu})" PRL_NEW_LU},
    {"Ll", R"(\p{Ll})" PRL_NEW_LL},
    {"Lm", R"(\p{Lm})" PRL_NEW_LM},
    {"Lo", R"(\p{Lo})" PRL_NEW_LO},
    {"M", R"(\p{M})" PRL_NEW_M},
    {"N", R"(\p{N})" PRL_NEW_N},
};
// Of a script's name Oniguruma takes the characters of that script, PCRE2 also those that several scripts use ("。" is no Han): sc: says
// so.
constexpr std::string_view kScripts[] = {"Arabic",   "Armenian", "Bengali",  "Bopomofo", "Cyrillic",  "Devanagari", "Ethiopic", "Georgian",
                                         "Greek",    "Gujarati", "Gurmukhi", "Han",      "Hangul",    "Hebrew",     "Hiragana", "Kannada",
                                         "Katakana", "Khmer",    "Lao",      "Latin",    "Malayalam", "Mongolian",  "Myanmar",  "Oriya",
                                         "Sinhala",  "Tamil",    "Telugu",   "Thai",     "Tibetan",   "Yi"};
// Oniguruma's word: also superscript and vulgar-fraction digits of Latin-1 and the circled letters.
constexpr std::string_view kWordClass =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc})" PRL_NEW_LU PRL_NEW_LL PRL_NEW_LM PRL_NEW_LO PRL_NEW_M PRL_NEW_N
    R"(\x{B2}-\x{B3}\x{B9}\x{BC}-\x{BE}\x{24B6}-\x{24E9}\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189})";
#undef PRL_NEW_LU
#undef PRL_NEW_LL
#undef PRL_NEW_LM
#undef PRL_NEW_LO
#undef PRL_NEW_M
#undef PRL_NEW_N

}  // namespace

std::string translate_oniguruma(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escape = pattern[++i];
      std::string_view expansion;
      if (escape == 'p' && i + 1 < pattern.size() && pattern[i + 1] == '{') {
        const std::size_t close = std::min(pattern.find('}', i), pattern.size());
        const std::string_view name = pattern.substr(i + 2, close - i - 2);
        for (const Property& property : kProperties)
          if (property.name == name) expansion = property.members;
        if (!expansion.empty()) i = close;
      }
      if ((escape == 'p' || escape == 'P') && i + 1 < pattern.size() && pattern[i + 1] == '{') {
        const bool is_negated = pattern.substr(i + 2).starts_with('^');
        const std::size_t begin = i + 2 + (is_negated ? 1 : 0), close = std::min(pattern.find('}', i), pattern.size());
        if (const std::string_view name = pattern.substr(begin, close - begin); std::ranges::find(kScripts, name) != std::end(kScripts)) {
          out.append({'\\', escape}).append(is_negated ? "{^sc:" : "{sc:").append(name).append("}");
          i = close;
          continue;
        }
      }
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
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(pcre2_compile_context_create(nullptr),
                                                                                              &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE position = 0;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE,
                              &error, &position, context.get());
  if (code_->code == nullptr) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(error, message, sizeof message);
    fail(ErrorCode::kCorrupt, "{}: '{}' is no valid pattern: {} near position {}", where, pattern, reinterpret_cast<const char*>(message),
         position);
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
    return pcre2_match(code->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position, PCRE2_NO_UTF_CHECK, match, context);
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
    fail(ErrorCode::kInvalidArgument, "[tokenizer] the pre-tokenizer's pattern gave up at byte {} of a text of {} bytes: {}", s.position,
         s.text.size(), reinterpret_cast<const char*>(message));
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
