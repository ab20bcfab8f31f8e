#pragma once

#include <cstddef>
#include <cstdint>

#include "io/safetensors.hpp"

namespace prl::io {

/// Index of the first of `count` elements of a stored tensor, from `first` on, that is NaN or infinite, or becomes so when it is rounded to
/// `as`; -1 if there is none. F32, BF16 and F16 are looked at.
std::int64_t find_not_finite(const SafetensorsFile& file, const SafetensorsEntry& entry, std::int64_t first, std::int64_t count, DType as);
/// The same of values in memory, as they would be stored.
std::int64_t find_not_finite(const std::byte* values, StoredType type, std::int64_t count, DType as);

}  // namespace prl::io
