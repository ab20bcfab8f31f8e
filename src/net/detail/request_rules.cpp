#include "net/detail/request_rules.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "base/ascii.hpp"

namespace prl::net::detail {
namespace {

constexpr int kBadRequest = 400;

[[noreturn]] void refuse(const std::string& why) {
  throw HttpError(kBadRequest, ErrorCode::kInvalidArgument, "the request is not valid HTTP/1.1: " + why);
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t";
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::vector<std::string_view> values_of(const Fields& headers, std::string_view wanted) {
  std::vector<std::string_view> values;
  for (const auto& [name, value] : headers)
    if (iequals(name, wanted)) values.push_back(value);
  return values;
}

/// "chunked" alone, in one or several fields.
void check_transfer_codings(const std::vector<std::string_view>& fields) {
  std::vector<std::string_view> codings;
  for (std::string_view rest : fields) {
    for (;;) {
      const std::size_t comma = rest.find(',');
      if (const std::string_view coding = trim(rest.substr(0, comma)); !coding.empty()) codings.push_back(coding);
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
  }
  const auto is_chunked = [](std::string_view coding) { return iequals(coding, "chunked"); };
  if (codings.empty() || !is_chunked(codings.back())) refuse("the last Transfer-Encoding of a request must be chunked");
  if (std::ranges::count_if(codings, is_chunked) > 1) refuse("Transfer-Encoding names chunked more than once");
  if (codings.size() > 1)
    throw HttpError(501, ErrorCode::kNotImplemented,
                    "Transfer-Encoding '" + std::string(codings.front()) + "' is not understood; send the body plain or chunked");
}

std::uint64_t read_length(const std::vector<std::string_view>& fields) {
  if (fields.size() > 1) refuse("Content-Length is given more than once");
  const std::string_view text = trim(fields.front());
  if (text.empty()) refuse("Content-Length is empty");
  std::uint64_t length = 0;
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  for (const char c : text) {
    if (c < '0' || c > '9') refuse("Content-Length '" + std::string(text.substr(0, 32)) + "' is no number");
    const auto digit = static_cast<std::uint64_t>(c - '0');
    length = length > (kMax - digit) / 10 ? kMax : length * 10 + digit;  // too large a number is as large as any
  }
  return length;
}

bool is_host_char(char c) { return is_ascii_alnum(c) || std::string_view("-._~%!$&'()*+;=:[]").find(c) != std::string_view::npos; }

void check_host(std::string_view host) {
  if (!std::ranges::all_of(host, is_host_char)) refuse("Host '" + std::string(host.substr(0, 64)) + "' is not a host name");
}

std::string decode_path(std::string_view path) {
  std::optional<std::string> decoded = percent_decode(path, false);
  if (!decoded) refuse("the path holds a malformed percent escape");
  if (std::ranges::any_of(*decoded, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }))
    refuse("the path holds a control character");
  return std::move(*decoded);
}

}  // namespace

BodyFraming read_framing(const Fields& headers, bool is_http_1_0) {
  const auto codings = values_of(headers, "Transfer-Encoding");
  const auto lengths = values_of(headers, "Content-Length");
  if (codings.empty()) return {.is_chunked = false, .length = lengths.empty() ? 0 : read_length(lengths)};
  if (is_http_1_0) refuse("HTTP/1.0 has no Transfer-Encoding");
  if (!lengths.empty()) refuse("both Transfer-Encoding and Content-Length are given");
  check_transfer_codings(codings);
  return {.is_chunked = true};
}

RequestTarget read_target(std::string_view method, std::string_view target, const Fields& headers, bool is_http_1_0) {
  const auto hosts = values_of(headers, "Host");
  if (hosts.size() > 1) refuse("Host is given more than once");
  if (hosts.empty() && !is_http_1_0) refuse("Host is missing");
  RequestTarget out;
  if (!hosts.empty()) out.host = trim(hosts.front());
  if (target == "*" && method == "OPTIONS") {
    check_host(out.host);
    out.path = "*";
    return out;
  }
  if (!target.empty() && target.front() != '/') {
    // The absolute form, which every server takes: its authority counts, not the field.
    const std::size_t scheme = target.find("://");
    const std::string_view name = scheme == std::string_view::npos ? std::string_view() : target.substr(0, scheme);
    if (!iequals(name, "http") && !iequals(name, "https")) refuse("the target must be a path");
    target.remove_prefix(scheme + 3);
    const std::size_t end = target.find_first_of("/?#");
    out.host = target.substr(0, end);
    if (out.host.empty()) refuse("the target names no host");
    target = end == std::string_view::npos ? std::string_view("/") : target.substr(end);
  }
  check_host(out.host);
  target = target.substr(0, target.find('#'));
  const std::size_t question = target.find('?');
  out.path = decode_path(target.substr(0, question));
  if (out.path.empty()) out.path = "/";
  if (question != std::string_view::npos) out.query = target.substr(question + 1);
  return out;
}

}  // namespace prl::net::detail
