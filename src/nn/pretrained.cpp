// Parameters from and to Hugging Face folders.
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/thread_pool.hpp"
#include "io/safetensors.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/models/family.hpp"
#include "nn/parameters.hpp"
#include "nn/stored_weights.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Elements converted at a time, by reading and by writing.
constexpr std::int64_t kPiece = 1 << 20;

/// Files of a tokenizer and of generation defaults that travel with the weights.
constexpr const char* kCompanions[] = {"tokenizer.json",  "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                                       "merges.txt",      "added_tokens.json",     "chat_template.jinja",     "chat_template.json",
                                       "tokenizer.model", "generation_config.json"};

std::string config_text(const ModelConfig& config, DType dtype) {
  const char* name = dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32";
  if (config.raw_json.empty()) {
    ModelConfig copy = config;
    copy.torch_dtype = name;
    return to_config_json(copy);
  }
  json::value value = json::parse(config.raw_json);
  json::object& object = value.get_object();
  object[object.contains("dtype") ? "dtype" : "torch_dtype"] = name;
  return pretty_json(value);
}

/// Writes `count` elements of an fp32 tensor from `first` on, rounded to `dtype`.
void append_rounded(io::SafetensorsWriter& writer, const Tensor& value, DType dtype) {
  std::vector<float> piece;
  std::vector<std::uint16_t> halves;
  for (std::int64_t first = 0; first < value.num_elements(); first += kPiece) {
    const std::int64_t count = std::min(kPiece, value.num_elements() - first);
    piece.resize(static_cast<std::size_t>(count));
    value.runtime()->copy_to_host(piece.data(), value.as<float>() + first, piece.size() * sizeof(float));
    if (dtype == DType::kF32) {
      writer.append(std::as_bytes(std::span(piece)));
      continue;
    }
    halves.resize(piece.size());
    if (dtype == DType::kBF16) {
      std::transform(piece.begin(), piece.end(), halves.begin(), [](float v) { return to_bf16(v).bits; });
    } else {
      std::transform(piece.begin(), piece.end(), halves.begin(), io::f32_to_f16);
    }
    writer.append(std::as_bytes(std::span(halves)));
  }
}

}  // namespace

void load_parameters(Parameters& parameters, const fs::path& folder) {
  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder);
  std::vector<StoredWeight> wanted;
  for (const NamedParameter& p : parameters.named()) wanted.push_back({p.name, p.value.shape()});
  const std::vector<io::SafetensorsRef> found = match_stored_weights(files, parameters.config(), wanted);

  struct Piece {
    std::size_t tensor;
    std::int64_t first;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    for (std::int64_t first = 0; first < parameters.named()[i].value.num_elements(); first += kPiece) pieces.push_back({i, first});
  ThreadPool pool;
  pool.parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t n) {
    const Piece piece = pieces[static_cast<std::size_t>(n)];
    const Tensor& value = parameters.named()[piece.tensor].value;
    const io::SafetensorsRef ref = found[piece.tensor];
    std::vector<float> values(static_cast<std::size_t>(std::min(kPiece, value.num_elements() - piece.first)));
    ref.file->read_f32(*ref.entry, piece.first, values);
    value.runtime()->copy_from_host(value.as<float>() + piece.first, values.data(), values.size() * sizeof(float));
  });
}

void save_pretrained(const Parameters& parameters, const fs::path& folder, DType dtype, const fs::path& tokenizer_source,
                     std::uint64_t max_shard_bytes) {
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16)
    fail(ErrorCode::kInvalidArgument, "weights can be saved as float32, bfloat16 or float16, not as {}", to_string(dtype));
  if (fs::exists(folder) && !(fs::is_directory(folder) && fs::is_empty(folder)))
    fail(ErrorCode::kAlreadyExists, "{} exists; remove it or save elsewhere", folder.string());
  if (!tokenizer_source.empty() && !fs::is_directory(tokenizer_source))
    fail(ErrorCode::kNotFound, "tokenizer folder {} does not exist", tokenizer_source.string());

  // Greedy, in order: a shard ends when the next tensor would pass the limit.
  std::vector<std::vector<const NamedParameter*>> shards(1);
  std::uint64_t shard_bytes = 0, total_bytes = 0;
  for (const NamedParameter& parameter : parameters.named()) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(parameter.value.num_elements()) * size_of(dtype);
    if (shard_bytes + bytes > max_shard_bytes && !shards.back().empty()) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(&parameter);
    shard_bytes += bytes;
    total_bytes += bytes;
  }

  const fs::path parent = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  const fs::path temporary = parent / fmt::format("{}.tmp-{}", folder.filename().string(), ::getpid());
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(temporary, error);
  if (error) fail(ErrorCode::kIo, "cannot make {}: {}", temporary.string(), error.message());
  try {
    json::object weight_map;
    for (std::size_t s = 0; s < shards.size(); ++s) {
      const std::string name =
          shards.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
      std::vector<io::SafetensorsWriter::Spec> specs;
      for (const NamedParameter* parameter : shards[s]) {
        std::vector<std::int64_t> shape;
        for (int d = 0; d < parameter->value.shape().num_dims(); ++d) shape.push_back(parameter->value.shape()[d]);
        specs.push_back({parameter->name, io::stored_type(dtype), std::move(shape)});
        weight_map[parameter->name] = name;
      }
      io::SafetensorsWriter writer(temporary / name, std::move(specs), {{"format", "pt"}});
      for (const NamedParameter* parameter : shards[s]) append_rounded(writer, parameter->value, dtype);
      writer.finish();
    }
    if (shards.size() > 1) {
      const json::object index{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", std::move(weight_map)}};
      write_file_atomic(temporary / "model.safetensors.index.json", pretty_json(index));
    }
    write_file_atomic(temporary / "config.json", config_text(parameters.config(), dtype));
    if (!tokenizer_source.empty())
      for (const char* name : kCompanions)
        if (fs::exists(tokenizer_source / name)) fs::copy_file(tokenizer_source / name, temporary / name);
    if (fs::exists(folder)) fs::remove(folder);  // empty, checked above
    publish_directory(temporary, folder);
  } catch (const fs::filesystem_error& cause) {
    fs::remove_all(temporary, error);
    fail(ErrorCode::kIo, "cannot save {}: {}", folder.string(), cause.what());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
}

std::vector<io::SafetensorsRef> match_stored_weights(const io::SafetensorsFolder& files, const ModelConfig& config,
                                                     std::span<const StoredWeight> wanted) {
  const Family& family = find_family(config.model_type, files.path().string());
  std::vector<io::SafetensorsRef> found;
  std::set<std::string_view> known;
  for (const StoredWeight& weight : wanted) {
    known.insert(weight.name);
    const io::SafetensorsRef ref = files.find(weight.name);
    if (ref.entry == nullptr)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' of the {} model is missing", files.path().string(), weight.name, config.model_type);
    std::string shape = "[";
    bool same = static_cast<int>(ref.entry->shape.size()) == weight.shape.num_dims();
    for (std::size_t d = 0; d < ref.entry->shape.size(); ++d) {
      same = same && ref.entry->shape[d] == weight.shape[static_cast<int>(d)];
      shape += fmt::format("{}{}", d == 0 ? "" : ", ", ref.entry->shape[d]);
    }
    if (!same)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' has shape {}], config.json wants {}", ref.file->path().string(), weight.name, shape,
           weight.shape.to_string());
    using io::StoredType;
    if (const StoredType type = ref.entry->type; type != StoredType::kF32 && type != StoredType::kBF16 && type != StoredType::kF16)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted F32, BF16 or F16", ref.file->path().string(), weight.name,
           io::to_string(type));
    found.push_back(ref);
  }
  const std::string head = family.name_of(Slot::kLmHead, -1);
  for (const auto& [name, ref] : files.tensors()) {
    if (known.count(name) > 0 || name.ends_with("rotary_emb.inv_freq") || (config.tie_word_embeddings && name == head)) continue;
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' is no part of a {} model with this config.json", ref.file->path().string(), name,
         config.model_type);
  }
  return found;
}

}  // namespace prl::nn
