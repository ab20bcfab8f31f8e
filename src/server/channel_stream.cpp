#include "server/channel_stream.hpp"

#include <algorithm>

#include "text/renderers/tool_calls.hpp"

namespace prl::server {
namespace {

constexpr std::string_view kStart = "<|start|>", kMessage = "<|message|>", kChannel = "<|channel|>";
// What ends a body. The last two only where the client asks for stop tokens in the text.
constexpr std::string_view kEnds[] = {"<|end|>", kStart, "<|return|>", "<|call|>"};
constexpr std::string_view kFunctions = "functions.", kWhiteSpace = " \n\r\t";

/// Length of the longest end of `text` that begins one of `marks` without being all of it.
std::size_t partial_mark(std::string_view text, std::span<const std::string_view> marks) {
  std::size_t longest = 0;
  for (const std::string_view mark : marks)
    for (std::size_t n = std::min(text.size(), mark.size() - 1); n > longest; --n)
      if (text.ends_with(mark.substr(0, n))) longest = n;
  return longest;
}

std::string_view channel_of(std::string_view header) {
  const std::size_t mark = header.find(kChannel);
  if (mark == std::string_view::npos) return {};
  header.remove_prefix(mark + kChannel.size());
  header.remove_prefix(std::min(header.find_first_not_of(kWhiteSpace), header.size()));
  return header.substr(0, header.find_first_of(" \n\r\t<"));
}

std::string_view recipient_of(std::string_view header) {
  constexpr std::string_view kTo = "to=";
  const std::size_t mark = header.find(kTo);
  if (mark == std::string_view::npos) return {};
  header.remove_prefix(mark + kTo.size());
  return header.substr(0, header.find_first_of(" \n\r\t<"));
}

}  // namespace

bool OpenChannel::is_thought() const { return is_body_begun && channel_of(header) == "analysis" && recipient_of(header).empty(); }

OpenChannel open_channel(const text::Tokenizer& tokenizer, std::span<const std::int32_t> prompt_ids) {
  const auto start = tokenizer.id_of(kStart), message = tokenizer.id_of(kMessage);
  const auto last = start ? std::find(prompt_ids.rbegin(), prompt_ids.rend(), *start) : prompt_ids.rend();
  if (last == prompt_ids.rend() || !message) return {.header = "assistant<|channel|>final", .is_body_begun = true};
  const auto tail = prompt_ids.subspan(static_cast<std::size_t>(prompt_ids.rend() - last));
  const auto body = std::find(tail.begin(), tail.end(), *message);
  return {.header = tokenizer.decode(tail.first(static_cast<std::size_t>(body - tail.begin())), false),
          .is_body_begun = body != tail.end()};
}

ChannelStream::ChannelStream(OpenChannel open, bool reads_calls) : reads_calls_(reads_calls), header_(std::move(open.header)) {
  Piece nothing;
  if (open.is_body_begun) begin_body(nothing);
}

ChannelStream::Piece ChannelStream::push(std::string_view text) {
  Piece piece;
  pending_ += text;
  advance(piece, false);
  return piece;
}

ChannelStream::Piece ChannelStream::finish() {
  Piece piece;
  advance(piece, true);
  return piece;
}

void ChannelStream::begin_body(Piece& piece) {
  const std::string_view recipient = recipient_of(header_), channel = channel_of(header_);
  state_ = State::kBody;
  is_first_ = true;
  space_.clear();
  if (recipient.size() > kFunctions.size() && recipient.starts_with(kFunctions) && reads_calls_) {
    kind_ = Kind::kCall;
    piece.calls.push_back({num_calls_++, text::renderers::new_call_id(), std::string(recipient.substr(kFunctions.size())), ""});
  } else if (channel == "analysis") {
    kind_ = Kind::kReasoning;
  } else {
    kind_ = channel == "final" || channel == "commentary" ? Kind::kContent : Kind::kNothing;
  }
  header_.clear();
}

void ChannelStream::tell(Piece& piece, std::string_view text) {
  // White space at the ends of a call's arguments is no part of their JSON.
  if (kind_ == Kind::kCall) {
    const std::size_t begin = is_first_ ? std::min(text.find_first_not_of(kWhiteSpace), text.size()) : 0;
    text.remove_prefix(begin);
    if (text.empty()) return;
    is_first_ = false;
    space_ += text;
    const std::size_t end = space_.find_last_not_of(kWhiteSpace) + 1;
    if (end == 0) return;
    if (piece.calls.empty() || piece.calls.back().index + 1 != num_calls_) piece.calls.push_back({num_calls_ - 1, "", "", ""});
    piece.calls.back().arguments += space_.substr(0, end);
    space_.erase(0, end);
  } else if (kind_ == Kind::kReasoning) {
    piece.reasoning += text;
  } else if (kind_ == Kind::kContent) {
    piece.content += text;
  }
}

void ChannelStream::advance(Piece& piece, bool is_end) {
  for (;;) {
    if (state_ == State::kBetween) {
      const std::size_t start = pending_.find(kStart);
      if (start == std::string::npos) {
        pending_.erase(0, pending_.size() - partial_mark(pending_, std::span(&kStart, 1)));
        return;
      }
      pending_.erase(0, start + kStart.size());
      state_ = State::kHeader;
    } else if (state_ == State::kHeader) {
      const std::size_t message = pending_.find(kMessage);
      if (message == std::string::npos) {
        const std::size_t held = partial_mark(pending_, std::span(&kMessage, 1));
        header_ += pending_.substr(0, pending_.size() - held);
        pending_.erase(0, pending_.size() - held);
        return;
      }
      header_ += pending_.substr(0, message);
      pending_.erase(0, message + kMessage.size());
      begin_body(piece);
    } else {
      std::size_t begin = std::string::npos;
      std::string_view mark;
      for (const std::string_view end : kEnds)
        if (const std::size_t at = pending_.find(end); at < begin) {
          begin = at;
          mark = end;
        }
      if (begin == std::string::npos) {
        const std::size_t size = pending_.size() - (is_end ? 0 : partial_mark(pending_, kEnds));
        tell(piece, std::string_view(pending_).substr(0, size));
        pending_.erase(0, size);
        return;
      }
      tell(piece, std::string_view(pending_).substr(0, begin));
      pending_.erase(0, begin + mark.size());
      state_ = mark == kStart ? State::kHeader : State::kBetween;
    }
  }
}

}  // namespace prl::server
