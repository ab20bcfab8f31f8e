#pragma once

#include <string>
#include <string_view>

namespace prl::server {

/// Splits streamed text into reasoning, content and tool-call markup, as it arrives. Text that may be the beginning of a
/// marker is held back until it is decided; markup is withheld to the end, where the renderer's parser reads it.
class StreamSplitter {
 public:
  struct Options {
    bool reasoning = false;            ///< <think> ... </think> at the beginning is reasoning
    bool starts_in_reasoning = false;  ///< the prompt opened the block already
    std::string_view tool_mark = {};   ///< of a literal; withhold from the first one on; empty: nothing is withheld
  };
  struct Piece {
    std::string reasoning;
    std::string content;
  };
  explicit StreamSplitter(Options options);
  Piece push(std::string_view text);
  /// What was still held back.
  Piece finish();
  /// Everything from the first tool-call marker on, with the marker.
  const std::string& withheld() const noexcept { return withheld_; }

 private:
  enum class State { kStart, kReasoning, kContent, kTools };
  void advance(Piece& piece, bool is_end);

  Options options_;
  State state_;
  bool skip_newlines_ = false;
  std::string pending_;
  std::string withheld_;
};

}  // namespace prl::server
