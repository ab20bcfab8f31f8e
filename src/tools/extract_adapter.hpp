#pragma once

#include <cstdint>
#include <filesystem>

#include "tensor/dtype.hpp"

namespace prl::tools {

struct ExtractOptions {
  std::filesystem::path merged;  ///< a Hugging Face folder
  std::filesystem::path base;    ///< another one of the same model: what the adapter is added to
  std::filesystem::path output_dir;
  std::int64_t rank = 0;
  DType dtype = DType::kF32;
  bool overwrite = false;
};

struct ExtractResult {
  std::int64_t num_modules = 0;
  double residual = 0;  ///< of the difference of all adapted matrices, what the adapter leaves, as a share of its norm
};

/// Writes the adapter in PEFT's format of that rank which, added to `base`, comes closest to `merged`, whole or not at all; alpha is the
/// rank. Matrices of attention and MLP that are equal in both get none. Error{kInvalidArgument} names what differs and can be in no
/// adapter: shapes, norms, embeddings; or says that nothing differs.
ExtractResult extract_adapter(const ExtractOptions& options);

}  // namespace prl::tools
