#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "io/safetensors.hpp"
#include "nn/model_config.hpp"

// Matrices of 8-bit numbers with a scale for each block, as DeepSeek-V3 and others are published: Fp8Format says how they lie in files.

namespace prl::nn {

/// The number of the 8 bits of E4M3 (Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)", 2023): sign, four bits of
/// exponent with a bias of 7, three of mantissa. At most 448; there is no infinity, and 0x7f and 0xff are NaN.
float e4m3_to_f32(std::uint8_t code) noexcept;

/// The scales of a tensor of E4M3: of one matrix, or of several that lie one after the other. A number is what its code stands for times
/// the scale of its block, in fp32. Borrows the folder's files.
struct Fp8Scales {
  io::SafetensorsRef ref;                       ///< [blocks along rows, blocks along columns] of each matrix; F32, BF16 or F16
  std::int64_t rows = 0, cols = 0;              ///< of a matrix
  std::int64_t block_rows = 0, block_cols = 0;  ///< those at the ends of a matrix hold what is left
};

/// The scales of `matrix` [rows, cols] or [n, rows, cols] of E4M3 in `files`. Error{kCorrupt} naming file and tensor if they are missing,
/// or have another shape or type than `format` wants.
Fp8Scales find_scales(const io::SafetensorsFolder& files, const io::SafetensorsRef& matrix, const Fp8Format& format);

/// Elements [first, first + out.size()) of `matrix` as fp32. A code that is NaN, or a scale that is, gives NaN.
void read_fp8(const io::SafetensorsRef& matrix, const Fp8Scales& scales, std::int64_t first, std::span<float> out);

}  // namespace prl::nn
