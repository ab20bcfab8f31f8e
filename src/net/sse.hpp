#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace prl::net {

/// One server-sent event; fields that were absent are empty.
struct SseEvent {
  std::string event;
  std::string data;  ///< lines joined by '\n'
  std::string id;
};

/// Incremental parser of text/event-stream (WHATWG HTML, section 9.2): any cut of the bytes gives the same events.
/// Comments, unknown fields and a leading byte-order mark are skipped; LF, CRLF and CR end lines.
class SseParser {
 public:
  /// Events larger than `max_event_bytes` are an Error{kCorrupt}.
  explicit SseParser(std::size_t max_event_bytes = 16 * 1024 * 1024) : max_event_bytes_(max_event_bytes) {}
  void feed(std::string_view bytes);
  /// The next complete event.
  std::optional<SseEvent> next();

 private:
  void end_line();

  std::size_t max_event_bytes_;
  std::string line_;
  SseEvent current_;
  bool has_data_ = false;
  bool is_first_line_ = true;
  bool last_was_cr_ = false;
  std::deque<SseEvent> events_;
};

/// "data: <line>\n" per line of `data`, then a blank line.
std::string format_sse(std::string_view data);

}  // namespace prl::net
