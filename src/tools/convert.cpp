#include "tools/convert.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "io/finite.hpp"
#include "io/gguf.hpp"
#include "io/safetensors.hpp"
#include "nn/eight_bit_files.hpp"
#include "nn/gguf_model.hpp"
#include "nn/peft.hpp"
#include "nn/stored_layout.hpp"
#include "nn/stored_weights.hpp"
#include "nn/weight_files.hpp"
#include "ops/context.hpp"
#include "text/bpe_files.hpp"
#include "text/chat_template.hpp"

namespace prl::tools {
namespace fs = std::filesystem;
namespace {

constexpr auto kProgressPause = std::chrono::seconds(2);

/// Lines "converting X: 40% of 1.2 GB, 310 MB/s", one every few seconds.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)), start_(Clock::now()), last_(start_) {}
  void operator()(std::uint64_t done, std::uint64_t total) {
    const auto now = Clock::now();
    if (now - last_ < kProgressPause || done == total) return;
    last_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    log::info("{}: {:.0f}% of {:.0f} MB, {:.0f} MB/s", what_, 100.0 * static_cast<double>(done) / static_cast<double>(total),
              static_cast<double>(total) / 1e6, static_cast<double>(done) / 1e6 / seconds);
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  Clock::time_point start_, last_;
};

text::TokenKind kind_of(std::int64_t type, const std::string& path, std::size_t id) {
  // Source: enum llama_token_type of llama.cpp.
  switch (type) {
    case 1: return text::TokenKind::kNormal;
    case 2:
    case 3: return text::TokenKind::kSpecial;
    case 4: return text::TokenKind::kAdded;
    case 5: return text::TokenKind::kUnused;
    case 6:
      fail(ErrorCode::kNotImplemented, "{}: key 'tokenizer.ggml.token_type': token {} is a byte; byte-level vocabularies have none", path,
           id);
    default: fail(ErrorCode::kCorrupt, "{}: key 'tokenizer.ggml.token_type': token {} has type {}, wanted 1 to 6", path, id, type);
  }
}

text::BpeVocabulary read_vocabulary(const io::GgufFile& file, const nn::ModelConfig& config,
                                    const std::optional<std::string>& pre_tokenizer) {
  const std::string path = file.path().string();
  const auto missing = [&](std::string_view key) { fail(ErrorCode::kCorrupt, "{}: key '{}' is missing", path, key); };
  const auto model = file.string("tokenizer.ggml.model");
  if (!model) missing("tokenizer.ggml.model");
  if (*model != "gpt2")
    fail(ErrorCode::kNotImplemented, "{}: key 'tokenizer.ggml.model' is '{}'; this build reads 'gpt2', byte-level BPE", path, *model);
  text::BpeVocabulary v;
  if (pre_tokenizer) {
    v.pre_tokenizer = *pre_tokenizer;
  } else if (const auto name = file.string("tokenizer.ggml.pre")) {
    v.pre_tokenizer = *name;
  } else {
    fail(ErrorCode::kCorrupt,
         "{}: key 'tokenizer.ggml.pre' is missing: the file does not say how it splits text; name it with --pre-tokenizer ({})", path,
         fmt::join(text::bpe_pre_tokenizer_names(), ", "));
  }
  for (const std::string_view token : file.strings("tokenizer.ggml.tokens")) v.tokens.emplace_back(token);
  for (const std::string_view merge : file.strings("tokenizer.ggml.merges")) v.merges.emplace_back(merge);
  if (v.tokens.empty()) missing("tokenizer.ggml.tokens");
  if (static_cast<std::int64_t>(v.tokens.size()) > config.vocab_size)
    fail(ErrorCode::kCorrupt, "{}: {} tokens, but the embedding has {} rows", path, v.tokens.size(), config.vocab_size);
  const std::vector<std::int64_t> types = file.integers("tokenizer.ggml.token_type");
  if (!types.empty() && types.size() != v.tokens.size())
    fail(ErrorCode::kCorrupt, "{}: key 'tokenizer.ggml.token_type' holds {} types for {} tokens", path, types.size(), v.tokens.size());
  for (std::size_t id = 0; id < v.tokens.size(); ++id)
    v.kinds.push_back(types.empty() ? text::TokenKind::kNormal : kind_of(types[id], path, id));
  const auto id = [&](const char* key) -> std::optional<std::int32_t> {
    const auto value = file.integer(std::string("tokenizer.ggml.") + key);
    if (!value) return std::nullopt;
    if (*value < 0 || *value >= static_cast<std::int64_t>(v.tokens.size()))
      fail(ErrorCode::kCorrupt, "{}: key 'tokenizer.ggml.{}' is {}, the vocabulary has {} entries", path, key, *value, v.tokens.size());
    return static_cast<std::int32_t>(*value);
  };
  v.bos_id = id("bos_token_id");
  v.eos_id = id("eos_token_id");
  v.unk_id = id("unknown_token_id");
  v.pad_id = id("padding_token_id");
  v.stop_ids = config.eos_ids;
  // Llama 3 files rarely say it, but their tokenizer has always begun with a BOS.
  const bool is_llama3 = v.pre_tokenizer == "llama-bpe" || v.pre_tokenizer == "llama3" || v.pre_tokenizer == "llama-v3";
  v.add_bos = v.bos_id && file.boolean("tokenizer.ggml.add_bos_token").value_or(is_llama3);
  v.chat_template = file.string("tokenizer.chat_template").value_or("");
  v.model_max_length = config.max_position;
  return v;
}

/// Writes `sources` of a model's tensor table, and config.json of the result.
void write_model(const ConvertOptions& options, const fs::path& folder, std::vector<nn::WeightSource> sources,
                 const ConvertResult& result) {
  if (options.has_eight_bits) nn::mark_eight_bit(result.config, sources);
  sources = nn::stored_sources(result.config, std::move(sources));
  std::string config_json = nn::saved_config_json(result.config, result.dtype);
  if (options.has_eight_bits) {
    sources = nn::eight_bit_sources(std::move(sources));
    config_json = nn::eight_bit_config_json(config_json, sources);
  }
  nn::write_weight_files(
      folder, sources,
      {.dtype = result.dtype, .max_shard_bytes = options.max_shard_bytes, .progress = Progress("converting " + options.input.string())});
  write_file_atomic(folder / "config.json", config_json);
}

void convert_gguf(const ConvertOptions& options, const fs::path& temporary, ConvertResult& result) {
  if (options.adapter)
    fail(ErrorCode::kInvalidArgument, "--adapter: an adapter is merged into a model folder; convert {} to one first",
         options.input.string());
  const auto file = std::make_shared<const io::GgufFile>(io::GgufFile::open(options.input));
  result.config = nn::gguf_model_config(*file);
  result.dtype = options.dtype.value_or(nn::gguf_natural_dtype(*file));
  const text::BpeVocabulary vocabulary = read_vocabulary(*file, result.config, options.pre_tokenizer);
  text::write_bpe_tokenizer(temporary, vocabulary, options.input.string());
  result.has_chat_template = !vocabulary.chat_template.empty();
  write_model(options, temporary, nn::gguf_weight_sources(file, result.config), result);
}

/// What most elements of a folder are stored in.
DType natural_dtype(const io::SafetensorsFolder& files) {
  std::map<io::StoredType, std::int64_t> counts;
  for (const auto& [name, ref] : files.tensors()) counts[ref.entry->type] += ref.entry->num_elements();
  const auto most = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most == counts.end()) return DType::kBF16;
  return most->first == io::StoredType::kF32 ? DType::kF32 : most->first == io::StoredType::kF16 ? DType::kF16 : DType::kBF16;
}

/// The adapter that is to be merged into the model of `base`.
nn::StoredAdapterPtr read_adapter(const ConvertOptions& options, const nn::ModelConfig& model, std::span<const nn::WeightSource> base) {
  ops::OpSession session(make_cpu_runtime(), 0);
  const std::string name = options.input.string();
  nn::PeftLimits limits{.base_name = name, .remedy = "; --any-base merges it all the same"};
  if (!options.takes_any_base) limits.base = [&](DType dtype) { return nn::identity_of(session.context(), base, dtype); };
  nn::StoredAdapterPtr adapter = nn::read_peft_adapter(model, *options.adapter, DType::kF32, *session.context().pool, limits);
  if (adapter->base) return adapter;
  if (const std::string doubt = nn::doubt_of_base(adapter->config, model, options.input, name); !doubt.empty())
    log::warning("the adapter {}: {}", options.adapter->string(), doubt);
  return adapter;
}

/// Error{kCorrupt} naming tensor and element of what is no finite number.
void read_finite(const nn::StoredTensor& stored, std::int64_t first, std::span<float> out) {
  stored.read_f32(first, out);
  const auto count = static_cast<std::int64_t>(out.size());
  if (io::find_not_finite(std::as_bytes(out).data(), io::StoredType::kF32, count, DType::kF32) < 0) return;
  ThreadPool pool;
  nn::check_finite(std::span(&stored, 1), DType::kF32, pool);
}

void convert_folder(const ConvertOptions& options, const fs::path& temporary, ConvertResult& result) {
  if (options.pre_tokenizer)
    fail(ErrorCode::kInvalidArgument, "--pre-tokenizer is for GGUF files; {} is a folder with a tokenizer of its own",
         options.input.string());
  result.config = nn::load_model_config(options.input);
  const auto files = std::make_shared<const io::SafetensorsFolder>(io::SafetensorsFolder::open(options.input));
  result.dtype = options.dtype.value_or(natural_dtype(*files));
  const nn::TensorTablePtr table = nn::make_tensor_table(result.config);
  const std::vector<nn::StoredTensor> found = nn::match_stored_weights(*files, result.config, *table);
  std::vector<nn::WeightSource> sources;
  for (std::size_t i = 0; i < found.size(); ++i)
    sources.push_back({.name = table->tensors()[i].name,
                       .shape = table->tensors()[i].stored_shape(),
                       .read = [files, stored = found[i]](std::int64_t first, std::span<float> out) { read_finite(stored, first, out); },
                       .is_exact = table->tensors()[i].is_exact()});
  if (options.adapter) {
    const nn::StoredAdapterPtr adapter = read_adapter(options, result.config, sources);
    for (nn::WeightSource& source : sources) source = nn::merged_source(std::move(source), adapter);
  }
  nn::copy_companions({.folder = options.input, .chat_template = {}}, temporary);
  result.has_chat_template = text::ChatTemplate::exists(options.input);
  write_model(options, temporary, std::move(sources), result);
}

}  // namespace

ConvertResult convert_model(const ConvertOptions& options) {
  const bool is_file = fs::is_regular_file(options.input);
  if (is_file && !io::GgufFile::is_gguf(options.input))
    fail(ErrorCode::kInvalidArgument, "{} is no GGUF file; prl convert reads GGUF files and Hugging Face folders", options.input.string());
  if (!is_file && !fs::is_directory(options.input)) fail(ErrorCode::kNotFound, "{} does not exist", options.input.string());
  if (!is_file && !fs::exists(options.input / "config.json")) {
    for (const auto& entry : fs::directory_iterator(options.input))
      if (entry.path().extension() == ".gguf")
        fail(ErrorCode::kInvalidArgument, "{} is no Hugging Face folder; convert the file {}", options.input.string(),
             entry.path().string());
    fail(ErrorCode::kNotFound, "{} holds no config.json; prl convert reads GGUF files and Hugging Face folders", options.input.string());
  }
  std::vector<fs::path> inputs{options.input};
  if (options.adapter) inputs.push_back(*options.adapter);
  nn::check_output_folder(options.output_dir, options.overwrite, inputs);
  ConvertResult result;
  nn::make_model_folder(
      options.output_dir,
      [&](const fs::path& temporary) {
        if (is_file) {
          convert_gguf(options, temporary, result);
        } else {
          convert_folder(options, temporary, result);
        }
      },
      options.overwrite);
  return result;
}

}  // namespace prl::tools
