#include "ops/shape_check.hpp"

#include <charconv>

#include "ops/op_table.hpp"

namespace prl::ops {
namespace {

int count_symbols(std::string_view pattern) {
  int n = 1;
  for (const char c : pattern) n += c == ' ';
  return n;
}

}  // namespace

ShapeCheck& ShapeCheck::extent(std::string_view symbol, std::int64_t value, std::string_view where) {
  if (symbol[0] >= '0' && symbol[0] <= '9') {
    std::int64_t wanted = 0;
    const auto [rest, error] = std::from_chars(symbol.data(), symbol.data() + symbol.size(), wanted);
    const bool is_number = error == std::errc{} && rest == symbol.data() + symbol.size();  // "2F" is a symbol
    if (is_number && wanted != value) fail(ErrorCode::kShape, "[{}] {} has an extent of {}, wanted {}", op_, where, value, wanted);
    if (is_number) return *this;
  }
  for (int i = 0; i < num_bindings_; ++i) {
    const Binding& b = bindings_[static_cast<std::size_t>(i)];
    if (b.symbol != symbol) continue;
    if (b.value != value)
      fail(ErrorCode::kShape, "[{}] {} has {} = {}, but {} has {} = {}", op_, where, symbol, value, b.where, symbol, b.value);
    return *this;
  }
  PRL_CHECK(num_bindings_ < static_cast<int>(bindings_.size()), "too many symbols in {}", op_);
  bindings_[static_cast<std::size_t>(num_bindings_++)] = {symbol, value, where};
  return *this;
}

ShapeCheck& ShapeCheck::check(std::string_view name, const ConstTensorView& view, std::string_view pattern) {
  if (view.data == nullptr && view.shape.num_elements() != 0)
    fail(ErrorCode::kShape, "[{}] {} {} has no memory", op_, name, view.shape.to_string());
  if (view.device != device_)
    fail(ErrorCode::kShape, "[{}] {} lives on {}, the op runs on {}", op_, name, to_string(view.device), to_string(device_));
  const int symbols = count_symbols(pattern);
  const bool as_matrix = symbols == 2 && view.shape.num_dims() != 2;
  if (!as_matrix && symbols != view.shape.num_dims())
    fail(ErrorCode::kShape, "[{}] {} has shape {}, wanted [{}]", op_, name, view.shape.to_string(), pattern);
  std::size_t begin = 0;
  for (int i = 0; i < symbols; ++i) {
    std::size_t end = pattern.find(' ', begin);
    if (end == std::string_view::npos) end = pattern.size();
    const std::int64_t value = as_matrix ? (i == 0 ? view.shape.num_rows() : view.shape.num_cols()) : view.shape[i];
    extent(pattern.substr(begin, end - begin), value, name);
    begin = end + 1;
  }
  if (view.shape.num_rows() > 1 && view.row_stride < view.shape.num_cols())
    fail(ErrorCode::kShape, "[{}] rows of {} overlap: stride {} for {} columns", op_, name, view.row_stride, view.shape.num_cols());
  return *this;
}

ShapeCheck& ShapeCheck::check(std::string_view name, const ConstTensorView& view, std::string_view pattern, DType dtype) {
  if (view.dtype != dtype) fail(ErrorCode::kShape, "[{}] {} is {}, wanted {}", op_, name, to_string(view.dtype), to_string(dtype));
  return check(name, view, pattern);
}

ShapeCheck& ShapeCheck::contiguous(std::string_view name, const ConstTensorView& view) {
  if (!view.is_contiguous() && view.shape.num_rows() > 1)
    fail(ErrorCode::kShape, "[{}] {} {} must be contiguous, its rows are {} elements apart", op_, name, view.shape.to_string(),
         view.row_stride);
  return *this;
}

ShapeCheck& ShapeCheck::floating(std::string_view name, const ConstTensorView& view) {
  if (view.dtype != DType::kF32 && view.dtype != DType::kBF16)
    fail(ErrorCode::kShape, "[{}] {} is {}, wanted F32 or BF16", op_, name, to_string(view.dtype));
  return *this;
}

ShapeCheck& ShapeCheck::same_dtype(std::string_view a_name, DType a, std::string_view b_name, DType b) {
  if (a != b) fail(ErrorCode::kShape, "[{}] {} is {} but {} is {}", op_, a_name, to_string(a), b_name, to_string(b));
  return *this;
}

ShapeCheck& ShapeCheck::require(bool condition, std::string_view what) {
  if (!condition) fail(ErrorCode::kShape, "[{}] {}", op_, what);
  return *this;
}

void missing_body(const OpContext& ctx, std::string_view op) {
  fail(ErrorCode::kNotImplemented, "[{}] this build has no body for it on {} ({})", op, to_string(ctx.runtime->device()), ctx.table->name);
}

}  // namespace prl::ops
