#include "net/sse.hpp"

#include <utility>

#include "base/error.hpp"

namespace prl::net {

void SseParser::feed(std::string_view bytes) {
  for (const char c : bytes) {
    if (std::exchange(last_was_cr_, false) && c == '\n') continue;
    if (c == '\n' || c == '\r') {
      last_was_cr_ = c == '\r';
      end_line();
    } else {
      line_.push_back(c);
      if (line_.size() + current_.data.size() > max_event_bytes_)
        fail(ErrorCode::kCorrupt, "a server-sent event is larger than the limit of {} bytes", max_event_bytes_);
    }
  }
}

void SseParser::end_line() {
  std::string_view line = line_;
  if (std::exchange(is_first_line_, false) && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  if (line.empty()) {
    if (has_data_) events_.push_back(std::move(current_));
    current_ = SseEvent();
    has_data_ = false;
  } else if (line.front() != ':') {
    const std::size_t colon = line.find(':');
    const std::string_view name = line.substr(0, colon);
    std::string_view value = colon == std::string_view::npos ? std::string_view{} : line.substr(colon + 1);
    if (!value.empty() && value.front() == ' ') value.remove_prefix(1);
    if (name == "data") {
      if (std::exchange(has_data_, true)) current_.data.push_back('\n');
      current_.data.append(value);
    } else if (name == "event") {
      current_.event = value;
    } else if (name == "id") {
      current_.id = value;
    }
  }
  line_.clear();
}

std::optional<SseEvent> SseParser::next() {
  if (events_.empty()) return std::nullopt;
  SseEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

std::string format_sse(std::string_view data) {
  std::string out;
  out.reserve(data.size() + 8);
  for (;;) {
    const std::size_t end = data.find('\n');
    out += "data: ";
    out += data.substr(0, end);
    out += '\n';
    if (end == std::string_view::npos) break;
    data.remove_prefix(end + 1);
  }
  out += '\n';
  return out;
}

}  // namespace prl::net
