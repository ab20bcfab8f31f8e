#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace prl::tools {

/// One assistant message as it came.
struct ChatReply {
  boost::json::object message;  ///< {role, content, reasoning_content?}; what was said until an interruption
  std::string finish_reason;    ///< "stop", "length", "interrupted"
  std::int64_t num_completion_tokens = 0;
  double seconds = 0;
};

/// What happens to a reply's text while it arrives.
using ChatTextSink = std::function<void(std::string_view text, bool is_reasoning)>;

/// A model that answers conversations one at a time.
class ChatBackend {
 public:
  virtual ~ChatBackend() = default;
  /// Streams the reply into `sink` on the calling thread; `is_interrupted` is asked a few times per second and ends it early.
  /// Error{kOverlong} if the conversation does not fit, {kUnavailable}, {kDeadline}, {kInvalidArgument}.
  virtual ChatReply reply(const boost::json::array& messages, const ChatTextSink& sink, const std::function<bool()>& is_interrupted) = 0;
  /// For the first line: "models/x, 134515008 parameters", "http://localhost:8000/v1".
  virtual std::string describe() const = 0;
};

/// Where a conversation reads and writes.
struct ChatTerminal {
  /// The next line without its end; nullopt at the end of input or when interrupted at the prompt. Writes `prompt` first.
  std::function<std::optional<std::string>(std::string_view prompt)> read_line;
  std::function<void(std::string_view text)> write;  ///< shown at once
  std::function<bool()> is_interrupted;
  bool has_color = false;    ///< a terminal that shows dim text
  bool shows_hints = false;  ///< someone is looking: greeting, speed of each reply
};

struct ChatOptions {
  std::optional<std::string> system_prompt;
  std::optional<std::string> prompt;  ///< answer this and return
};

/// Runs a conversation: lines are messages of the user, a line that ends in a backslash goes on, and commands begin with a slash
/// (/help lists them). A failed reply is shown and its message taken back. Returns the exit status: 1 if the only reply of
/// `prompt` failed.
int run_chat_loop(ChatBackend& backend, const ChatOptions& options, const ChatTerminal& terminal);

}  // namespace prl::tools
