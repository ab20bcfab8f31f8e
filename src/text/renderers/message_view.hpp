#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace prl::text::renderers {

/// One tool call of an assistant message as the renderers write it.
struct CallView {
  std::string id;  ///< empty when absent
  std::string name;
  const boost::json::value* arguments = nullptr;  ///< null when absent

  /// JSON as json.dumps writes it; text is inserted as it stands, also when it is no JSON.
  std::string arguments_text() const;
  /// The arguments as an object, read from JSON text if they are text; null if they are none.
  boost::json::value arguments_object() const;
};

/// A part of a message: text, or an image.
struct ContentPart {
  std::string text;
  bool is_image = false;
};

/// Read access to one message of a conversation, forgiving about nulls and lists of text parts.
class MessageView {
 public:
  /// Error{kInvalidArgument} naming messages[index] unless it is an object with a role.
  MessageView(const boost::json::array& messages, std::size_t index);

  std::string_view role() const noexcept { return role_; }
  std::size_t index() const noexcept { return index_; }
  bool is(std::string_view role) const noexcept { return role_ == role; }
  /// Content as text: null is empty, text parts are joined without a separator. Error{kInvalidArgument} for other parts.
  std::string content() const;
  /// The same with images, which stand between parts of text; text that only other text lies between is one part.
  std::vector<ContentPart> parts() const;
  /// The member as it stands; null when absent.
  const boost::json::value* raw_content() const noexcept { return find("content"); }
  /// reasoning_content, else reasoning, else thinking; nullopt when absent or null.
  std::optional<std::string> reasoning() const;
  std::vector<CallView> tool_calls() const;
  /// A member that is text, such as tool_call_id; empty when absent.
  std::string text_member(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view why) const;

 private:
  const boost::json::value* find(std::string_view key) const noexcept;

  const boost::json::object* object_;
  std::string_view role_;
  std::size_t index_;
};

/// True for a message that is a query of the user, not a tool result that the client sent as one.
bool is_user_query(const MessageView& message);
/// The function object of a tool in either form ({type, function} or the function itself); null if it is neither.
const boost::json::object* tool_function(const boost::json::value& tool) noexcept;
/// str(value) of Python for JSON values; lists and dicts as json.dumps.
std::string python_text(const boost::json::value& value);
/// Text as it stands, other values as json.dumps writes them.
std::string json_unless_text(const boost::json::value& value);
/// Takes inline reasoning out of `content` if it has a closing tag: what stands between the last <think> and the first </think>, newlines
/// at its ends stripped. `content` keeps what follows, without newlines at its beginning. Empty if there is none.
std::string split_inline_reasoning(std::string& content);
/// Python's str.strip, and for newlines only.
std::string strip(std::string_view text);
std::string_view strip_newlines(std::string_view text, bool left = true, bool right = true) noexcept;

}  // namespace prl::text::renderers
