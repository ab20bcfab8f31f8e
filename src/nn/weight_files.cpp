#include "nn/weight_files.hpp"

#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/safetensors.hpp"
#include "nn/models/config_reader.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Elements converted at a time, in whole rows.
constexpr std::int64_t kWritePiece = 1 << 20;

constexpr const char* kCompanions[] = {"tokenizer.json",  "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                                       "merges.txt",      "added_tokens.json",     "chat_template.jinja",     "chat_template.json",
                                       "tokenizer.model", "generation_config.json"};
/// The template for conversations with tools, where a model has one of its own.
constexpr const char* kToolTemplate = "additional_chat_templates/tool_use.jinja";

constexpr std::uint64_t kMaxTokenizerConfigBytes = 64 << 20;

void replace_chat_template(const fs::path& folder, const std::string& text) {
  fs::remove(folder / kToolTemplate);
  fs::remove(folder / "chat_template.json");
  write_file_atomic(folder / "chat_template.jinja", text);
  const fs::path path = folder / "tokenizer_config.json";
  if (!fs::exists(path)) return;
  json::error_code error;
  json::value config = json::parse(read_file(path, kMaxTokenizerConfigBytes), error);
  if (error.failed() || !config.is_object()) fail(ErrorCode::kCorrupt, "{}: not a JSON object", path.string());
  json::value* old = config.get_object().if_contains("chat_template");
  if (old == nullptr) return;
  *old = json::string(text);
  fs::remove(path);
  write_file_atomic(path, pretty_json(config));
}

void append_rounded(io::SafetensorsWriter& writer, std::span<const float> values, DType dtype) {
  if (dtype == DType::kF32) return writer.append(std::as_bytes(values));
  std::vector<std::uint16_t> halves(values.size());
  if (dtype == DType::kBF16) {
    std::transform(values.begin(), values.end(), halves.begin(), [](float v) { return to_bf16(v).bits; });
  } else {
    std::transform(values.begin(), values.end(), halves.begin(), io::f32_to_f16);
  }
  writer.append(std::as_bytes(std::span(halves)));
}

}  // namespace

namespace {

struct Shard {
  std::vector<const WeightSource*> sources;
  int writer = 0;
};

/// Greedy, in order.
std::vector<Shard> divide(std::span<const WeightSource> sources, const WeightFileOptions& options, std::uint64_t total_bytes) {
  std::vector<Shard> shards(1);
  std::uint64_t shard_bytes = 0, before = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(sources[i].shape.num_elements()) * size_of(options.dtype);
    // The next writer begins with the first layer past the share of this one.
    const bool begins_layer = i > 0 && (sources[i].layer != sources[i - 1].layer || sources[i].layer < 0);
    const int writer = shards.back().writer;
    const bool is_of_next =
        begins_layer && writer + 1 < options.num_writers && !shards.back().sources.empty() &&
        before * static_cast<std::uint64_t>(options.num_writers) >= total_bytes * static_cast<std::uint64_t>(writer + 1);
    if (is_of_next || (shard_bytes + bytes > options.max_shard_bytes && !shards.back().sources.empty())) {
      shards.push_back({{}, writer + (is_of_next ? 1 : 0)});
      shard_bytes = 0;
    }
    shards.back().sources.push_back(&sources[i]);
    shard_bytes += bytes;
    before += bytes;
  }
  return shards;
}

}  // namespace

void write_weight_files(const fs::path& folder, std::span<const WeightSource> sources, const WeightFileOptions& options) {
  const DType dtype = options.dtype;
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16)
    fail(ErrorCode::kInvalidArgument, "weights can be saved as float32, bfloat16 or float16, not as {}", to_string(dtype));
  std::uint64_t total_bytes = 0, done_bytes = 0;
  for (const WeightSource& source : sources) total_bytes += static_cast<std::uint64_t>(source.shape.num_elements()) * size_of(dtype);
  const std::vector<Shard> shards = divide(sources, options, total_bytes);
  json::object weight_map;
  std::vector<float> piece;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shards.size() == 1 ? options.stem + ".safetensors"
                                                : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem, s + 1, shards.size());
    std::vector<io::SafetensorsWriter::Spec> specs;
    for (const WeightSource* source : shards[s].sources) {
      std::vector<std::int64_t> shape;
      for (int d = 0; d < source->shape.num_dims(); ++d) shape.push_back(source->shape[d]);
      specs.push_back({source->name, io::stored_type(dtype), std::move(shape)});
      weight_map[source->name] = name;
    }
    if (shards[s].writer != options.writer) continue;
    io::SafetensorsWriter writer(folder / name, std::move(specs), {{"format", "pt"}});
    for (const WeightSource* source : shards[s].sources) {
      const std::int64_t cols = source->shape.num_cols(), count = source->shape.num_elements();
      const std::int64_t step = std::max<std::int64_t>(kWritePiece / std::max<std::int64_t>(cols, 1), 1) * cols;
      for (std::int64_t first = 0; first < count; first += step) {
        piece.resize(static_cast<std::size_t>(std::min(step, count - first)));
        source->read(first, piece);
        append_rounded(writer, piece, dtype);
        done_bytes += piece.size() * size_of(dtype);
        if (options.progress) options.progress(done_bytes, total_bytes);
      }
    }
    writer.finish();
  }
  if (shards.size() > 1 && options.writer == 0) {
    const json::object index{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", std::move(weight_map)}};
    write_file_atomic(folder / (options.stem + ".safetensors.index.json"), pretty_json(index));
  }
}

namespace {

/// "a/b/" ends in an empty name.
fs::path without_slash(const fs::path& folder) { return folder.has_filename() ? folder : folder.parent_path(); }

}  // namespace

fs::path start_model_folder(const fs::path& folder, bool replace) {
  if (!replace && fs::exists(folder) && !(fs::is_directory(folder) && fs::is_empty(folder)))
    fail(ErrorCode::kAlreadyExists, "{} exists; remove it or save elsewhere", folder.string());
  const fs::path clean = without_slash(folder);
  const fs::path parent = clean.has_parent_path() ? clean.parent_path() : fs::path(".");
  const fs::path temporary = parent / fmt::format("{}.tmp-{}", clean.filename().string(), ::getpid());
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(temporary, error);
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", temporary.string(), error.message());
  return temporary;
}

void finish_model_folder(const fs::path& temporary, const fs::path& folder) {
  fs::remove_all(without_slash(folder));  // empty, or to be replaced
  publish_directory(temporary, without_slash(folder));
}

void make_model_folder(const fs::path& folder, const std::function<void(const fs::path& temporary)>& fill, bool replace) {
  const fs::path temporary = start_model_folder(folder, replace);
  std::error_code error;
  try {
    fill(temporary);
    finish_model_folder(temporary, folder);
  } catch (const fs::filesystem_error& cause) {
    fs::remove_all(temporary, error);
    fail(ErrorCode::kIo, "cannot save {}: {}", folder.string(), cause.what());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
}

void copy_companions(const Companions& companions, const fs::path& to) {
  const fs::path& from = companions.folder;
  if (!from.empty()) {
    for (const char* name : kCompanions)
      if (fs::exists(from / name)) fs::copy_file(from / name, to / name);
    if (fs::exists(from / kToolTemplate)) {
      fs::create_directories((to / kToolTemplate).parent_path());
      fs::copy_file(from / kToolTemplate, to / kToolTemplate);
    }
  }
  if (companions.chat_template) replace_chat_template(to, *companions.chat_template);
}

}  // namespace prl::nn
