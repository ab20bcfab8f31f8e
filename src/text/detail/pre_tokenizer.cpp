#include "text/detail/pre_tokenizer.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/detail/byte_alphabet.hpp"
#include "text/detail/json_access.hpp"
#include "text/detail/replacer.hpp"
#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

constexpr int kMaxDepth = 8;
// Source: pre_tokenizers/byte_level.rs of huggingface/tokenizers, after GPT-2's encoder.py.
constexpr std::string_view kByteLevelPattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// What upstream takes for punctuation: the ASCII signs and category P of Unicode 8. Younger versions have more, and took two away.
constexpr std::string_view kPunctuation =
    R"((?![\x{61D}\x{9FD}\x{A76}\x{C77}\x{C84}\x{1B4E}\x{1B4F}\x{1B7D}-\x{1B7F}\x{2E43}-\x{2E4F}\x{2E52}-\x{2E5D}\x{10D6E}\x{10EAD})"
    R"(\x{10F55}-\x{10F59}\x{10F86}-\x{10F89}\x{113D4}-\x{113D8}\x{1144B}-\x{1144F}\x{1145A}-\x{1145D}\x{11660}-\x{1166C}\x{116B9})"
    R"(\x{1183B}\x{11944}-\x{11946}\x{119E2}\x{11A3F}-\x{11AA2}\x{11B00}-\x{11B09}\x{11BE1}\x{11C41}-\x{11C71}\x{11EF7}-\x{11F4F})"
    R"(\x{11FFF}\x{12FF1}\x{12FF2}\x{16D6D}-\x{16D6F}\x{16E97}-\x{16E9A}\x{16FE2}\x{1E5FF}\x{1E95E}\x{1E95F}]))"
    R"([\x{21}-\x{2F}\x{3A}-\x{40}\x{5B}-\x{60}\x{7B}-\x{7E}\x{166D}\x{111C9}\p{P}])";

}  // namespace

PreTokenizer::PreTokenizer(const json::value& config, const std::string& where) { add(config, where, 0); }

void PreTokenizer::add(const json::value& config, const std::string& where, int depth) {
  if (depth > kMaxDepth) fail(ErrorCode::kCorrupt, "{}: pre-tokenizers nested deeper than {}", where, kMaxDepth);
  const json::object& object = as_object(config, where);
  const std::string_view type = as_string(require(object, "type", where), where + ".type");
  const auto behavior_of = [&](std::string_view fallback) {
    const json::value* value = find(object, "behavior");
    const std::string_view name = value != nullptr ? as_string(*value, where + ".behavior") : fallback;
    if (name == "Removed") return Behavior::kRemoved;
    if (name == "Isolated") return Behavior::kIsolated;
    if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
    if (name == "MergedWithNext") return Behavior::kMergedWithNext;
    if (name == "Contiguous") return Behavior::kContiguous;
    fail(ErrorCode::kCorrupt, "{}.behavior: unknown behavior '{}'", where, name);
  };
  const std::size_t num_before = steps_.size();
  const bool is_behind = is_byte_level_;
  if (type == "Sequence") {
    const json::array& list = as_array(require(object, "pretokenizers", where), where + ".pretokenizers");
    for (std::size_t i = 0; i < list.size(); ++i) add(list[i], fmt::format("{}.pretokenizers[{}]", where, i), depth + 1);
  } else if (type == "ByteLevel") {
    if (is_byte_level_)
      fail(ErrorCode::kNotImplemented, "{}.type: a second ByteLevel step would spell the bytes of what the first one spelled", where);
    const bool use_regex = bool_or(object, "use_regex", true, where);
    const bool add_prefix_space = bool_or(object, "add_prefix_space", true, where);
    if (use_regex || add_prefix_space)
      steps_.push_back({Regex(kByteLevelPattern, where), Behavior::kIsolated, false, add_prefix_space, use_regex});
    is_byte_level_ = true;
  } else if (type == "Split") {
    steps_.push_back({Regex(read_pattern(object, where), where + ".pattern"), behavior_of("Removed"),
                      bool_or(object, "invert", false, where), false, true});
  } else if (type == "Metaspace") {
    Metaspace metaspace = read_metaspace(object, where);
    Regex mark(escape_pattern(metaspace.replacement), where);
    knows_start_ |= metaspace.scheme == PrependScheme::kFirst;
    ++num_metaspace_;
    const bool split = metaspace.split;
    steps_.push_back({std::move(mark), Behavior::kMergedWithNext, false, false, split, false, std::move(metaspace)});
  } else if (type == "Digits") {
    // char::is_numeric of Rust, whose Unicode version is one ahead of the patterns' own
    const bool individual = bool_or(object, "individual_digits", false, where);
    steps_.push_back({Regex(R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])", where),
                      individual ? Behavior::kIsolated : Behavior::kContiguous, false, false, true});
  } else if (type == "Punctuation") {
    steps_.push_back({Regex(kPunctuation, where), behavior_of("Isolated"), false, false, true});
  } else if (type == "WhitespaceSplit") {
    steps_.push_back({Regex(R"(\s)", where), Behavior::kRemoved, false, false, true});
  } else if (type == "Whitespace") {
    steps_.push_back({Regex(R"(\w+|[^\w\s]+)", where), Behavior::kRemoved, true, false, true});
  } else {
    fail(ErrorCode::kNotImplemented,
         "{}.type: pre-tokenizer '{}' is not supported; supported: Sequence, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, "
         "Metaspace and ByteLevel",
         where, type);
  }
  if (is_byte_level_ && num_metaspace_ > 0)
    fail(ErrorCode::kNotImplemented, "{}.type: Metaspace and ByteLevel together are not supported", where);
  if (is_behind && type != "Sequence")
    for (std::size_t i = num_before; i < steps_.size(); ++i) steps_[i].is_spelled = true;
}

// Each character of the spelling stands for one byte.
void PreTokenizer::apply_to_spelling(const Step& step, const Piece& piece, std::vector<Piece>& out) const {
  const std::string spelling = spell_bytes(piece.text);
  std::vector<Piece> parts;
  apply(step, {spelling, 0}, parts);
  std::size_t spelled = 0, begin = 0;  // where the part begins, in the spelling and in the text
  for (const Piece& part : parts) {
    const auto at = static_cast<std::size_t>(part.origin);
    begin += count_code_points(std::string_view(spelling).substr(spelled, at - spelled));
    spelled = at;
    out.push_back({piece.text.substr(begin, count_code_points(part.text)), piece.origin + static_cast<std::int64_t>(begin)});
  }
}

void PreTokenizer::apply(const Step& step, const Piece& piece, std::vector<Piece>& out) const {
  struct Span {
    std::size_t begin, end;
    bool is_match;
  };
  const auto emit = [&](std::size_t begin, std::size_t end) {
    if (begin < end) out.push_back(piece.part(begin, end));
  };
  std::vector<Span> spans;
  std::size_t previous = 0, begin = 0, end = 0;
  Regex::Scan scan(step.regex, piece.text);
  while (scan.next(begin, end)) {
    if (step.behavior == Behavior::kIsolated) {  // every span alone: nothing to collect
      emit(previous, begin);
      emit(begin, end);
    } else {
      if (previous != begin) spans.push_back({previous, begin, step.invert});
      spans.push_back({begin, end, !step.invert});
    }
    previous = end;
  }
  if (step.behavior == Behavior::kIsolated) return emit(previous, piece.text.size());
  if (previous != piece.text.size()) spans.push_back({previous, piece.text.size(), step.invert});

  std::vector<Span> merged;
  const auto merge = [&](const Span& span, bool joins) {
    if (joins && !merged.empty()) {
      merged.back().begin = std::min(merged.back().begin, span.begin);
      merged.back().end = std::max(merged.back().end, span.end);
    } else {
      merged.push_back(span);
    }
  };
  bool previous_match = false;
  switch (step.behavior) {
    case Behavior::kRemoved:
      for (const Span& span : spans)
        if (!span.is_match) merged.push_back(span);
      break;
    case Behavior::kContiguous:
      for (const Span& span : spans) {
        merge(span, span.is_match == previous_match);
        previous_match = span.is_match;
      }
      break;
    case Behavior::kMergedWithPrevious:
      for (const Span& span : spans) {
        merge(span, span.is_match && !previous_match);
        previous_match = span.is_match;
      }
      break;
    case Behavior::kMergedWithNext:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
        merge(*span, span->is_match && !previous_match);
        previous_match = span->is_match;
      }
      std::reverse(merged.begin(), merged.end());
      break;
    case Behavior::kIsolated: break;
  }
  for (const Span& span : merged) emit(span.begin, span.end);
}

// Each space becomes the replacement, and one more goes in front where the scheme wants it.
Piece PreTokenizer::with_metaspace(const Metaspace& metaspace, const Piece& piece, const SegmentPlace& segment, bool want_places,
                                   PieceStorage& storage) const {
  const std::string& mark = metaspace.replacement;
  const bool has_mark = piece.text.starts_with(mark) || piece.text.starts_with(' ');
  const bool prepends = !has_mark && (metaspace.scheme == PrependScheme::kAlways ||
                                      (metaspace.scheme == PrependScheme::kFirst && segment.is_at_start(piece.place(0))));
  if (!prepends && piece.text.find(' ') == std::string_view::npos) return piece;
  std::string& text = storage.texts.emplace_back();
  std::vector<std::uint32_t>& places = storage.places.emplace_back();
  text.reserve(piece.text.size() + piece.text.size() / 2);
  const auto put = [&](std::string_view bytes, std::size_t byte) {
    text += bytes;
    if (want_places) places.insert(places.end(), bytes.size(), static_cast<std::uint32_t>(piece.place(byte)));
  };
  if (prepends) put(mark, 0);
  for (std::size_t i = 0; i < piece.text.size(); ++i) put(piece.text[i] == ' ' ? std::string_view(mark) : piece.text.substr(i, 1), i);
  if (!want_places) return {text, piece.place(0)};
  places.push_back(static_cast<std::uint32_t>(piece.place(piece.text.size())));
  return {text, piece.place(0), places.data()};
}

void PreTokenizer::split(std::string_view text, const SegmentPlace& segment, bool want_places, std::vector<Piece>& pieces,
                         PieceStorage& storage) const {
  pieces.clear();
  if (text.empty()) return;
  pieces.push_back({text, 0});
  std::vector<Piece> next;
  for (const Step& step : steps_) {
    next.clear();
    for (Piece piece : pieces) {
      if (step.add_prefix_space && piece.text.front() != ' ')
        piece = {storage.texts.emplace_back(" " + std::string(piece.text)), piece.origin - 1};
      if (step.metaspace) piece = with_metaspace(*step.metaspace, piece, segment, want_places || num_metaspace_ > 1, storage);
      if (step.is_spelled)
        apply_to_spelling(step, piece, next);
      else if (step.split)
        apply(step, piece, next);
      else
        next.push_back(piece);
    }
    pieces.swap(next);
  }
}

}  // namespace prl::text::detail
