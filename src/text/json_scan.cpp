#include "text/json_scan.hpp"

#include <boost/json/value.hpp>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::text {
namespace {

bool is_json_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

/// The value of four hexadecimal digits at `at`; -1 if they are not there.
int json_hex_unit(std::string_view text, std::size_t at) {
  if (at + 4 > text.size()) return -1;
  int value = 0;
  for (const char c : text.substr(at, 4)) {
    const int digit = hex_value(c);
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

}  // namespace

JsonObjectScanner::State JsonObjectScanner::push(char c) {
  if (state_ == State::kOpen)
    state_ = step(c);
  else
    state_ = State::kError;
  ++num_bytes_;
  return state_;
}

bool JsonObjectScanner::step_number(char c) {
  switch (number_) {
    case Number::kSign: return is_ascii_digit(c) && (number_ = c == '0' ? Number::kZero : Number::kDigits, true);
    case Number::kZero:
    case Number::kDigits:
      if (number_ == Number::kDigits && is_ascii_digit(c)) return true;
      if (c == '.') return number_ = Number::kPoint, true;
      return (c == 'e' || c == 'E') && (number_ = Number::kE, true);
    case Number::kPoint: return is_ascii_digit(c) && (number_ = Number::kFraction, true);
    case Number::kFraction: return is_ascii_digit(c) || ((c == 'e' || c == 'E') && (number_ = Number::kE, true));
    case Number::kE:
      if (c == '+' || c == '-') return number_ = Number::kESign, true;
      return is_ascii_digit(c) && (number_ = Number::kExponent, true);
    case Number::kESign: return is_ascii_digit(c) && (number_ = Number::kExponent, true);
    case Number::kExponent: return is_ascii_digit(c);
  }
  return false;
}

JsonObjectScanner::State JsonObjectScanner::end_value(std::size_t end) {
  if (nesting_.size() == 1 && nesting_[0] == '{') members_.back().value_end = end;
  expect_ = Expect::kCommaOrEnd;
  return State::kOpen;
}

JsonObjectScanner::State JsonObjectScanner::begin_value(char c) {
  if (nesting_.empty() && c != '{') return State::kError;
  if (nesting_.size() == 1 && nesting_[0] == '{') members_.back().value_begin = num_bytes_;
  if (c == '{' || c == '[') {
    if (nesting_.size() >= kMaxDepth) return State::kError;
    nesting_.push_back(c);
    expect_ = c == '{' ? Expect::kFirstKey : Expect::kFirstItem;
    return State::kOpen;
  }
  if (c == '"') {
    inside_ = Inside::kString;
    is_key_ = false;
  } else if (c == '-' || is_ascii_digit(c)) {
    inside_ = Inside::kNumber;
    number_ = c == '-' ? Number::kSign : c == '0' ? Number::kZero : Number::kDigits;
  } else if (c == 't' || c == 'f' || c == 'n') {
    inside_ = Inside::kWord;
    word_rest_ = c == 't' ? "rue" : c == 'f' ? "alse" : "ull";
  } else {
    return State::kError;
  }
  return State::kOpen;
}

JsonObjectScanner::State JsonObjectScanner::step(char c) {
  switch (inside_) {
    case Inside::kNothing: break;
    case Inside::kString:
      if (static_cast<unsigned char>(c) < 0x20) return State::kError;
      if (c == '\\') inside_ = Inside::kEscape;
      if (c != '"') return State::kOpen;
      inside_ = Inside::kNothing;
      if (!is_key_) return end_value(num_bytes_ + 1);
      if (nesting_.size() == 1) members_.back().key_end = num_bytes_ + 1;
      expect_ = Expect::kColon;
      return State::kOpen;
    case Inside::kEscape:
      if (std::string_view("\"\\/bfnrtu").find(c) == std::string_view::npos) return State::kError;
      inside_ = c == 'u' ? Inside::kHex : Inside::kString;
      num_hex_ = 0;
      return State::kOpen;
    case Inside::kHex:
      if (json_hex_unit(std::string("000") + c, 0) < 0) return State::kError;
      if (++num_hex_ == 4) inside_ = Inside::kString;
      return State::kOpen;
    case Inside::kWord:
      if (c != word_rest_.front()) return State::kError;
      word_rest_.remove_prefix(1);
      if (!word_rest_.empty()) return State::kOpen;
      inside_ = Inside::kNothing;
      return end_value(num_bytes_ + 1);
    case Inside::kNumber: {
      if (step_number(c)) return State::kOpen;
      const bool can_end =
          number_ == Number::kZero || number_ == Number::kDigits || number_ == Number::kFraction || number_ == Number::kExponent;
      if (!can_end) return State::kError;
      inside_ = Inside::kNothing;
      end_value(num_bytes_);  // the number ended before this byte, which is looked at below
      break;
    }
  }
  if (is_json_space(c)) return State::kOpen;
  switch (expect_) {
    case Expect::kValue: return begin_value(c);
    case Expect::kFirstItem:
      if (c != ']') return begin_value(c);
      break;
    case Expect::kFirstKey:
    case Expect::kKey:
      if (c == '}' && expect_ == Expect::kFirstKey) break;
      if (c != '"') return State::kError;
      inside_ = Inside::kString;
      is_key_ = true;
      if (nesting_.size() == 1) members_.push_back({num_bytes_, num_bytes_, kOngoing, kOngoing});
      return State::kOpen;
    case Expect::kColon:
      if (c != ':') return State::kError;
      expect_ = Expect::kValue;
      return State::kOpen;
    case Expect::kCommaOrEnd:
      if (c == ',') {
        expect_ = nesting_.back() == '{' ? Expect::kKey : Expect::kValue;
        return State::kOpen;
      }
      break;
  }
  // The end of an object or a list.
  if (c != (nesting_.back() == '{' ? '}' : ']')) return State::kError;
  nesting_.pop_back();
  if (nesting_.empty()) return State::kComplete;
  return end_value(num_bytes_ + 1);
}

std::optional<std::vector<RawMember>> scan_json_object(std::string_view text) {
  while (!text.empty() && is_json_space(text.back())) text.remove_suffix(1);
  JsonObjectScanner scanner;
  for (const char c : text)
    if (scanner.push(c) == JsonObjectScanner::State::kError) return std::nullopt;
  if (scanner.state() != JsonObjectScanner::State::kComplete) return std::nullopt;
  std::vector<RawMember> out;
  for (const auto& member : scanner.members()) {
    const std::string_view key = text.substr(member.key_begin, member.key_end - member.key_begin);
    try {
      const boost::json::value decoded = parse_json(replace_lone_surrogates(key));
      out.push_back({std::string(decoded.get_string().data(), decoded.get_string().size()),
                     text.substr(member.value_begin, member.value_end - member.value_begin)});
    } catch (const Error&) {
      return std::nullopt;  // ill-formed UTF-8
    }
  }
  return out;
}

std::string replace_lone_surrogates(std::string_view json) {
  std::string out;
  out.reserve(json.size());
  for (std::size_t i = 0; i < json.size();) {
    if (json[i] != '\\' || i + 1 >= json.size()) {
      out.push_back(json[i++]);
      continue;
    }
    const int unit = json[i + 1] == 'u' ? json_hex_unit(json, i + 2) : -1;
    if (unit < 0xD800 || unit > 0xDFFF) {
      out.append(json.substr(i, 2));
      i += 2;
      continue;
    }
    const int second = i + 8 <= json.size() && json.substr(i + 6, 2) == "\\u" ? json_hex_unit(json, i + 8) : -1;
    const bool has_pair = unit < 0xDC00 && second >= 0xDC00 && second <= 0xDFFF;
    out.append(has_pair ? json.substr(i, 12) : std::string_view("\\ufffd"));
    i += has_pair ? 12 : 6;
  }
  return out;
}

}  // namespace prl::text
