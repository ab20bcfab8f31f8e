// Parameters from and to Hugging Face folders.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <unordered_map>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "io/finite.hpp"
#include "io/safetensors.hpp"
#include "nn/exact_parts.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/models/family.hpp"
#include "nn/parameters.hpp"
#include "nn/stored_layout.hpp"
#include "nn/stored_weights.hpp"
#include "nn/weight_files.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace {

/// Elements converted at a time.
constexpr std::int64_t kReadPiece = 1 << 20;

/// Two stored tensors that may differ in their type.
bool have_same_values(const io::SafetensorsRef& a, const io::SafetensorsRef& b) {
  if (a.entry->shape != b.entry->shape) return false;
  if (a.entry->type == b.entry->type) {
    const bool are_equal = std::ranges::equal(a.file->bytes(*a.entry), b.file->bytes(*b.entry));
    a.file->check_whole();
    b.file->check_whole();
    return are_equal;
  }
  std::vector<float> x, y;
  for (std::int64_t first = 0; first < a.entry->num_elements(); first += kReadPiece) {
    x.resize(static_cast<std::size_t>(std::min(kReadPiece, a.entry->num_elements() - first)));
    y.resize(x.size());
    a.file->read_f32(*a.entry, first, x);
    b.file->read_f32(*b.entry, first, y);
    if (x != y) return false;
  }
  return true;
}

/// A file may repeat the embedding under the head's name. A head of its own would be lost without a word.
void check_tied_head(const io::SafetensorsFolder& files, const std::string& embedding, const std::string& head) {
  const io::SafetensorsRef a = files.find(head), b = files.find(embedding);
  if (a.entry == nullptr || b.entry == nullptr || have_same_values(a, b)) return;
  fail(ErrorCode::kCorrupt,
       "{}: tensor '{}' differs from '{}', but config.json has tie_word_embeddings = true, which uses the embedding as head: set it to "
       "false if the model has a head of its own, or remove the tensor",
       a.file->path().string(), head, embedding);
}

}  // namespace

void load_parameters(Parameters& parameters, const fs::path& folder) {
  const io::SafetensorsFolder files = io::SafetensorsFolder::open(folder);
  const ModelConfig& config = parameters.config();
  const TensorTablePtr of_model = make_tensor_table(config);
  const std::vector<StoredTensor> all_found =
      config.is_mtp_head ? match_head_weights(files, config, *of_model) : match_stored_weights(files, config, *of_model);
  // Of parameters that are a part of a model, an adapter's among them, those that the folder has.
  std::unordered_map<std::string_view, std::size_t> index;
  for (std::size_t i = 0; i < all_found.size(); ++i) index.emplace(of_model->tensors()[i].name, i);
  std::vector<StoredTensor> found;
  for (const TensorSpec& spec : parameters.table()->tensors()) {
    const auto of = index.find(spec.name);
    found.push_back(of == index.end() ? StoredTensor() : all_found[of->second]);
  }

  struct Piece {
    std::size_t tensor;
    std::int64_t first, count;
  };
  const std::span<const TensorSpec> tensors = parameters.table()->tensors();
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::int64_t first = 0; tensors[i].trainable && found[i].is_there() && first < tensors[i].num_elements(); first += kReadPiece) {
      PRL_CHECK(!tensors[i].is_exact() || tensors[i].num_elements() <= kReadPiece, "{} is read in one piece", tensors[i].name);
      const std::int64_t count = std::min(kReadPiece, tensors[i].num_elements() - first), begin = tensors[i].offset + first;
      if (!parameters.held().within({begin, begin + count}).empty()) pieces.push_back({i, first, count});
    }
  ThreadPool pool;
  std::vector<StoredTensor> exact;
  for (const Piece& piece : pieces)
    if (tensors[piece.tensor].is_exact()) exact.push_back(found[piece.tensor]);
  check_finite(exact, DType::kF32, pool);
  std::vector<std::uint8_t> is_finite(pieces.size());  // bytes: several threads write
  pool.parallel_for(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t n) {
    const Piece& piece = pieces[static_cast<std::size_t>(n)];
    const StoredTensor& stored = found[piece.tensor];
    std::vector<float> values(static_cast<std::size_t>(piece.count));
    if (tensors[piece.tensor].is_exact())
      read_exact(stored, values);
    else
      stored.read_f32(piece.first, values);
    is_finite[static_cast<std::size_t>(n)] =
        io::find_not_finite(std::as_bytes(std::span(values)).data(), io::StoredType::kF32, piece.count, DType::kF32) < 0;
    parameters.write_held(tensors[piece.tensor].offset + piece.first, values);
  });
  for (std::size_t n = 0; n < pieces.size(); ++n)
    if (!is_finite[n]) check_finite(std::span(&found[pieces[n].tensor], 1), DType::kF32, pool);
}

void save_pretrained(const Parameters& parameters, const fs::path& folder, DType dtype, const Companions& companions,
                     std::uint64_t max_shard_bytes, const Parameters* head) {
  std::vector<WeightSource> sources;
  const auto add = [&](const Parameters& from) {
    for (const NamedParameter& parameter : from.named()) {
      const Tensor value = parameter.value;
      sources.push_back(stored_source(parameter, [value](std::int64_t first, std::span<float> out) {
        value.runtime()->copy_to_host(out.data(), value.as<float>() + first, out.size_bytes());
      }));
    }
  };
  add(parameters);
  if (head != nullptr) add(*head);
  save_model_folder(parameters.config(), sources, folder, dtype, companions, max_shard_bytes);
}

namespace {

void check_there(const Companions& companions) {
  if (!companions.folder.empty() && !fs::is_directory(companions.folder))
    fail(ErrorCode::kNotFound, "tokenizer folder {} does not exist", companions.folder.string());
}

}  // namespace

void write_model_extras(const ModelConfig& config, const fs::path& folder, DType dtype, const Companions& companions) {
  check_there(companions);
  write_file_atomic(folder / "config.json", saved_config_json(config, dtype));
  copy_companions(companions, folder);
}

void save_model_folder(const ModelConfig& config, std::span<const WeightSource> sources, const fs::path& folder, DType dtype,
                       const Companions& companions, std::uint64_t max_shard_bytes) {
  check_there(companions);
  make_model_folder(folder, [&](const fs::path& temporary) {
    write_weight_files(temporary, stored_sources(config, {sources.begin(), sources.end()}),
                       {.dtype = dtype, .max_shard_bytes = max_shard_bytes, .stem = "model", .progress = {}});
    write_model_extras(config, temporary, dtype, companions);
  });
}

void check_finite(std::span<const StoredTensor> tensors, DType compute, ThreadPool& pool) {
  struct Part {
    const StoredTensor* tensor = nullptr;
    std::int64_t first = 0, count = 0;
  };
  std::vector<Part> parts;
  for (const StoredTensor& tensor : tensors) {
    const std::int64_t size = tensor.num_elements();
    for (std::int64_t first = 0; first < size; first += kReadPiece) parts.push_back({&tensor, first, std::min(kReadPiece, size - first)});
  }
  std::vector<std::int64_t> found(parts.size(), -1);
  pool.parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t n) {
    const Part& part = parts[static_cast<std::size_t>(n)];
    found[static_cast<std::size_t>(n)] = part.tensor->find_not_finite(part.first, part.count, compute);
  });
  for (std::size_t n = 0; n < parts.size(); ++n) {
    if (found[n] < 0) continue;
    const StoredTensor& tensor = *parts[n].tensor;
    float value = 0;
    tensor.read_f32(found[n], std::span(&value, 1));
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' holds {} at element {}{}; weights must be finite numbers in {}", tensor.path().string(),
         tensor.name(), value, found[n], tensor.scale_note(), to_string(compute));
  }
}

namespace {

/// How files that hold a model for images, too, name the tensors of the model for text, and those of the rest.
struct MultimodalNames {
  std::string_view text;  ///< in place of "model."
  std::string_view head;  ///< in place of the head's
  std::span<const std::string_view> others;
};
constexpr std::string_view kOthersInModel[] = {"model.visual.", "model.vision_tower.", "model.multi_modal_projector."};
constexpr std::string_view kOthersBeside[] = {"vision_tower.", "multi_modal_projector."};
constexpr MultimodalNames kMultimodalNames[] = {
    {"model.language_model.", "lm_head.weight", kOthersInModel},
    {"language_model.model.", "language_model.lm_head.weight", kOthersBeside}};  // Gemma 3 as it is published

/// Names as files have them: those of the table, or as one of kMultimodalNames says.
class StoredNames {
 public:
  StoredNames(const io::SafetensorsFolder& files, const ModelConfig& config)
      : drops_mtp_(find_family(config.model_type, files.path().string()).drops_mtp || config.mtp) {
    const std::string embedding = checkpoint_name(Slot::kEmbedding).substr(kModel.size());
    has_model_prefix_ = config.has_single_parts && files.find("model.embeddings.weight").entry != nullptr;
    for (const MultimodalNames& names : kMultimodalNames)
      if (names_ == nullptr && files.find(std::string(names.text) + embedding).entry != nullptr) names_ = &names;
  }
  std::string of(std::string_view name) const {
    if (has_model_prefix_ && name.starts_with(kBackbone)) return std::string(kModel).append(name.substr(kBackbone.size()));
    if (names_ != nullptr && name.starts_with(kModel)) return std::string(names_->text).append(name.substr(kModel.size()));
    return std::string(names_ != nullptr && name == checkpoint_name(Slot::kLmHead) ? names_->head : name);
  }
  /// Of other parts than that for text: of images, and of layers that predict several tokens.
  bool is_of_other_part(std::string_view name) const {
    if (is_of_mtp(name)) return true;
    return names_ != nullptr && std::ranges::any_of(names_->others, [&](std::string_view other) { return name.starts_with(other); });
  }

  bool is_of_mtp(std::string_view name) const { return drops_mtp_ && name.starts_with("mtp."); }

 private:
  static constexpr std::string_view kModel = "model.", kBackbone = "backbone.";
  bool drops_mtp_;
  bool has_model_prefix_ = false;  ///< in place of Nemotron-H's "backbone.", as transformers has it in memory
  const MultimodalNames* names_ = nullptr;
};

/// The scale of a layer's inputs, which a product of 8-bit numbers would want.
bool is_of_fp8_inputs(std::string_view name, const ModelConfig& config) {
  return config.fp8 && (name.ends_with(".activation_scale") || name.ends_with(".input_scale"));
}

bool is_of_skipped_layer(std::string_view name, const ModelConfig& config) {
  for (std::int64_t i = 0; i < config.num_skipped_layers; ++i)
    if (name.starts_with(fmt::format("model.layers.{}.", config.num_layers + i))) return true;
  return false;
}

/// Finds tensors by name and checks what they are; notes their names in `known`.
struct Matcher {
  const io::SafetensorsFolder& files;
  const ModelConfig& config;
  std::set<std::string, std::less<>>& known;

  io::SafetensorsRef find(const std::string& name, const std::vector<std::int64_t>& wanted) const {
    const io::SafetensorsRef ref = find_shaped(name, wanted);
    check_float(ref, false);
    return ref;
  }
  /// The same of tensors that `as` makes of the file's, which may be FP8 where config.json says how.
  template <typename As>
  StoredTensor find_scaled(const std::string& name, const std::vector<std::int64_t>& wanted, const As& as) const {
    const io::SafetensorsRef ref = find_shaped(name, wanted);
    if (config.fp8 && ref.entry->type == io::StoredType::kF8E4M3) {
      const Fp8Scales scales = find_scales(files, ref, *config.fp8);
      known.insert(scales.ref.entry->name);
      return as(ref).scaled(scales);
    }
    check_float(ref, config.fp8.has_value());
    return as(ref);
  }
  io::SafetensorsRef find_bytes(const std::string& name, const std::vector<std::int64_t>& wanted) const {
    const io::SafetensorsRef ref = find_shaped(name, wanted);
    if (ref.entry->type != io::StoredType::kU8)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted U8", ref.file->path().string(), name,
           io::to_string(ref.entry->type));
    return ref;
  }
  /// The matrix of an expert in `stack`, or in the MXFP4 that files may have in its place.
  StoredTensor expert_of(const TensorSpec& spec, const std::string& stack) const {
    const std::int64_t experts = config.num_experts, rows = spec.shape[0], cols = spec.shape[1];
    const std::string blocks = stack + "_blocks";
    if (files.find(blocks).entry == nullptr) return StoredTensor::transposed(find(stack, {experts, cols, rows}), spec.expert, rows, cols);
    if (cols % kMxfp4Block != 0)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' has rows of {} numbers, wanted multiples of {}", files.path().string(), blocks, cols,
           kMxfp4Block);
    return StoredTensor::mxfp4(find_bytes(blocks, {experts, rows, cols / kMxfp4Block, kMxfp4Block / 2}),
                               find_bytes(stack + "_scales", {experts, rows, cols / kMxfp4Block}), spec.expert, rows, cols);
  }

  /// The rows of an expert's matrix in `stack`.
  StoredTensor rows_of_expert(const TensorSpec& spec, const std::string& stack) const {
    const std::int64_t matrices = spec.slot == Slot::kExpertDown ? 1 : 2, which = spec.slot == Slot::kExpertUp ? 1 : 0;
    const std::int64_t rows = spec.shape[0], cols = spec.shape[1];
    return find_scaled(stack, {config.num_experts, matrices * rows, cols}, [&](const io::SafetensorsRef& ref) {
      return StoredTensor::part(ref, (spec.expert * matrices + which) * rows * cols, rows * cols);
    });
  }

 private:
  void check_float(const io::SafetensorsRef& ref, bool takes_fp8) const {
    using io::StoredType;
    const StoredType type = ref.entry->type;
    if (type == StoredType::kF32 || type == StoredType::kBF16 || type == StoredType::kF16) return;
    const bool is_unannounced = type == StoredType::kF8E4M3 && !config.fp8;
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted {}F32, BF16 or F16{}", ref.file->path().string(), ref.entry->name,
         io::to_string(type), takes_fp8 ? "F8_E4M3, " : "",
         is_unannounced ? ": the model's config.json has no 'quantization_config' that says how it is scaled" : "");
  }
  io::SafetensorsRef find_shaped(const std::string& name, const std::vector<std::int64_t>& wanted) const {
    known.insert(name);
    const io::SafetensorsRef ref = files.find(name);
    if (ref.entry == nullptr)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' of the {} model is missing{}", files.path().string(), name, config.model_type,
           name.ends_with("lm_head.weight") ? "; a config.json with 'tie_word_embeddings' true takes the embedding for it" : "");
    if (ref.entry->shape != wanted)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' has shape [{}], config.json wants [{}]", ref.file->path().string(), name,
           fmt::join(ref.entry->shape, ", "), fmt::join(wanted, ", "));
    return ref;
  }
};

}  // namespace

bool is_of_fp8(std::string_view name, const ModelConfig& config) {
  return config.fp8 && (is_of_fp8_inputs(name, config) || name.ends_with(config.fp8->scale_suffix));
}

namespace {

/// In the order of the table. What is shared with another model stays empty.
std::vector<StoredTensor> find_tensors(const Matcher& matcher, const StoredNames& names, const TensorTable& table) {
  const ModelConfig& config = matcher.config;
  const io::SafetensorsFolder& files = matcher.files;
  std::vector<StoredTensor> found;
  for (const TensorSpec& weight : table.tensors()) {
    if (config.is_mtp_head && !weight.trainable) {
      found.emplace_back();
      continue;
    }
    const std::string stack = names.of(stack_name(weight, config.expert_names));
    if (config.expert_names == ExpertNames::kStacked && !stack.empty()) {
      found.push_back(matcher.expert_of(weight, stack));
      continue;
    }
    // Where there is none, files have experts one by one, as transformers writes them.
    if (!stack.empty() && files.find(stack).entry != nullptr) {
      found.push_back(matcher.rows_of_expert(weight, stack));
      continue;
    }
    const Shape wanted = weight.stored_shape();
    std::vector<std::int64_t> shape;
    for (int d = 0; d < wanted.num_dims(); ++d) shape.push_back(wanted[d]);
    const auto as_in_memory = [&](const io::SafetensorsRef& ref) {
      const std::vector<RowRun> runs = stored_rows(config, weight.slot);
      return runs.empty() ? StoredTensor(ref) : StoredTensor::reordered(ref, runs, shape.back());
    };
    const std::string name = names.of(weight.name);
    found.push_back(shape.size() == 2 ? matcher.find_scaled(name, shape, as_in_memory) : as_in_memory(matcher.find(name, shape)));
  }
  return found;
}

}  // namespace

std::vector<StoredTensor> match_head_weights(const io::SafetensorsFolder& files, const ModelConfig& head, const TensorTable& table) {
  std::set<std::string, std::less<>> known;
  return find_tensors({files, head, known}, StoredNames(files, head), table);
}

std::vector<StoredTensor> match_stored_weights(const io::SafetensorsFolder& files, const ModelConfig& config, const TensorTable& table) {
  std::set<std::string, std::less<>> known;
  const StoredNames names(files, config);
  const std::vector<StoredTensor> found = find_tensors({files, config, known}, names, table);
  const std::string head = names.of(checkpoint_name(Slot::kLmHead));
  if (config.tie_word_embeddings) check_tied_head(files, names.of(checkpoint_name(Slot::kEmbedding)), head);
  std::int64_t num_skipped = 0, num_of_others = 0;
  for (const auto& [name, ref] : files.tensors()) {
    if (is_of_skipped_layer(name, config)) {
      ++num_skipped;
      continue;
    }
    if (config.vision && name.starts_with(kTowerPrefix)) continue;  // VisionTower::load() reads them
    if (names.is_of_other_part(name)) {
      if (!config.mtp || !names.is_of_mtp(name)) ++num_of_others;
      continue;
    }
    if (known.count(name) > 0 || name.ends_with("rotary_emb.inv_freq") || is_of_fp8_inputs(name, config) ||
        (config.tie_word_embeddings && name == head))
      continue;
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' is no part of a {} model with this config.json", ref.file->path().string(), name,
         config.model_type);
  }
  if (const auto num_fp8 = std::ranges::count_if(found, &StoredTensor::is_fp8); num_fp8 > 0)
    log::info("{}: {} matrices of FP8 are read as the numbers that they and their scales stand for", files.path().string(), num_fp8);
  if (num_skipped > 0 && !config.mtp)
    log::info("{}: {} tensors of layers for multi-token prediction (keys 'num_nextn_predict_layers', 'num_mtp_modules') are left out",
              files.path().string(), num_skipped);
  if (num_of_others > 0)
    log::info("{}: {} tensors of other parts than the one for text (images, multi-token prediction) are left out", files.path().string(),
              num_of_others);
  return found;
}

void read_exact(const StoredTensor& stored, std::span<float> parts) {
  std::vector<float> values(parts.size() / static_cast<std::size_t>(kNumExactParts));
  stored.read_f32(0, values);
  split_exact(values, parts, fmt::format("{}: tensor '{}'", stored.path().string(), stored.name()));
}

}  // namespace prl::nn
