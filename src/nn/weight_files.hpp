#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/tensor.hpp"

namespace prl::nn {

/// A tensor to be saved, read piece by piece so that no model has to fit into memory twice.
struct WeightSource {
  std::string name;  ///< of the checkpoint
  Shape shape;
  /// Elements [first, first + out.size()) as fp32; always whole rows of the last dimension.
  std::function<void(std::int64_t first, std::span<float> out)> read;
  std::int64_t layer = -1;                    ///< of the model; -1: outside the layers
  bool is_exact = false;                      ///< fp32 in files of any type
  bool is_code = false;                       ///< numbers of E4M3 that ops/eight_bit.hpp has, which files hold in 8 bits
  bool is_eight_bit = false;                  ///< may be saved as codes (nn/eight_bit_files.hpp); no effect on writers
  std::vector<std::int64_t> file_shape = {};  ///< in files, of as many elements; empty: `shape`
};

struct WeightFileOptions {
  DType dtype = DType::kBF16;  ///< kF32, kBF16 or kF16, else Error{kInvalidArgument}
  std::uint64_t max_shard_bytes = 5'000'000'000ULL;
  std::string stem = "model";                        ///< of the files' names
  std::map<std::string, std::string> metadata = {};  ///< of each file, beside its format
  /// Called from time to time with the bytes written so far and of all tensors; may be empty.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress = {};
  /// Of several writers of one folder, which each write whole layers of about the same size. The first writes the index.
  int writer = 0, num_writers = 1;
};

/// Writes <stem>.safetensors into an existing folder, or shards and model.safetensors.index.json: a shard ends where the next
/// tensor would pass the limit, and where the next writer's layers begin. Values are rounded to nearest, ties to even, but for those that
/// are exact. Error{kIo}.
void write_weight_files(const std::filesystem::path& folder, std::span<const WeightSource> sources, const WeightFileOptions& options);

/// Appends to `memory` the bytes of the one file that it would write without a limit of a shard's size.
void write_weight_image(std::vector<std::byte>& memory, std::span<const WeightSource> sources, const WeightFileOptions& options);

/// Which of `sources` such a writer reads.
std::vector<bool> sources_of_writer(std::span<const WeightSource> sources, const WeightFileOptions& options);

/// Calls `fill` with a fresh folder beside `folder`, then gives that its final name, fsynced: the folder appears whole or not at
/// all. With `replace` a model that is there is replaced, and only once the new one is complete; other files in the folder stay.
/// Error{kAlreadyExists} unless `folder` is missing, empty or to be replaced; {kIo}; what `fill` throws, after cleaning up.
void make_model_folder(const std::filesystem::path& folder, const std::function<void(const std::filesystem::path& temporary)>& fill,
                       bool replace = false);

/// The two halves of make_model_folder(), for a folder that several processes fill: makes the fresh folder and returns it; gives it its
/// final name. Who made it removes it if it is not finished.
std::filesystem::path start_model_folder(const std::filesystem::path& folder, bool replace = false);
void finish_model_folder(const std::filesystem::path& temporary, const std::filesystem::path& folder);

/// For tools, before make_model_folder(folder, ..., overwrite): Error{kInvalidArgument} if `folder` holds one of `inputs` or the
/// working directory; {kAlreadyExists} if it exists without `overwrite`, or is no model folder.
void check_output_folder(const std::filesystem::path& folder, bool overwrite, std::span<const std::filesystem::path> inputs = {});

/// What goes beside the weights of a model folder.
struct Companions {
  std::filesystem::path folder;              ///< whose tokenizer, chat template and generation defaults are copied; empty for none
  std::optional<std::string> chat_template;  ///< Jinja text that takes the place of the folder's own templates
};
/// Copies what exists of them into `to`. A chat template that replaces the folder's own is written to chat_template.jinja and, where
/// tokenizer_config.json has one, there too: readers differ in which of the two they look at.
void copy_companions(const Companions& companions, const std::filesystem::path& to);

}  // namespace prl::nn
