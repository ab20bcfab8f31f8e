#include "nn/weight_files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "io/copy_file.hpp"
#include "io/safetensors.hpp"
#include "nn/models/config_reader.hpp"
#include "ops/eight_bit.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Elements converted at a time, in whole rows.
constexpr std::int64_t kWritePiece = 1 << 20;

constexpr const char* kCompanions[] = {"tokenizer.json",  "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                                       "merges.txt",      "added_tokens.json",     "chat_template.jinja",     "chat_template.json",
                                       "tokenizer.model", "tiktoken.model",        "generation_config.json",  "preprocessor_config.json"};
/// The template for conversations with tools, where a model has one of its own.
constexpr const char* kToolTemplate = "additional_chat_templates/tool_use.jinja";

constexpr std::uint64_t kMaxTokenizerConfigBytes = 64 << 20;

/// Names that a model folder of ours can hold. Whatever else lies in one is the user's.
bool is_model_file(const std::string& name) {
  if (name == "config.json" || std::ranges::find(kCompanions, name) != std::end(kCompanions)) return true;
  if (name == "model.safetensors" || name == "model.safetensors.index.json") return true;
  return name.starts_with("model-") && name.ends_with(".safetensors");
}

/// Removes the model in `folder`, and the folder itself if nothing else is in it.
void remove_model_files(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> ours{folder / kToolTemplate, (folder / kToolTemplate).parent_path()};
  for (fs::directory_iterator it(folder, ignored), end; !ignored && it != end; it.increment(ignored))
    if (is_model_file(it->path().filename().string()) && !it->is_directory(ignored)) ours.push_back(it->path());
  ours.push_back(folder);
  for (const fs::path& path : ours) fs::remove(path, ignored);  // a folder only if it is empty
}

/// A name beside `folder` that nothing has yet.
fs::path unused_name(const fs::path& folder, std::string_view mark) {
  for (int n = 0;; ++n) {
    const fs::path path = folder.string() + fmt::format(".{}-{}{}", mark, ::getpid(), n == 0 ? "" : fmt::format("-{}", n));
    if (!fs::exists(fs::symlink_status(path))) return path;
  }
}

/// Gives `temporary` the name of the model folder `folder`. The former folder steps aside first and comes back if that fails; the
/// user's own files in it are moved into the new one.
void replace_model_folder(const fs::path& temporary, const fs::path& folder) {
  const fs::path aside = unused_name(folder, "old");
  fs::rename(folder, aside);
  try {
    publish_directory(temporary, folder);
  } catch (...) {
    fs::rename(aside, folder);
    throw;
  }
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(aside))
    if (const std::string name = entry.path().filename().string();
        !is_model_file(name) && name != fs::path(kToolTemplate).parent_path() && !fs::exists(folder / name))
      others.push_back(entry.path());
  for (const fs::path& path : others) fs::rename(path, folder / path.filename());
  remove_model_files(aside);
  if (fs::exists(aside)) log::warning("{} keeps files of the former {} that are no part of a model", aside.string(), folder.string());
}

/// Where `folder` really is, without links and without a slash at the end.
fs::path resolved(const fs::path& folder) {
  std::error_code error;
  fs::path path = fs::weakly_canonical(fs::absolute(folder), error);
  if (error) path = fs::absolute(folder).lexically_normal();  // a file where a folder should be, say: writing to it names the reason
  return path.has_filename() ? path : path.parent_path();
}

/// Whether `path` is `folder` or lies in it; both resolved.
bool is_within(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

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

/// Of a tensor in files of a type.
io::StoredType type_in_files(const WeightSource& source, DType dtype) {
  if (source.is_code) return io::StoredType::kF8E4M3;
  return io::stored_type(source.is_exact ? DType::kF32 : dtype);
}
std::uint64_t stored_bytes(const WeightSource& source, DType dtype) {
  return static_cast<std::uint64_t>(source.shape.num_elements()) * io::size_of(type_in_files(source, dtype));
}

void append_rounded(io::SafetensorsWriter& writer, std::span<const float> values, io::StoredType type) {
  if (type == io::StoredType::kF32) return writer.append(std::as_bytes(values));
  if (type == io::StoredType::kF8E4M3) {
    std::vector<std::uint8_t> codes(values.size());
    std::transform(values.begin(), values.end(), codes.begin(), [](float v) { return ops::eight_bit_code(v, 0); });
    return writer.append(std::as_bytes(std::span(codes)));
  }
  std::vector<std::uint16_t> halves(values.size());
  if (type == io::StoredType::kBF16) {
    std::transform(values.begin(), values.end(), halves.begin(), [](float v) { return to_bf16(v).bits; });
  } else {
    std::transform(values.begin(), values.end(), halves.begin(), io::f32_to_f16);
  }
  writer.append(std::as_bytes(std::span(halves)));
}

}  // namespace

namespace {

struct FileOfSeveral {
  std::vector<const WeightSource*> sources;
  int writer = 0;
};

/// Greedy, in order.
std::vector<FileOfSeveral> divide(std::span<const WeightSource> sources, const WeightFileOptions& options, std::uint64_t total_bytes) {
  std::vector<FileOfSeveral> shards(1);
  std::uint64_t shard_bytes = 0, before = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const std::uint64_t bytes = stored_bytes(sources[i], options.dtype);
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

std::uint64_t bytes_of(std::span<const WeightSource> sources, DType dtype) {
  std::uint64_t bytes = 0;
  for (const WeightSource& source : sources) bytes += stored_bytes(source, dtype);
  return bytes;
}

}  // namespace

std::vector<bool> sources_of_writer(std::span<const WeightSource> sources, const WeightFileOptions& options) {
  std::vector<bool> reads(sources.size(), false);
  for (const FileOfSeveral& shard : divide(sources, options, bytes_of(sources, options.dtype)))
    for (const WeightSource* source : shard.sources)
      if (shard.writer == options.writer) reads[static_cast<std::size_t>(source - sources.data())] = true;
  return reads;
}

namespace {

void check_dtype(DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16)
    fail(ErrorCode::kInvalidArgument, "weights can be saved as float32, bfloat16 or float16, not as {}", to_string(dtype));
}

std::vector<io::SafetensorsWriter::Spec> specs_of(const FileOfSeveral& shard, DType dtype) {
  std::vector<io::SafetensorsWriter::Spec> specs;
  for (const WeightSource* source : shard.sources) {
    std::vector<std::int64_t> shape;
    for (int d = 0; d < source->shape.num_dims(); ++d) shape.push_back(source->shape[d]);
    if (!source->file_shape.empty()) shape = source->file_shape;
    specs.push_back({source->name, type_in_files(*source, dtype), std::move(shape)});
  }
  return specs;
}

std::map<std::string, std::string> metadata_of(const WeightFileOptions& options) {
  std::map<std::string, std::string> metadata = options.metadata;
  metadata["format"] = "pt";
  return metadata;
}

/// All data of a shard, in pieces; `told` hears how many bytes each has.
void append_data(io::SafetensorsWriter& writer, const FileOfSeveral& shard, DType dtype,
                 const std::function<void(std::uint64_t bytes)>& told) {
  std::vector<float> piece;
  for (const WeightSource* source : shard.sources) {
    const std::int64_t cols = source->shape.num_cols(), count = source->shape.num_elements();
    const std::int64_t step = std::max<std::int64_t>(kWritePiece / std::max<std::int64_t>(cols, 1), 1) * cols;
    for (std::int64_t first = 0; first < count; first += step) {
      piece.resize(static_cast<std::size_t>(std::min(step, count - first)));
      source->read(first, piece);
      append_rounded(writer, piece, type_in_files(*source, dtype));
      told(piece.size() * io::size_of(type_in_files(*source, dtype)));
    }
  }
  writer.finish();
}

}  // namespace

void write_weight_image(std::vector<std::byte>& memory, std::span<const WeightSource> sources, const WeightFileOptions& options) {
  check_dtype(options.dtype);
  FileOfSeveral all;
  for (const WeightSource& source : sources) all.sources.push_back(&source);
  io::SafetensorsWriter writer(memory, specs_of(all, options.dtype), metadata_of(options));
  append_data(writer, all, options.dtype, [](std::uint64_t) {});
}

void write_weight_files(const fs::path& folder, std::span<const WeightSource> sources, const WeightFileOptions& options) {
  const DType dtype = options.dtype;
  check_dtype(dtype);
  const std::uint64_t total_bytes = bytes_of(sources, dtype);
  std::uint64_t done_bytes = 0;
  const std::vector<FileOfSeveral> shards = divide(sources, options, total_bytes);
  json::object weight_map;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shards.size() == 1 ? options.stem + ".safetensors"
                                                : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem, s + 1, shards.size());
    for (const WeightSource* source : shards[s].sources) weight_map[source->name] = name;
    if (shards[s].writer != options.writer) continue;
    io::SafetensorsWriter writer(folder / name, specs_of(shards[s], dtype), metadata_of(options));
    append_data(writer, shards[s], dtype, [&](std::uint64_t bytes) {
      done_bytes += bytes;
      if (options.progress) options.progress(done_bytes, total_bytes);
    });
  }
  if (shards.size() > 1 && options.writer == 0) {
    const json::object index{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", std::move(weight_map)}};
    write_file_atomic(folder / (options.stem + ".safetensors.index.json"), pretty_json(index));
  }
}

void check_output_folder(const fs::path& folder, bool overwrite, std::span<const fs::path> inputs) {
  const fs::path output = resolved(folder);
  for (const fs::path& input : inputs)
    if (is_within(resolved(input), output))
      fail(ErrorCode::kInvalidArgument, "{} holds {}, which is read: choose another output folder", folder.string(), input.string());
  if (is_within(resolved(fs::current_path()), output))
    fail(ErrorCode::kInvalidArgument, "{} holds the folder that prl was started in; it is not replaced: choose another output folder",
         folder.string());
  if (!fs::exists(folder)) return;
  if (!overwrite) fail(ErrorCode::kAlreadyExists, "{} exists already; choose another folder or add --overwrite", folder.string());
  if (!fs::is_directory(folder)) fail(ErrorCode::kAlreadyExists, "{} is no folder; it is not overwritten", folder.string());
  if (!fs::is_empty(folder) && !fs::exists(folder / "config.json"))
    fail(ErrorCode::kAlreadyExists, "{} holds something that is no model folder; it is not overwritten", folder.string());
}

fs::path start_model_folder(const fs::path& folder, bool replace) {
  if (!replace && fs::exists(folder) && !(fs::is_directory(folder) && fs::is_empty(folder)))
    fail(ErrorCode::kAlreadyExists, "{} exists; remove it or save elsewhere", folder.string());
  const fs::path temporary = resolved(folder).string() + fmt::format(".tmp-{}", ::getpid());
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(temporary, error);
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", temporary.string(), error.message());
  return temporary;
}

void finish_model_folder(const fs::path& temporary, const fs::path& folder) {
  const fs::path final_path = resolved(folder);
  if (fs::exists(final_path) && !fs::is_empty(final_path))
    replace_model_folder(temporary, final_path);
  else
    publish_directory(temporary, final_path);  // replaces an empty folder
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
      if (fs::exists(from / name)) io::copy_file(from / name, to / name);
    if (fs::exists(from / kToolTemplate)) {
      fs::create_directories((to / kToolTemplate).parent_path());
      io::copy_file(from / kToolTemplate, to / kToolTemplate);
    }
  }
  if (companions.chat_template) replace_chat_template(to, *companions.chat_template);
}

}  // namespace prl::nn
