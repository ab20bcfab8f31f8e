#pragma once

#include <array>
#include <string_view>

#include "ops/context.hpp"

namespace prl::ops {

/// Checks the views of one op call by symbols: a symbol binds to an extent on first use and must agree afterwards.
///
///   ShapeCheck check("linear", ctx);
///   check("y", y, "T N").check("x", x, "T K");
///
/// A pattern names the extents, one symbol (or number) each; "R C" as two symbols also takes views of more dimensions as the
/// matrix [num_rows, num_cols]. Errors are Error{kShape} that name op, view, wanted and found. Allocates only to fail.
class ShapeCheck {
 public:
  ShapeCheck(std::string_view op, const OpContext& ctx) : op_(op), device_(ctx.runtime->device()) {}
  ShapeCheck& check(std::string_view name, const ConstTensorView& view, std::string_view pattern);
  /// Same, with a dtype.
  ShapeCheck& check(std::string_view name, const ConstTensorView& view, std::string_view pattern, DType dtype);
  ShapeCheck& contiguous(std::string_view name, const ConstTensorView& view);
  /// kF32 or kBF16.
  ShapeCheck& floating(std::string_view name, const ConstTensorView& view);
  ShapeCheck& same_dtype(std::string_view a_name, DType a, std::string_view b_name, DType b);
  /// Binds or compares an extent that no view carries.
  ShapeCheck& extent(std::string_view symbol, std::int64_t value, std::string_view where);
  ShapeCheck& require(bool condition, std::string_view what);

 private:
  struct Binding {
    std::string_view symbol;
    std::int64_t value = 0;
    std::string_view where;
  };
  std::string_view op_;
  Device device_;
  std::array<Binding, 16> bindings_{};
  int num_bindings_ = 0;
};

/// The bodies behind ctx, after making sure `entry` is there.
template <typename Entry>
Entry table_entry(const OpContext& ctx, Entry entry, std::string_view op);
[[noreturn]] void missing_body(const OpContext& ctx, std::string_view op);

template <typename Entry>
Entry table_entry(const OpContext& ctx, Entry entry, std::string_view op) {
  if (entry == nullptr) missing_body(ctx, op);
  return entry;
}

}  // namespace prl::ops
