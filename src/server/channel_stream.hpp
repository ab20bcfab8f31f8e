#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/tool_call_stream.hpp"
#include "text/tokenizer.hpp"

namespace prl::server {

/// Where a prompt in the harmony format leaves off.
struct OpenChannel {
  std::string header;          ///< of the message that the completion goes on with, behind <|start|>
  bool is_body_begun = false;  ///< <|message|> stands behind the header
  bool is_thought() const;     ///< inside the body of the analysis channel
};
/// A prompt without <|start|> leaves off in the body of a final message, so that its completion is content.
OpenChannel open_channel(const text::Tokenizer& tokenizer, std::span<const std::int32_t> prompt_ids);

/// Reads completions in the harmony format from their text as it arrives, special tokens spelt: the analysis channel is reasoning, the
/// final channel and commentary without a recipient are content, messages to functions.NAME are calls, whose bodies are told as they come.
/// Text that may be the beginning of a marker is held back until it is decided.
class ChannelStream {
 public:
  struct Piece {
    std::string reasoning;
    std::string content;
    std::vector<CallDelta> calls;
  };
  /// `reads_calls` false: bodies of calls are content.
  ChannelStream(OpenChannel open, bool reads_calls);
  Piece push(std::string_view text);
  /// What was still held back.
  Piece finish();
  std::size_t num_calls() const noexcept { return num_calls_; }

 private:
  enum class State : std::uint8_t { kHeader, kBody, kBetween };
  enum class Kind : std::uint8_t { kReasoning, kContent, kCall, kNothing };
  void advance(Piece& piece, bool is_end);
  void begin_body(Piece& piece);
  void tell(Piece& piece, std::string_view text);

  State state_ = State::kHeader;
  Kind kind_ = Kind::kNothing;
  bool reads_calls_;
  std::string header_;
  std::string pending_;
  std::string space_;     // white space of the body that is told only when more follows
  bool is_first_ = true;  // nothing of this kind was told in this body
  std::size_t num_calls_ = 0;
};

}  // namespace prl::server
