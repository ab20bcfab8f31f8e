#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/sft_config.hpp"
#include "text/chat_template.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"

namespace prl::trainer {

/// One conversation as tokens; mask[i] says whether token i is a training target.
struct SftSample {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;
};

/// An endless stream of samples, each a pure function of its position: a resume needs the position and nothing else.
class SampleStream {
 public:
  virtual ~SampleStream() = default;
  /// The sample at `position` (from 0), or nullopt if that row has no target within `max_tokens` and is skipped. Longer samples
  /// keep their first max_tokens. Error{kInvalidArgument} naming file and line.
  virtual std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) = 0;
  /// Positions of one pass over the data.
  virtual std::int64_t epoch_size() const noexcept = 0;
};

/// How conversations become tokens. With a renderer other than "default" its own marks say which tokens the model emits, and
/// other roles train on their content only; else each message is rendered in turn and must extend the one before.
struct SftText {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;
  std::shared_ptr<const text::Renderer> renderer;  ///< may be null
};

/// Rows of a JSONL file, or of all *.jsonl of a folder in the order of their names; with shuffle, in a new order each epoch that
/// depends on seed + epoch. Error{kNotFound} naming the path, {kNotImplemented} naming keys that need a data set hub.
std::unique_ptr<SampleStream> make_jsonl_stream(const config::SftDataConfig& data, const SftText& text);
/// Samples of seq_len or random length whose ids count the samples or are random; every token is a target.
std::unique_ptr<SampleStream> make_fake_stream(const config::FakeDataConfig& data, std::int64_t vocab_size);
std::unique_ptr<SampleStream> make_stream(const config::SftData& data, const SftText& text, std::int64_t vocab_size);

}  // namespace prl::trainer
