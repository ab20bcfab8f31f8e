#include "tensor/tensor.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace prl {
namespace {

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_f32(to_bf16(1.00390625f)), 1.0f);       // a tie, down to even
  EXPECT_EQ(to_f32(to_bf16(1.01171875f)), 1.015625f);  // a tie, up to even
  EXPECT_EQ(to_f32(to_bf16(1.00390637f)), 1.0078125f);
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(to_f32(to_bf16(std::numeric_limits<float>::max()))));
}

TEST(DTypeTest, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kBF16), 2u);
  EXPECT_EQ(size_of(DType::kI64), 8u);
  EXPECT_EQ(to_string(DType::kF32), "F32");
}

TEST(ShapeTest, RowsAndColumns) {
  const Shape s{2, 3, 5};
  EXPECT_EQ(s.num_elements(), 30);
  EXPECT_EQ(s.num_rows(), 6);
  EXPECT_EQ(s.num_cols(), 5);
  EXPECT_EQ(s[-1], 5);
  EXPECT_EQ(s.to_string(), "[2, 3, 5]");
  EXPECT_EQ(Shape{7}.num_rows(), 1);
}

TEST(TensorTest, ViewsShareMemory) {
  auto runtime = make_cpu_runtime();
  Tensor t = Tensor::zeros(runtime, {4, 6}, DType::kF32);
  const TensorView cols = t.view().columns(2, 3);
  EXPECT_FALSE(cols.is_contiguous());
  cols.rows(1, 2).as<float>()[cols.row_stride + 1] = 5.0f;
  EXPECT_EQ(t.as<float>()[2 * 6 + 3], 5.0f);
  Tensor tail = t.slice(2, 2);
  EXPECT_EQ(tail.as<float>()[3], 5.0f);
  EXPECT_EQ(tail.reshaped({12}).shape(), Shape{12});
  Tensor copy = t.clone();
  copy.as<float>()[15] = 1.0f;
  EXPECT_EQ(t.as<float>()[15], 5.0f);
  EXPECT_EQ(runtime->bytes_in_use(), 2u * 4 * 6 * 4);
}

TEST(TensorTest, StorageLivesAsLongAsItsLastView) {
  auto runtime = make_cpu_runtime();
  Tensor part;
  {
    Tensor t = Tensor::zeros(runtime, {8}, DType::kF32);
    part = t.slice(4, 4);
  }
  EXPECT_EQ(runtime->bytes_in_use(), 32u);
  part = {};
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

TEST(TensorTest, BorrowKeepsTheOwner) {
  auto runtime = make_cpu_runtime();
  auto owner = std::make_shared<std::vector<float>>(6, 2.0f);
  std::weak_ptr<std::vector<float>> watch = owner;
  float* data = owner->data();
  Tensor t = Tensor::borrow(runtime, std::move(owner), data, {2, 3}, DType::kF32);
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(t.as<float>()[5], 2.0f);
  t = {};
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

TEST(TensorTest, AbsurdShapesAreErrors) {
  auto runtime = make_cpu_runtime();
  EXPECT_THROW(Tensor::empty(runtime, {std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::kF32), Error);
}

}  // namespace
}  // namespace prl
