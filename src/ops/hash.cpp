#include "ops/hash.hpp"

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {

void hash_rows(OpContext& ctx, std::span<std::uint64_t> out, std::span<const HashedRows> items, DType as) {
  ShapeCheck c("hash_rows", ctx);
  c.require(out.size() == items.size(), "there must be one result for each item");
  c.require(as == DType::kF32 || as == DType::kBF16, "values are hashed as F32 or BF16");
  for (const HashedRows& item : items) {
    std::int64_t rows = 0, cols = 0;
    if (item.packed != nullptr) {
      rows = item.packed->num_outputs();
      cols = item.packed->num_inputs();
      c.same_dtype("a packed item", item.packed->dtype(), "the hash", as);
    } else {
      ShapeCheck view("hash_rows", ctx);
      view.check("item", item.plain, "R C").floating("item", item.plain).contiguous("item", item.plain);
      view.require(item.plain.dtype == DType::kF32 || as == DType::kBF16, "a BF16 item is hashed as BF16");
      cols = item.num_cols;
      rows = cols > 0 ? item.plain.shape.num_elements() / cols : 0;
    }
    c.require(item.num_cols == cols && item.first_row >= 0 && item.first_number >= 0 && item.num_rows >= 0 &&
                  item.first_row + item.num_rows <= rows,
              "the rows of an item lie outside of it");
  }
  if (items.empty()) return;
  table_entry(ctx, ctx.table->hash_rows, "hash_rows")(ctx, out, items, as);
}

}  // namespace prl::ops
