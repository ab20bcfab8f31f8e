#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "base/error.hpp"
#include "device/device.hpp"
#include "tensor/dtype.hpp"

namespace prl {

/// Up to four extents, outermost first.
class Shape {
 public:
  static constexpr int kMaxDims = 4;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  int num_dims() const noexcept { return num_dims_; }
  std::int64_t operator[](int i) const noexcept { return dims_[static_cast<std::size_t>(i < 0 ? i + num_dims_ : i)]; }
  std::int64_t num_elements() const noexcept;
  /// Product of all extents but the last (1 for a vector), and the last one.
  std::int64_t num_rows() const noexcept;
  std::int64_t num_cols() const noexcept { return num_dims_ == 0 ? 1 : dims_[static_cast<std::size_t>(num_dims_ - 1)]; }
  bool operator==(const Shape&) const = default;
  std::string to_string() const;

 private:
  std::array<std::int64_t, kMaxDims> dims_{};
  int num_dims_ = 0;
};

/// Borrowed, typed memory. `row_stride` counts elements from one row (see Shape::num_rows) to the next; it equals
/// num_cols() unless the view is a column slice of a wider matrix.
struct ConstTensorView {
  const void* data = nullptr;
  Shape shape;
  DType dtype = DType::kF32;
  Device device;
  std::int64_t row_stride = 0;

  bool is_contiguous() const noexcept { return row_stride == shape.num_cols(); }
  template <typename T>
  const T* as() const noexcept {
    return static_cast<const T*>(data);
  }
  ConstTensorView reshaped(Shape s) const;                                ///< contiguous only
  ConstTensorView rows(std::int64_t begin, std::int64_t count) const;     ///< of the [num_rows, num_cols] matrix
  ConstTensorView columns(std::int64_t begin, std::int64_t count) const;  ///< a strided 2-D view
};

struct TensorView {
  void* data = nullptr;
  Shape shape;
  DType dtype = DType::kF32;
  Device device;
  std::int64_t row_stride = 0;

  operator ConstTensorView() const noexcept { return {data, shape, dtype, device, row_stride}; }
  bool is_contiguous() const noexcept { return row_stride == shape.num_cols(); }
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data);
  }
  TensorView reshaped(Shape s) const;
  TensorView rows(std::int64_t begin, std::int64_t count) const;
  TensorView columns(std::int64_t begin, std::int64_t count) const;
};

/// Owns (shares) contiguous memory of one device. Copying a Tensor shares the storage; clone() copies it.
class Tensor {
 public:
  Tensor() = default;
  /// Contents undefined.
  static Tensor empty(const std::shared_ptr<DeviceRuntime>& runtime, Shape shape, DType dtype);
  static Tensor zeros(const std::shared_ptr<DeviceRuntime>& runtime, Shape shape, DType dtype);
  /// Wraps host memory that `owner` keeps alive (a mapped file, say).
  static Tensor borrow(const std::shared_ptr<DeviceRuntime>& runtime, std::shared_ptr<const void> owner, void* data, Shape shape,
                       DType dtype);

  bool defined() const noexcept { return storage_ != nullptr; }
  const Shape& shape() const noexcept { return shape_; }
  DType dtype() const noexcept { return dtype_; }
  std::int64_t num_elements() const noexcept { return shape_.num_elements(); }
  std::size_t num_bytes() const noexcept { return static_cast<std::size_t>(num_elements()) * size_of(dtype_); }
  const std::shared_ptr<DeviceRuntime>& runtime() const noexcept { return runtime_; }
  void* data() const noexcept;
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data());
  }
  TensorView view() const;
  operator TensorView() const { return view(); }
  operator ConstTensorView() const { return view(); }
  Tensor reshaped(Shape s) const;
  /// Rows [begin, begin + count) of the outermost dimension, sharing storage.
  Tensor slice(std::int64_t begin, std::int64_t count) const;
  Tensor clone() const;

 private:
  struct Storage;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::shared_ptr<Storage> storage_;
  std::size_t offset_bytes_ = 0;
  Shape shape_;
  DType dtype_ = DType::kF32;
};

}  // namespace prl
