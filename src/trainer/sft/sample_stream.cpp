#include "trainer/sft/sample_stream.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <span>
#include <string_view>
#include <tuple>

#include <boost/json/serialize.hpp>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "io/data/find_dataset.hpp"
#include "io/data/row_table.hpp"
#include "trainer/sft/conversation.hpp"
#include "trainer/sft/mixture.hpp"

namespace prl::trainer {

namespace fs = std::filesystem;

namespace {

bool has_target(const SftSample& sample) {
  // The first token is predicted by nothing.
  return std::any_of(sample.mask.begin() + (sample.mask.empty() ? 0 : 1), sample.mask.end(), [](std::uint8_t m) { return m != 0; });
}

void truncate(SftSample& sample, std::int64_t max_tokens) {
  if (static_cast<std::int64_t>(sample.ids.size()) <= max_tokens) return;
  const auto limit = static_cast<std::size_t>(wire::uncut_length(sample.images, max_tokens));
  std::erase_if(sample.images, [&](const wire::PromptImage& image) { return image.first >= static_cast<std::int64_t>(limit); });
  sample.ids.resize(limit);
  sample.mask.resize(limit);
}

/// The file of a picture. Paths stay within `folder`.
std::string bytes_of(const RowImage& image, const fs::path& folder, const vision::ImageLimits& limits) {
  if (image.kind == RowImage::Kind::kUri) return vision::bytes_of_data_uri(image.text, limits);
  if (image.kind == RowImage::Kind::kBytes) {
    if (image.text.size() / 4 * 3 > limits.max_bytes + 3)
      fail(ErrorCode::kInvalidArgument, "an image file of {} bytes; at most {} are read", image.text.size() / 4 * 3, limits.max_bytes);
    return from_base64(image.text);
  }
  const fs::path root = fs::weakly_canonical(folder.empty() ? fs::path(".") : folder);
  const fs::path path = fs::weakly_canonical(root / image.text);
  const auto [end, within] = std::mismatch(root.begin(), root.end(), path.begin(), path.end());
  if (fs::path(image.text).is_absolute() || end != root.end())
    fail(ErrorCode::kInvalidArgument, "the path '{}' leads out of {}; pictures lie in the data file's folder or below it", image.text,
         root.string());
  return read_file(path, limits.max_bytes);
}

bool trains_role(const config::LossMaskConfig& roles, std::string_view role) {
  return role == "system" ? roles.system
         : role == "user" ? roles.user
         : role == "tool" ? roles.tool
                          : role == "assistant" && roles.assistant;
}

/// A data set has a handful of settings; one that makes up a new one for each row only makes its renderers anew.
constexpr std::size_t kMaxRenderers = 32;

/// The renderer of the text settings, or one with a row's own template kwargs.
class RowRenderers {
 public:
  explicit RowRenderers(const SftText& text) : text_(text) {}
  bool is_named() const { return text_.renderer != nullptr && text_.renderer->name() != "default"; }
  const text::Renderer& with(const boost::json::object& kwargs) {
    if (kwargs.empty()) return *text_.renderer;
    const std::string key = boost::json::serialize(kwargs);
    if (const auto it = made_.find(key); it != made_.end()) return *it->second;
    const auto known = text::known_template_kwargs(text_.renderer->name());
    for (const auto& kwarg : kwargs)
      if (known && std::find(known->begin(), known->end(), std::string_view(kwarg.key())) == known->end())
        fail(ErrorCode::kInvalidArgument,
             "key 'chat_template_kwargs' sets '{}', which the renderer '{}' does not know: use renderer.name = \"default\", which passes "
             "it to "
             "the model's chat template, or drop it",
             std::string_view(kwarg.key()), text_.renderer->name());
    text::RendererOptions options = text_.renderer_options;
    options.name = text_.renderer->name();
    for (const auto& kwarg : kwargs) options.template_kwargs[kwarg.key()] = kwarg.value();
    auto renderer = text::make_renderer(options, text_.tokenizer, text_.chat_template);
    if (made_.size() >= kMaxRenderers) made_.clear();
    return *made_.emplace(key, std::move(renderer)).first->second;
  }

 private:
  const SftText& text_;
  std::map<std::string, std::unique_ptr<text::Renderer>> made_;
};

SftSample tokenize(const Conversation& c, const SftText& text, RowRenderers& renderers, const config::LossMaskConfig& roles,
                   bool& eos_appended) {
  if (renderers.is_named()) {
    text::RenderedConversation rendered = renderers.with(c.template_kwargs).render(c.messages, c.tools, false);
    SftSample sample{.ids = std::move(rendered.ids), .mask = {}};
    sample.mask.resize(sample.ids.size(), 0);
    for (std::size_t i = 0; i < sample.ids.size(); ++i) {
      if (rendered.message_indices[i] < static_cast<std::int32_t>(c.num_prompt_messages)) continue;
      if (rendered.sampled_mask[i] != 0) {
        sample.mask[i] = roles.assistant;
      } else if (rendered.is_content[i] != 0) {
        const auto& message = c.messages[static_cast<std::size_t>(rendered.message_indices[i])].as_object();
        const std::string_view role = std::string_view(message.at("role").as_string());
        sample.mask[i] = role != "assistant" && trains_role(roles, role);
      }
    }
    return sample;
  }
  if (text.chat_template == nullptr || text.tokenizer == nullptr)
    fail(ErrorCode::kInvalidArgument, "the model folder has no chat template: set tokenizer.chat_template, or name a renderer");
  text::MaskedSample masked =
      text::incremental_loss_mask(*text.tokenizer, *text.chat_template, c.messages, c.tools,
                                  {roles.system, roles.user, roles.assistant, roles.tool}, c.template_kwargs, c.num_prompt_messages);
  eos_appended = masked.eos_appended;
  return {.ids = std::move(masked.ids), .mask = std::move(masked.mask)};
}

/// Puts the pictures of a row in the place of their placeholders. `file`: that the row is of.
void place_pictures(SftSample& sample, const Conversation& c, const vision::PromptImages* images, const fs::path& file) {
  if (c.images.empty()) return;
  if (images == nullptr)
    fail(ErrorCode::kInvalidArgument, "the row has images: set model.vlm, of a model with a vision tower, or use data without");
  if (c.images.size() > images->options().max_images)
    fail(ErrorCode::kInvalidArgument, "the row has {} images; at most {} are read", c.images.size(), images->options().max_images);
  std::vector<vision::PixelsPtr> pictures;
  for (std::size_t i = 0; i < c.images.size(); ++i) try {
      pictures.push_back(images->read_file(bytes_of(c.images[i], file.parent_path(), images->options().limits)));
    } catch (const Error& error) {
      throw error.with_context(fmt::format("image {}", i));
    }
  sample.images = images->place(pictures, sample.ids);
  vision::widen_at(std::span<const wire::PromptImage>(sample.images), sample.mask);
}

/// Columns of a row that parse_conversation reads.
const std::vector<std::string>& conversation_columns() {
  static const std::vector<std::string> kColumns{"messages", "prompt", "completion", "tools", "tool_defs", "chat_template_kwargs",
                                                 "images",   "image"};
  return kColumns;
}

/// Rows of data files, of one part or several mixed.
class DataStream final : public SampleStream {
 public:
  DataStream(const config::SftDataConfig& data, const SftText& text, const io::HubSettings& hub) : data_(data), text_(text) {
    for (const auto& [subset, split] : wanted_parts(data)) add_part(subset, split, hub);
    std::vector<std::size_t> sizes;
    for (const Part& part : parts_) sizes.push_back(static_cast<std::size_t>(part.last - part.first));
    rows_ = mix_rows(sizes, data.probabilities, data.stopping_strategy, static_cast<std::uint64_t>(data.seed));
    order_.resize(rows_.size());
    order_epoch_ = -1;
  }

  std::int64_t epoch_size() const noexcept override { return static_cast<std::int64_t>(rows_.size()); }
  std::vector<std::string> part_names() const override {
    std::vector<std::string> names;
    for (const Part& part : parts_) names.push_back(part.name);
    return names;
  }

  std::int64_t check_rows(std::chrono::milliseconds budget) override {
    const auto deadline = std::chrono::steady_clock::now() + budget;
    std::int64_t num_read = 0;
    std::int64_t num_rows = 0;
    for (const Part& part : parts_) {
      num_rows += part.last - part.first;
      for (std::int64_t row = part.first; row < part.last && std::chrono::steady_clock::now() < deadline; ++row, ++num_read) {
        try {
          static_cast<void>(parse_conversation(part.table->row(static_cast<std::size_t>(row))));
        } catch (const Error& error) {
          throw error.with_context(fmt::format("[data] {}", part.table->where(static_cast<std::size_t>(row))));
        }
      }
    }
    if (num_read < num_rows)
      log::info("[data] {} of {} rows were checked within {} s; the others are when their turn comes", num_read, num_rows,
                std::chrono::duration_cast<std::chrono::seconds>(budget).count());
    return num_read;
  }

  std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) override {
    use_epoch(position / epoch_size());
    const MixedRow mixed = rows_[order_[static_cast<std::size_t>(position % epoch_size())]];
    const Part& part = parts_[mixed.part];
    const std::size_t row = static_cast<std::size_t>(part.first) + mixed.index;
    SftSample sample;
    bool eos_appended = false;
    try {
      const Conversation conversation = parse_conversation(part.table->row(row));
      sample = tokenize(conversation, text_, renderers_, data_.loss_mask, eos_appended);
      place_pictures(sample, conversation, text_.images.get(), part.table->file(row));
    } catch (const Error& error) {
      throw error.with_context(fmt::format("[data] {}", part.table->where(row)));
    }
    sample.part = mixed.part;
    if (eos_appended && !has_warned_eos_) {
      log::warning("{}: the chat template never writes the end token, so one is added and trained (said once)", part.table->where(row));
      has_warned_eos_ = true;
    }
    truncate(sample, max_tokens);
    if (has_target(sample)) return sample;
    if (position < epoch_size())
      log::warning("{} has no token to train on within the first {} and is skipped", part.table->where(row), max_tokens);
    return std::nullopt;
  }

 private:
  struct Part {
    std::string name;
    std::unique_ptr<io::RowTable> table;
    std::int64_t first = 0, last = 0;
  };
  using Wanted = std::pair<std::optional<std::string>, std::string>;

  /// Subset and split of each part. One list alone varies with the other at its default; two of one length go together.
  static std::vector<Wanted> wanted_parts(const config::SftDataConfig& data) {
    std::vector<Wanted> parts;
    if (data.subsets && data.splits && data.subsets->size() != data.splits->size())
      fail(ErrorCode::kInvalidArgument, "[data.splits] {} splits for {} subsets: one for each is wanted", data.splits->size(),
           data.subsets->size());
    const std::size_t count = data.subsets ? data.subsets->size() : data.splits ? data.splits->size() : 1;
    for (std::size_t i = 0; i < count; ++i)
      parts.emplace_back(data.subsets ? std::optional((*data.subsets)[i]) : std::nullopt, data.splits ? (*data.splits)[i] : "train");
    if (parts.empty()) fail(ErrorCode::kInvalidArgument, "[data.subsets] an empty list names no data");
    return parts;
  }

  void add_part(const std::optional<std::string>& subset, const std::string& split, const io::HubSettings& hub) {
    const io::SplitRange range = io::parse_split(split);
    Part part;
    part.name = subset.value_or(split);
    if (std::any_of(parts_.begin(), parts_.end(), [&](const Part& other) { return other.name == part.name; }))
      part.name = subset ? fmt::format("{}/{}", *subset, split) : fmt::format("{}/{}", split, parts_.size() + 1);
    part.table = std::make_unique<io::RowTable>(conversation_columns());
    try {
      for (const fs::path& file : io::find_data_files(data_.name, {subset, range.name}, hub)) part.table->add_file(file);
    } catch (const Error& error) {
      throw error.with_context("[data.name]");
    }
    std::tie(part.first, part.last) = range.rows(static_cast<std::int64_t>(part.table->size()));
    if (part.first == part.last)
      fail(ErrorCode::kInvalidArgument, "[data.name] {}{}, split {}: no rows", data_.name, subset ? ", subset " + *subset : "", split);
    parts_.push_back(std::move(part));
  }

  void use_epoch(std::int64_t epoch) {
    if (epoch == order_epoch_) return;
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    if (data_.shuffle) {
      Rng rng(static_cast<std::uint64_t>(data_.seed + epoch), 0x5f7);
      for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[rng.next_below(i)]);
    }
    order_epoch_ = epoch;
  }

  config::SftDataConfig data_;
  SftText text_;
  RowRenderers renderers_{text_};
  std::vector<Part> parts_;
  std::vector<MixedRow> rows_;
  std::vector<std::size_t> order_;
  std::int64_t order_epoch_ = -1;
  bool has_warned_eos_ = false;
};

class FakeStream final : public SampleStream {
 public:
  FakeStream(const config::FakeDataConfig& data, std::int64_t vocab_size) : data_(data), vocab_size_(vocab_size) {}
  // An arbitrary length: fake data has no passes, but progress/epoch and a validation pass need one.
  std::int64_t epoch_size() const noexcept override { return 1000; }
  std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) override {
    Rng rng(static_cast<std::uint64_t>(data_.seed), static_cast<std::uint64_t>(position));
    const auto longest = static_cast<std::uint64_t>(std::min<std::int64_t>(data_.seq_len, max_tokens));
    // At least two tokens, one of which can be predicted.
    const std::uint64_t n = data_.length == config::FakeLength::kFixed || longest <= 2 ? longest : 2 + rng.next_below(longest - 2);
    SftSample sample;
    for (std::uint64_t i = 0; i < n; ++i)
      sample.ids.push_back(
          static_cast<std::int32_t>(data_.input_ids == config::FakeInputIds::kIncreasing
                                        ? position % vocab_size_
                                        : static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(vocab_size_)))));
    sample.mask.assign(n, 1);
    return sample;
  }

 private:
  config::FakeDataConfig data_;
  std::int64_t vocab_size_;
};

}  // namespace

std::unique_ptr<SampleStream> make_data_stream(const config::SftDataConfig& data, const SftText& text, const io::HubSettings& hub) {
  return std::make_unique<DataStream>(data, text, hub);
}
std::unique_ptr<SampleStream> make_fake_stream(const config::FakeDataConfig& data, std::int64_t vocab_size) {
  return std::make_unique<FakeStream>(data, vocab_size);
}
std::unique_ptr<SampleStream> make_stream(const config::SftData& data, const SftText& text, const io::HubSettings& hub,
                                          std::int64_t vocab_size) {
  if (const auto* real = std::get_if<config::SftDataConfig>(&data)) return make_data_stream(*real, text, hub);
  return make_fake_stream(std::get<config::FakeDataConfig>(data), vocab_size);
}

}  // namespace prl::trainer
