#include "dashboard/rollout_text.hpp"

#include <fmt/core.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "dashboard/member_scanner.hpp"

namespace prl::dashboard {
namespace json = boost::json;
namespace {

json::parse_options lenient() {
  json::parse_options options;
  options.max_depth = MemberScanner::kMaxDepth;
  options.allow_invalid_utf8 = true;
  return options;
}

/// A position at or before `at` where no character is cut.
std::size_t cut_position(std::string_view text, std::size_t at) {
  at = std::min(at, text.size());
  for (int i = 0; i < 3 && at > 0 && at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; ++i) --at;
  return at;
}

std::string in_one_line(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return out;
}

std::size_t find_lower(std::string_view text, std::string_view wanted) {
  if (wanted.empty()) return 0;
  const auto found =
      std::search(text.begin(), text.end(), wanted.begin(), wanted.end(), [](char a, char b) { return ascii_lower(a) == b; });
  return found == text.end() ? std::string_view::npos : static_cast<std::size_t>(found - text.begin());
}

/// As find_lower, for many megabytes: jumps by the last byte of what is looked for.
bool holds_in_lower(std::string_view text, std::string_view wanted) {
  std::array<std::size_t, 256> jump;
  jump.fill(wanted.size());
  for (std::size_t i = 0; i + 1 < wanted.size(); ++i) {
    const char c = wanted[i];
    const std::size_t distance = wanted.size() - 1 - i;
    jump[static_cast<unsigned char>(c)] = distance;
    if (c >= 'a' && c <= 'z') jump[static_cast<unsigned char>(c - 32)] = distance;
  }
  for (std::size_t at = wanted.size() - 1; at < text.size(); at += jump[static_cast<unsigned char>(text[at])]) {
    const std::string_view here = text.substr(at + 1 - wanted.size(), wanted.size());
    if (ascii_lower(here.back()) == wanted.back() && find_lower(here, wanted) == 0) return true;
  }
  return false;
}

}  // namespace

json::value load_rollout(const std::filesystem::path& path, const RolloutEntry& entry) {
  if (entry.num_bytes > kMaxRolloutBytes)
    fail(ErrorCode::kInvalidArgument, "the rollout has {} bytes, at most {} are shown; download it as it is", entry.num_bytes,
         kMaxRolloutBytes);
  const std::string line = read_range(path, entry.offset, entry.num_bytes);
  if (line.size() != entry.num_bytes) fail(ErrorCode::kNotFound, "{} changed meanwhile", path.filename().string());
  json::error_code ec;
  json::value value = json::parse(line, ec, {}, lenient());
  if (ec) value = json::parse(repair_json(line), ec, {}, lenient());
  if (ec) fail(ErrorCode::kCorrupt, "line {} of {} is no JSON: {}", entry.row + 1, path.filename().string(), ec.message());
  if (!value.is_object()) fail(ErrorCode::kCorrupt, "line {} of {} is no JSON object", entry.row + 1, path.filename().string());
  return value;
}

std::size_t cut_texts(json::value& value, std::size_t max_text, std::size_t max_total) {
  std::size_t total = 0, num_cut = 0;
  // An explicit stack: the depth is what the parser let through.
  std::vector<json::value*> open{&value};
  while (!open.empty()) {
    json::value& one = *open.back();
    open.pop_back();
    if (one.is_string()) {
      json::string& text = one.get_string();
      const std::size_t room = std::min(max_text, max_total - std::min(total, max_total));
      if (text.size() > room) {
        const std::size_t size = text.size(), kept = cut_position(std::string_view(text.data(), text.size()), room);
        text.resize(kept);
        text += fmt::format(" [... {} more bytes]", size - kept);
        ++num_cut;
      }
      total += text.size();
    } else if (one.is_array()) {
      auto& items = one.get_array();
      for (auto it = items.rbegin(); it != items.rend(); ++it) open.push_back(&*it);
    } else if (one.is_object()) {
      std::vector<json::value*> members;
      for (auto& member : one.get_object()) members.push_back(&member.value());
      open.insert(open.end(), members.rbegin(), members.rend());
    }
  }
  return num_cut;
}

std::string preview_of(const json::value& rollout, std::size_t max_bytes) {
  const json::value* const completion = rollout.as_object().if_contains("completion");
  if (completion == nullptr) return {};
  const json::value* content = completion;
  if (completion->is_array()) {
    content = nullptr;
    for (const json::value& message : completion->get_array()) {
      if (!message.is_object()) continue;
      const json::value* const role = message.get_object().if_contains("role");
      const json::value* const text = message.get_object().if_contains("content");
      if (role && role->is_string() && role->get_string() == "assistant" && text && text->is_string()) content = text;
    }
  }
  if (content == nullptr || !content->is_string()) return {};
  const std::string_view text(content->get_string().data(), content->get_string().size());
  return in_one_line(text.substr(0, cut_position(text, max_bytes)));
}

TextSearch::TextSearch(std::string_view wanted) : wanted_(wanted) {
  std::transform(wanted_.begin(), wanted_.end(), wanted_.begin(), ascii_lower);
  for (std::size_t i = 0; i < wanted_.size();) {
    std::size_t end = i;
    while (end < wanted_.size() && is_ascii_alnum(wanted_[end])) ++end;
    if (end - i > needle_.size()) needle_ = wanted_.substr(i, end - i);
    i = std::max(end, i + 1);
  }
}

bool TextSearch::may_hold(std::string_view line) const { return needle_.empty() || holds_in_lower(line, needle_); }

bool TextSearch::search(const json::value& value, std::string_view key, std::string& hit, int depth) const {
  if (depth > static_cast<int>(MemberScanner::kMaxDepth)) return false;
  if (value.is_string()) {
    if (key == "role" || key == "type" || key == "id" || key == "trajectory_id") return false;
    const std::string_view text(value.get_string().data(), value.get_string().size());
    const std::size_t at = find_lower(text, wanted_);
    if (at == std::string_view::npos) return false;
    constexpr std::size_t kAround = 60;
    const std::size_t begin = cut_position(text, at < kAround ? 0 : at - kAround);
    const std::size_t end = cut_position(text, at + wanted_.size() + kAround);
    hit = in_one_line(text.substr(begin, std::max(end, at + wanted_.size()) - begin));
    return true;
  }
  if (value.is_array())
    return std::any_of(value.get_array().begin(), value.get_array().end(),
                       [&](const json::value& one) { return search(one, key, hit, depth + 1); });
  if (!value.is_object()) return false;
  return std::any_of(value.get_object().begin(), value.get_object().end(), [&](const json::key_value_pair& member) {
    return search(member.value(), std::string_view(member.key().data(), member.key().size()), hit, depth + 1);
  });
}

std::string TextSearch::hit_in(const json::value& rollout) const {
  std::string hit;
  if (!rollout.is_object()) return hit;
  // Later versions of the format call the messages by other names.
  for (const char* const key : {"completion", "prompt", "answer", "error", "messages", "trajectory", "nodes", "info"}) {
    const json::value* const value = rollout.as_object().if_contains(key);
    if (value != nullptr && search(*value, key, hit, 0)) return hit.empty() ? wanted_ : hit;
  }
  return {};
}

}  // namespace prl::dashboard
