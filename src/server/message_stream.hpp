#pragma once

#include <boost/json/array.hpp>

#include <optional>
#include <string>
#include <vector>

#include "server/channel_stream.hpp"
#include "server/generation.hpp"
#include "server/stream_splitter.hpp"
#include "server/tool_call_stream.hpp"

namespace prl::server {

/// The message that a finished choice is: its text taken apart as the request asks for.
struct Message {
  std::string reasoning;
  std::string content;
  boost::json::array calls;  ///< in OpenAI form
};
Message read_message(const Generation& generation, const Choice& choice);

/// The same, piece by piece, for streams, without the text that is echoed. Put together, the pieces are the message; only a call that
/// breaks off is told in streams and is content in whole replies.
class MessageStream {
 public:
  struct Piece {
    std::string reasoning;
    std::string content;
    std::vector<CallDelta> calls;
  };
  MessageStream(const ServerContext& context, const PreparedRequest& request);
  Piece push(const Generation& generation, const ChoiceNews& news);
  /// True once a call was told.
  bool has_calls() const noexcept { return num_calls_ > 0; }

 private:
  Piece push_channels(const Generation& generation, const ChoiceNews& news);

  std::optional<ChannelStream> channels_;  // of models that write them; the rest is not used then
  StreamSplitter splitter_;
  ToolCallStream call_stream_;
  std::size_t num_read_ = 0;  // bytes of the withheld markup that call_stream_ has
  std::size_t num_calls_ = 0;
};

}  // namespace prl::server
