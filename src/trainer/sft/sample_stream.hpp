#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/sft_config.hpp"
#include "io/hub/hub_settings.hpp"
#include "text/chat_template.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"
#include "vision/prompt.hpp"

namespace prl::trainer {

/// One conversation as tokens; mask[i] says whether token i is a training target.
struct SftSample {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;
  std::size_t part = 0;  ///< which of the stream's parts it comes from
  std::vector<wire::PromptImage> images = {};
};

/// An endless stream of samples, each a pure function of its position: a resume needs the position and nothing else.
class SampleStream {
 public:
  virtual ~SampleStream() = default;
  /// The sample at `position` (from 0), or nullopt if that row has no target within `max_tokens` and is skipped. Longer samples
  /// keep their first max_tokens, or end before an image that would be cut. Error{kInvalidArgument} naming file and line.
  virtual std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) = 0;
  /// Reads rows as far as it is cheap (they are parsed, not tokenized) until all were read or `budget` is used up, so that a bad row is
  /// found before the training that it would end. Returns how many were read. Error{kInvalidArgument} naming file and line.
  virtual std::int64_t check_rows(std::chrono::milliseconds budget) {
    static_cast<void>(budget);
    return epoch_size();
  }
  /// Positions of one pass over the data.
  virtual std::int64_t epoch_size() const noexcept = 0;
  /// Names of the parts that are mixed (subsets or splits); one for a stream that mixes nothing.
  virtual std::vector<std::string> part_names() const { return {"sft"}; }
};

/// How conversations become tokens. With a renderer other than "default" its own marks say which tokens the model emits, and
/// other roles train on their content only; else each message is rendered in turn and must extend the one before. A row's
/// chat_template_kwargs go to whichever of the two renders it, on top of those of the options.
struct SftText {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;
  std::shared_ptr<const text::Renderer> renderer;                ///< may be null
  text::RendererOptions renderer_options = {};                   ///< what `renderer` was made with
  std::shared_ptr<const vision::PromptImages> images = nullptr;  ///< how the model takes images; null: it takes none
};

/// Rows of a data file, a folder or a data set of the hub (io/data/find_dataset.hpp), of one part or of several mixed by
/// data.probabilities; with shuffle, in a new order each epoch that depends on seed + epoch.
/// Error{kNotFound} naming what was looked for; {kInvalidArgument} naming the key; {kCorrupt} naming file and row.
std::unique_ptr<SampleStream> make_data_stream(const config::SftDataConfig& data, const SftText& text, const io::HubSettings& hub);
/// Samples of seq_len or random length whose ids count the samples or are random; every token is a target.
std::unique_ptr<SampleStream> make_fake_stream(const config::FakeDataConfig& data, std::int64_t vocab_size);
std::unique_ptr<SampleStream> make_stream(const config::SftData& data, const SftText& text, const io::HubSettings& hub,
                                          std::int64_t vocab_size);

}  // namespace prl::trainer
