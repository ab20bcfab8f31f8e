#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "nn/tensor_table.hpp"
#include "nn/weight_files.hpp"

// Vectors that must arrive everywhere with all bits of fp32 although everything else is rounded on its way to bfloat16. Each number is the
// sum of three that bfloat16 holds, so that no rounding changes them: what moves, cuts, hashes and checks weights need not know of them.

namespace prl::nn {

/// fp32 has 24 bits, bfloat16 has 8.
inline constexpr std::int64_t kNumExactParts = 3;

/// The parts of `values`, all first ones, all second ones, all third ones. Error{kCorrupt} naming `subject` for a number so small that
/// bfloat16 cannot hold its last bits.
void split_exact(std::span<const float> values, std::span<float> parts, const std::string& subject);
/// values[i] from parts first[i], second[i], third[i]; may be in the place of one of them.
void join_exact(std::span<const float> first, std::span<const float> second, std::span<const float> third, std::span<float> values);

/// A tensor of the table as files have it; `read` reads it as it lies in memory, and may be empty.
WeightSource stored_source(const TensorSpec& spec, std::function<void(std::int64_t first, std::span<float> out)> read);

}  // namespace prl::nn
