#include "dashboard/member_scanner.hpp"

#include <boost/json/basic_parser_impl.hpp>

#include <optional>
#include <utility>

#include "base/ascii.hpp"

namespace prl::dashboard {
namespace json = boost::json;
namespace {

/// What boost::json::basic_parser calls. Depth 1 is inside the outermost object.
struct Handler {
  static constexpr std::size_t max_object_size = std::size_t(-1);
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);

  MemberScanner::OnMember on_member;
  int depth = 0;
  int array_depth = 0;  ///< above 0: inside a list
  bool is_object = false;
  std::string keys[2];
  std::string text;

  void reset() {
    depth = array_depth = 0;
    is_object = false;
    keys[0].clear();
    keys[1].clear();
    text.clear();
  }
  bool is_wanted() const { return array_depth == 0 && (depth == 1 || depth == 2); }
  static void append(std::string& to, json::string_view piece) {
    if (to.size() < MemberScanner::kMaxText) to.append(piece.data(), std::min(piece.size(), MemberScanner::kMaxText - to.size()));
  }
  bool tell(Scalar value) {
    if (!is_wanted()) return true;
    if (depth == 1)
      on_member({}, keys[0], value);
    else
      on_member(keys[0], keys[1], value);
    keys[depth - 1].clear();
    return true;
  }
  bool number(double value) { return tell({Scalar::Kind::kNumber, value, {}}); }

  using error_code = json::error_code;
  bool on_document_begin(error_code&) { return true; }
  bool on_document_end(error_code&) { return true; }
  bool on_object_begin(error_code& ec) {
    if (++depth == 1) is_object = true;
    if (static_cast<std::size_t>(depth + array_depth) > MemberScanner::kMaxDepth) {
      ec = json::error::too_deep;
      return false;
    }
    if (is_wanted()) keys[depth - 1].clear();
    return true;
  }
  bool on_object_end(std::size_t, error_code&) {
    --depth;
    if (is_wanted()) keys[depth - 1].clear();
    return true;
  }
  bool on_array_begin(error_code& ec) {
    ++array_depth;
    if (!is_object) ec = json::error::not_object;
    return is_object;
  }
  bool on_array_end(std::size_t, error_code&) {
    --array_depth;
    if (is_wanted()) keys[depth - 1].clear();
    return true;
  }
  bool on_key_part(json::string_view piece, std::size_t, error_code&) {
    if (is_wanted()) append(keys[depth - 1], piece);
    return true;
  }
  bool on_key(json::string_view piece, std::size_t n, error_code& ec) { return on_key_part(piece, n, ec); }
  bool on_string_part(json::string_view piece, std::size_t, error_code&) {
    if (is_wanted()) append(text, piece);
    return true;
  }
  bool on_string(json::string_view piece, std::size_t, error_code&) {
    if (!is_wanted()) return true;
    append(text, piece);
    tell({Scalar::Kind::kText, 0, text});
    text.clear();
    return true;
  }
  bool on_number_part(json::string_view, error_code&) { return true; }
  bool on_int64(std::int64_t value, json::string_view, error_code&) { return number(static_cast<double>(value)); }
  bool on_uint64(std::uint64_t value, json::string_view, error_code&) { return number(static_cast<double>(value)); }
  bool on_double(double value, json::string_view, error_code&) { return number(value); }
  bool on_bool(bool value, error_code&) { return tell({Scalar::Kind::kBool, value ? 1.0 : 0.0, {}}); }
  bool on_null(error_code&) { return tell({}); }
  bool on_comment_part(json::string_view, error_code&) { return true; }
  bool on_comment(json::string_view, error_code&) { return true; }
};

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r") == std::string_view::npos; }

json::parse_options scan_options() {
  json::parse_options options;
  options.max_depth = MemberScanner::kMaxDepth;
  options.allow_invalid_utf8 = true;
  return options;
}

}  // namespace

struct MemberScanner::Impl {
  explicit Impl(OnMember on_member) : parser(scan_options()) { parser.handler().on_member = std::move(on_member); }
  json::basic_parser<Handler> parser;
  bool is_good = true;
};

MemberScanner::MemberScanner(OnMember on_member) : impl_(std::make_unique<Impl>(std::move(on_member))) {}
MemberScanner::~MemberScanner() = default;

void MemberScanner::begin() {
  impl_->parser.reset();
  impl_->parser.handler().reset();
  impl_->is_good = true;
}

bool MemberScanner::feed(std::string_view piece) {
  if (!impl_->is_good) return false;
  json::error_code ec;
  if (impl_->parser.done()) return impl_->is_good = is_blank(piece);
  const std::size_t used = impl_->parser.write_some(true, piece.data(), piece.size(), ec);
  // What follows a whole object may only be blank.
  impl_->is_good = !ec && is_blank(piece.substr(used));
  return impl_->is_good;
}

bool MemberScanner::end() {
  if (!impl_->is_good) return false;
  json::error_code ec;
  if (!impl_->parser.done()) impl_->parser.write_some(false, nullptr, 0, ec);
  return !ec && impl_->parser.handler().is_object;
}

namespace {

/// The number of \uXXXX at `at`, or nullopt.
std::optional<unsigned> escape_at(std::string_view text, std::size_t at) {
  if (at + 6 > text.size() || text[at] != '\\' || text[at + 1] != 'u') return std::nullopt;
  unsigned value = 0;
  for (std::size_t i = at + 2; i < at + 6; ++i) {
    const char c = text[i];
    const int digit = hex_value(c);
    if (digit < 0) return std::nullopt;
    value = value * 16 + static_cast<unsigned>(digit);
  }
  return value;
}

}  // namespace

std::string repair_json(std::string_view line) {
  constexpr std::string_view kNotNumbers[] = {"-Infinity", "Infinity", "NaN"};
  std::string out;
  out.reserve(line.size());
  bool in_text = false;
  for (std::size_t i = 0; i < line.size();) {
    if (!in_text) {
      bool replaced = false;
      for (const std::string_view word : kNotNumbers)
        if (line.substr(i, word.size()) == word) {
          out += "null";
          i += word.size();
          replaced = true;
          break;
        }
      if (replaced) continue;
      in_text = line[i] == '"';
      out += line[i++];
      continue;
    }
    if (line[i] == '\\') {
      const auto unit = escape_at(line, i);
      const bool is_high = unit && *unit >= 0xD800 && *unit < 0xDC00, is_low = unit && *unit >= 0xDC00 && *unit < 0xE000;
      const auto second = is_high ? escape_at(line, i + 6) : std::nullopt;
      const bool is_pair = second && *second >= 0xDC00 && *second < 0xE000;
      const std::size_t size = unit ? (is_pair ? 12 : 6) : 2;
      if ((is_high || is_low) && !is_pair)
        out += "\\uFFFD";
      else
        out += line.substr(i, size);
      i += size;
      continue;
    }
    in_text = line[i] != '"';
    out += line[i++];
  }
  return out;
}

}  // namespace prl::dashboard
