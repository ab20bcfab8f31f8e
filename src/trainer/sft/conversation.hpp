#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace prl::trainer {

/// A picture of a row.
struct RowImage {
  enum class Kind : std::uint8_t {
    kUri,    ///< a data: URI
    kBytes,  ///< a PNG or JPEG file in base64
    kPath,   ///< of a file, relative to the data file's folder
  };
  Kind kind = Kind::kUri;
  std::string text;
};

/// One row of fine-tuning data, as the chat template takes it.
struct Conversation {
  boost::json::array messages;
  boost::json::array tools;  ///< OpenAI function envelopes
  boost::json::object template_kwargs;
  std::size_t num_prompt_messages = 0;  ///< leading messages that are not trained: those of `prompt`
  std::vector<RowImage> images;         ///< of the messages' image parts, in order
};

/// Reads {"messages": [...]} (wins when not null; also as JSON text of a list) or {"prompt": ..., "completion": ...}, each a list of
/// messages, one message or a text (user and assistant then); the whole prompt is read and not trained, its assistant messages too.
/// Optional: "tools" (OpenAI list), "tool_defs" (name, description, parameters,
/// strict), either also as JSON text, "chat_template_kwargs", and the pictures of image parts: "images" (a list; or one as "image"), of
/// data: URIs, paths, or {"bytes", "path"}, in the order of the parts that say nothing of their own. Parts are {"type": "image"} or
/// {"type": "image_url", "image_url": {"url"}}, and may hold their picture as "image". Without parts the first message of the user begins
/// with all images. Null members of messages are dropped. Error{kInvalidArgument} naming the key and what was found.
Conversation parse_conversation(std::string_view json_line);

}  // namespace prl::trainer
