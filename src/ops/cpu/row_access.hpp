#pragma once

#include <cstdint>

#include "tensor/tensor.hpp"

namespace prl::ops::cpu {

/// Bytes of a row of a view, from column `col` on.
inline char* row_bytes(const TensorView& v, std::int64_t r, std::int64_t col = 0) {
  return static_cast<char*>(v.data) + (r * v.row_stride + col) * static_cast<std::int64_t>(size_of(v.dtype));
}
inline const char* row_bytes(const ConstTensorView& v, std::int64_t r, std::int64_t col = 0) {
  return static_cast<const char*>(v.data) + (r * v.row_stride + col) * static_cast<std::int64_t>(size_of(v.dtype));
}

/// The elements of a row.
template <typename T>
T* row_of(const TensorView& v, std::int64_t r) {
  return reinterpret_cast<T*>(row_bytes(v, r));
}
template <typename T>
const T* row_of(const ConstTensorView& v, std::int64_t r) {
  return reinterpret_cast<const T*>(row_bytes(v, r));
}

}  // namespace prl::ops::cpu
