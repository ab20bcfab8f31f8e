#include "tensor/tensor.hpp"

#include <limits>

namespace prl {
namespace {

template <typename View>
View reshaped_view(const View& v, Shape s) {
  PRL_CHECK(v.is_contiguous(), "reshape of a strided view {}", v.shape.to_string());
  PRL_CHECK(s.num_elements() == v.shape.num_elements(), "reshape of {} to {}", v.shape.to_string(), s.to_string());
  View out = v;
  out.shape = s;
  out.row_stride = s.num_cols();
  return out;
}

template <typename View>
View row_range(const View& v, std::int64_t begin, std::int64_t count) {
  PRL_CHECK(begin >= 0 && count >= 0 && begin + count <= v.shape.num_rows(), "rows [{}, {}) of {}", begin, begin + count,
            v.shape.to_string());
  View out = v;
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(v.data)>>, const char, char>;
  if (v.data != nullptr) out.data = static_cast<Byte*>(v.data) + begin * v.row_stride * static_cast<std::int64_t>(size_of(v.dtype));
  out.shape = Shape{count, v.shape.num_cols()};
  return out;
}

template <typename View>
View column_range(const View& v, std::int64_t begin, std::int64_t count) {
  PRL_CHECK(begin >= 0 && count >= 0 && begin + count <= v.shape.num_cols(), "columns [{}, {}) of {}", begin, begin + count,
            v.shape.to_string());
  View out = v;
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(v.data)>>, const char, char>;
  if (v.data != nullptr) out.data = static_cast<Byte*>(v.data) + begin * static_cast<std::int64_t>(size_of(v.dtype));
  out.shape = Shape{v.shape.num_rows(), count};
  return out;
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  PRL_CHECK(dims.size() <= kMaxDims, "a shape has at most {} extents, found {}", kMaxDims, dims.size());
  for (const std::int64_t d : dims) {
    PRL_CHECK(d >= 0, "negative extent {}", d);
    dims_[static_cast<std::size_t>(num_dims_++)] = d;
  }
}

std::int64_t Shape::num_elements() const noexcept { return num_rows() * num_cols(); }

std::int64_t Shape::num_rows() const noexcept {
  std::int64_t n = 1;
  for (int i = 0; i + 1 < num_dims_; ++i) n *= dims_[static_cast<std::size_t>(i)];
  return n;
}

std::string Shape::to_string() const {
  std::string out = "[";
  for (int i = 0; i < num_dims_; ++i) out += fmt::format("{}{}", i == 0 ? "" : ", ", (*this)[i]);
  return out + "]";
}

ConstTensorView ConstTensorView::reshaped(Shape s) const { return reshaped_view(*this, s); }
ConstTensorView ConstTensorView::rows(std::int64_t begin, std::int64_t count) const { return row_range(*this, begin, count); }
ConstTensorView ConstTensorView::columns(std::int64_t begin, std::int64_t count) const { return column_range(*this, begin, count); }
TensorView TensorView::reshaped(Shape s) const { return reshaped_view(*this, s); }
TensorView TensorView::rows(std::int64_t begin, std::int64_t count) const { return row_range(*this, begin, count); }
TensorView TensorView::columns(std::int64_t begin, std::int64_t count) const { return column_range(*this, begin, count); }

/// Memory of one runtime, or borrowed memory with the owner that keeps it alive.
struct Tensor::Storage {
  std::shared_ptr<DeviceRuntime> runtime;
  std::shared_ptr<const void> owner;
  void* data = nullptr;
  std::size_t bytes = 0;

  Storage(std::shared_ptr<DeviceRuntime> r, std::size_t n) : runtime(std::move(r)), data(runtime->allocate(n)), bytes(n) {}
  Storage(std::shared_ptr<DeviceRuntime> r, std::shared_ptr<const void> o, void* d, std::size_t n)
      : runtime(std::move(r)), owner(std::move(o)), data(d), bytes(n) {}
  ~Storage() {
    if (owner == nullptr) runtime->deallocate(data, bytes);
  }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
};

Tensor Tensor::empty(const std::shared_ptr<DeviceRuntime>& runtime, Shape shape, DType dtype) {
  PRL_CHECK(runtime != nullptr, "a tensor needs a runtime");
  double bytes = static_cast<double>(size_of(dtype));
  for (int i = 0; i < shape.num_dims(); ++i) bytes *= static_cast<double>(shape[i]);
  if (bytes > 1e17) fail(ErrorCode::kOutOfMemory, "[tensor] shape {} of {} is larger than any memory", shape.to_string(), to_string(dtype));
  Tensor t;
  t.runtime_ = runtime;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(runtime, t.num_bytes());
  return t;
}

Tensor Tensor::zeros(const std::shared_ptr<DeviceRuntime>& runtime, Shape shape, DType dtype) {
  Tensor t = empty(runtime, shape, dtype);
  runtime->zero(t.data(), t.num_bytes());
  return t;
}

Tensor Tensor::borrow(const std::shared_ptr<DeviceRuntime>& runtime, std::shared_ptr<const void> owner, void* data, Shape shape,
                      DType dtype) {
  PRL_CHECK(runtime != nullptr && owner != nullptr, "borrowed memory needs a runtime and an owner");
  Tensor t;
  t.runtime_ = runtime;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(runtime, std::move(owner), data, t.num_bytes());
  return t;
}

void* Tensor::data() const noexcept { return storage_ == nullptr ? nullptr : static_cast<char*>(storage_->data) + offset_bytes_; }

TensorView Tensor::view() const {
  PRL_CHECK(defined(), "view of a tensor that holds nothing");
  return {data(), shape_, dtype_, runtime_->device(), shape_.num_cols()};
}

Tensor Tensor::reshaped(Shape s) const {
  PRL_CHECK(s.num_elements() == num_elements(), "reshape of {} to {}", shape_.to_string(), s.to_string());
  Tensor t = *this;
  t.shape_ = s;
  return t;
}

Tensor Tensor::slice(std::int64_t begin, std::int64_t count) const {
  PRL_CHECK(shape_.num_dims() >= 1 && begin >= 0 && count >= 0 && begin + count <= shape_[0], "slice [{}, {}) of {}", begin, begin + count,
            shape_.to_string());
  Tensor t = *this;
  const std::int64_t inner = shape_[0] == 0 ? 0 : num_elements() / shape_[0];
  t.offset_bytes_ += static_cast<std::size_t>(begin * inner) * size_of(dtype_);
  switch (shape_.num_dims()) {
    case 1: t.shape_ = Shape{count}; break;
    case 2: t.shape_ = Shape{count, shape_[1]}; break;
    case 3: t.shape_ = Shape{count, shape_[1], shape_[2]}; break;
    default: t.shape_ = Shape{count, shape_[1], shape_[2], shape_[3]}; break;
  }
  return t;
}

Tensor Tensor::clone() const {
  PRL_CHECK(defined(), "clone of a tensor that holds nothing");
  Tensor t = empty(runtime_, shape_, dtype_);
  runtime_->copy_within(t.data(), data(), num_bytes());
  return t;
}

}  // namespace prl
