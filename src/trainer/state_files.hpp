#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tensor_file.hpp"
#include "nn/tensor_table.hpp"
#include "tensor/tensor.hpp"
#include "trainer/shard_plan.hpp"

namespace prl::trainer {

/// Where the parts of a checkpoint that several ranks wrote lie: layout.json.
///
/// The masters of all tensors lie one after another in an array, `offset` from its start. Part i is in file parts[i].file, which holds one
/// part or several, but of a tensor one at most: of each tensor that lies in the part, as a whole or not, a vector of what does under
/// its name, and the same of each of its states under "<name>.<state>".
struct StateLayout {
  struct Entry {
    std::string name;
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0;
    std::int64_t num_elements() const noexcept;
  };
  struct Part {
    std::string file;
    ElementRange range;
  };
  std::vector<Entry> tensors;
  std::vector<Part> parts;
};
inline constexpr const char* kLayoutFile = "layout.json";
std::string rank_file(int rank);
StateLayout state_layout(const nn::TensorTable& table, const ShardPlan& plan);
std::string to_json(const StateLayout& layout);
/// Error{kCorrupt} naming `source` and the key.
StateLayout parse_layout(std::string_view json, std::string_view source);

/// Masters and optimizer state of a checkpoint, written by any number of ranks, of which any range can be read. One thread.
class StateFiles {
 public:
  /// `folder`: <checkpoints>/step_N/trainer. Error{kNotFound}, {kCorrupt}.
  explicit StateFiles(std::filesystem::path folder);
  /// True if model.safetensors and optimizer.safetensors hold everything, as one rank writes it.
  bool is_whole() const noexcept { return !layout_; }
  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Elements [first, first + out.num_elements()) of the masters of tensor `spec`, or of its state `state` if that is not empty.
  /// Error{kCorrupt} names file and tensor: missing, of another shape or dtype.
  void read(const nn::TensorSpec& spec, std::string_view state, std::int64_t first, const Tensor& out);
  /// Error{kCorrupt} if there is a tensor that `table` does not train.
  void check_known(const nn::TensorTable& table) const;

 private:
  const io::SafetensorsFile& open(const std::string& file);

  std::filesystem::path folder_;
  std::optional<StateLayout> layout_;
  std::map<std::string, StateLayout::Entry> entries_;
  std::map<std::string, std::unique_ptr<io::SafetensorsFile>> files_;
};

}  // namespace prl::trainer
