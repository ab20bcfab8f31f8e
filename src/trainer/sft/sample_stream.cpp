#include "trainer/sft/sample_stream.hpp"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <span>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "io/mapped_file.hpp"
#include "trainer/sft/conversation.hpp"

namespace prl::trainer {

namespace fs = std::filesystem;

namespace {

bool has_target(const SftSample& sample) {
  // The first token is predicted by nothing.
  return std::any_of(sample.mask.begin() + (sample.mask.empty() ? 0 : 1), sample.mask.end(), [](std::uint8_t m) { return m != 0; });
}

void truncate(SftSample& sample, std::int64_t max_tokens) {
  const auto limit = static_cast<std::size_t>(max_tokens);
  if (sample.ids.size() <= limit) return;
  sample.ids.resize(limit);
  sample.mask.resize(limit);
}

bool trains_role(const config::LossMaskConfig& roles, std::string_view role) {
  return role == "system" ? roles.system
         : role == "user" ? roles.user
         : role == "tool" ? roles.tool
                          : role == "assistant" && roles.assistant;
}

SftSample tokenize(const Conversation& c, const SftText& text, const config::LossMaskConfig& roles, bool& eos_appended) {
  if (text.renderer != nullptr && text.renderer->name() != "default") {
    text::RenderedConversation rendered = text.renderer->render(c.messages, c.tools, false);
    SftSample sample{std::move(rendered.ids), {}};
    sample.mask.resize(sample.ids.size(), 0);
    for (std::size_t i = 0; i < sample.ids.size(); ++i) {
      if (rendered.sampled_mask[i] != 0) {
        sample.mask[i] = roles.assistant;
      } else if (rendered.message_indices[i] >= 0 && rendered.is_content[i] != 0) {
        const auto& message = c.messages[static_cast<std::size_t>(rendered.message_indices[i])].as_object();
        const std::string_view role = std::string_view(message.at("role").as_string());
        sample.mask[i] = role != "assistant" && trains_role(roles, role);
      }
    }
    return sample;
  }
  if (text.chat_template == nullptr || text.tokenizer == nullptr)
    fail(ErrorCode::kInvalidArgument, "the model folder has no chat template: set tokenizer.chat_template, or name a renderer");
  text::MaskedSample masked = text::incremental_loss_mask(*text.tokenizer, *text.chat_template, c.messages, c.tools,
                                                          {roles.system, roles.user, roles.assistant, roles.tool}, c.template_kwargs);
  eos_appended = masked.eos_appended;
  return {std::move(masked.ids), std::move(masked.mask)};
}

class JsonlStream final : public SampleStream {
 public:
  JsonlStream(const config::SftDataConfig& data, const SftText& text) : data_(data), text_(text) {
    const char* unbuilt = data.subsets ? "data.subsets" : data.splits ? "data.splits" : data.probabilities ? "data.probabilities" : nullptr;
    if (unbuilt != nullptr)
      fail(ErrorCode::kNotImplemented,
           "[{}] mixing parts of a hub data set is not built: data.name takes a local JSONL file or a folder of them", unbuilt);
    if (data.pack_function == config::PackFunction::kStack)
      fail(ErrorCode::kNotImplemented, "[data.pack_function] 'stack' is not built: use 'cat', which wastes nothing");
    const fs::path path(data.name);
    std::vector<fs::path> files;
    if (fs::is_directory(path)) {
      for (const auto& entry : fs::directory_iterator(path))
        if (entry.is_regular_file() && entry.path().extension() == ".jsonl") files.push_back(entry.path());
      std::ranges::sort(files);
    } else if (fs::is_regular_file(path)) {
      files.push_back(path);
    }
    if (files.empty())
      fail(
          ErrorCode::kNotFound,
          "[data.name] {} is no JSONL file and no folder with *.jsonl files: data sets are not downloaded by this build, give a local path",
          data.name);
    for (const fs::path& file : files) add_file(file);
    if (rows_.empty()) fail(ErrorCode::kInvalidArgument, "[data.name] {} holds no rows", data.name);
    order_.resize(rows_.size());
    order_epoch_ = -1;
  }

  std::int64_t epoch_size() const noexcept override { return static_cast<std::int64_t>(rows_.size()); }

  std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) override {
    use_epoch(position / epoch_size());
    const Row& row = rows_[order_[static_cast<std::size_t>(position % epoch_size())]];
    SftSample sample;
    bool eos_appended = false;
    try {
      sample = tokenize(parse_conversation(row.text), text_, data_.loss_mask, eos_appended);
    } catch (const Error& error) {
      throw error.with_context(fmt::format("[data] {}:{}", files_[row.file]->path().string(), row.line));
    }
    if (eos_appended && !has_warned_eos_) {
      log::warning("{}:{}: the chat template never writes the end token, so one is added and trained (said once)",
                   files_[row.file]->path().string(), row.line);
      has_warned_eos_ = true;
    }
    truncate(sample, max_tokens);
    if (has_target(sample)) return sample;
    if (position < epoch_size())
      log::warning("{}:{} has no token to train on within the first {} and is skipped", files_[row.file]->path().string(), row.line,
                   max_tokens);
    return std::nullopt;
  }

 private:
  struct Row {
    std::size_t file;
    std::int64_t line;
    std::string_view text;
  };

  void add_file(const fs::path& path) {
    files_.push_back(io::MappedFile::open(path));
    const auto bytes = files_.back()->bytes();
    std::string_view rest(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (std::int64_t line = 1; !rest.empty(); ++line) {
      const auto end = rest.find('\n');
      const std::string_view text = rest.substr(0, end);
      rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 1);
      if (text.find_first_not_of(" \t\r") != std::string_view::npos) rows_.push_back({files_.size() - 1, line, text});
    }
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
  std::vector<std::shared_ptr<const io::MappedFile>> files_;
  std::vector<Row> rows_;
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

std::unique_ptr<SampleStream> make_jsonl_stream(const config::SftDataConfig& data, const SftText& text) {
  return std::make_unique<JsonlStream>(data, text);
}
std::unique_ptr<SampleStream> make_fake_stream(const config::FakeDataConfig& data, std::int64_t vocab_size) {
  return std::make_unique<FakeStream>(data, vocab_size);
}
std::unique_ptr<SampleStream> make_stream(const config::SftData& data, const SftText& text, std::int64_t vocab_size) {
  if (const auto* jsonl = std::get_if<config::SftDataConfig>(&data)) return make_jsonl_stream(*jsonl, text);
  return make_fake_stream(std::get<config::FakeDataConfig>(data), vocab_size);
}

}  // namespace prl::trainer
