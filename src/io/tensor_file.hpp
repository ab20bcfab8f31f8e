#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "io/safetensors.hpp"
#include "tensor/tensor.hpp"

namespace prl::io {

/// A tensor under a name, for state files (optimizer moments, say).
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// Writes tensors as they are, in order, as one safetensors file, fsynced. Write it inside a CheckpointWriter's folder.
void save_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                  const std::map<std::string, std::string>& metadata);
/// Fills tensors that exist already. Error{kCorrupt} names file and tensor if one is missing, of another shape or dtype, or left over.
void load_tensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors);

}  // namespace prl::io
