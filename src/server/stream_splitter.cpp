#include "server/stream_splitter.hpp"

#include <algorithm>
#include <utility>

namespace prl::server {
namespace {

constexpr std::string_view kThinkBegin = "<think>";
constexpr std::string_view kThinkEnd = "</think>";

/// Length of the longest end of `text` that begins `marker` without being all of it.
std::size_t partial_marker(std::string_view text, std::string_view marker) {
  for (std::size_t n = std::min(text.size(), marker.size() - 1); n > 0; --n)
    if (text.ends_with(marker.substr(0, n))) return n;
  return 0;
}

}  // namespace

StreamSplitter::StreamSplitter(Options options)
    : options_(options),
      state_(!options.reasoning            ? State::kContent
             : options.starts_in_reasoning ? State::kReasoning
                                           : State::kStart) {
  skip_newlines_ = state_ == State::kReasoning;
}

StreamSplitter::Piece StreamSplitter::push(std::string_view text) {
  Piece piece;
  pending_ += text;
  advance(piece, false);
  return piece;
}

StreamSplitter::Piece StreamSplitter::finish() {
  Piece piece;
  advance(piece, true);
  return piece;
}

void StreamSplitter::advance(Piece& piece, bool is_end) {
  if (state_ == State::kStart) {
    const std::size_t begin = pending_.find_first_not_of(" \n\r\t");
    const std::string_view seen = begin == std::string::npos ? std::string_view{} : std::string_view(pending_).substr(begin);
    if (seen.starts_with(kThinkBegin)) {
      pending_.erase(0, begin + kThinkBegin.size());
      state_ = State::kReasoning;
      skip_newlines_ = true;
    } else if (!is_end && kThinkBegin.starts_with(seen)) {
      return;  // not decided yet
    } else {
      state_ = State::kContent;
    }
  }
  if (skip_newlines_ && state_ != State::kTools) {
    pending_.erase(0, pending_.find_first_not_of('\n'));
    if (!pending_.empty()) skip_newlines_ = false;
  }
  if (state_ == State::kReasoning) {
    const std::size_t end = pending_.find(kThinkEnd);
    if (end == std::string::npos) {
      const std::size_t held = is_end ? 0 : partial_marker(pending_, kThinkEnd);
      piece.reasoning += pending_.substr(0, pending_.size() - held);
      pending_.erase(0, pending_.size() - held);
      return;
    }
    piece.reasoning += pending_.substr(0, end);
    pending_.erase(0, end + kThinkEnd.size());
    state_ = State::kContent;
    skip_newlines_ = true;
    pending_.erase(0, pending_.find_first_not_of('\n'));
    if (!pending_.empty()) skip_newlines_ = false;
  }
  if (state_ == State::kContent) {
    const std::string_view mark = options_.tool_mark;
    const std::size_t begin = mark.empty() ? std::string::npos : pending_.find(mark);
    if (begin == std::string::npos) {
      const std::size_t held = is_end || mark.empty() ? 0 : partial_marker(pending_, mark);
      piece.content += pending_.substr(0, pending_.size() - held);
      pending_.erase(0, pending_.size() - held);
      return;
    }
    piece.content += pending_.substr(0, begin);
    pending_.erase(0, begin);
    state_ = State::kTools;
  }
  withheld_ += std::exchange(pending_, std::string());
}

}  // namespace prl::server
