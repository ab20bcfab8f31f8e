#include "ops/lora.hpp"

#include <algorithm>

#include <fmt/core.h>

#include "ops/op_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

void check_weight(ShapeCheck& c, const LoraWeight& w, std::int64_t num_outputs) {
  c.require(w.a != nullptr && !w.parts.empty(), "an adapter has no parts");
  c.extent("K", w.a->num_inputs(), "A");
  std::int64_t num_ranks = 0;
  for (const LoraPart& part : w.parts) {
    c.require(part.b != nullptr && part.b->num_outputs() == part.num_outputs && part.b->num_inputs() == part.rank,
              "B is not [outputs, rank]");
    c.require(part.rank >= 1 && part.rank <= kMaxLoraRank, "a rank is not in [1, 512]");
    c.require(part.first_rank == num_ranks, "ranks of parts do not follow each other");
    c.require(part.first_output >= 0 && part.first_output + part.num_outputs <= num_outputs, "a part is not among the outputs of y");
    c.require(part.b->dtype() == w.dtype() && !part.b->has_bias(), "A and B differ in dtype, or B has a bias");
    num_ranks += part.rank;
  }
  c.require(num_ranks == w.num_ranks() && !w.a->has_bias(), "A does not have the ranks of all parts");
}

}  // namespace

void add_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups) {
  ShapeCheck c("add_lora", ctx);
  c.check("y", y_TN, "T N").check("x", x_TK, "T K").floating("x", x_TK).same_dtype("y", y_TN.dtype, "x", x_TK.dtype);
  const std::int64_t num_rows = x_TK.shape.num_rows();
  for (const LoraRows& group : groups) {
    c.require(group.weight != nullptr, "a group has no adapter");
    check_weight(c, *group.weight, y_TN.shape.num_cols());
    std::int64_t last = -1;
    for (const std::int32_t row : group.rows) {
      c.require(row > last && row < num_rows, "rows of a group must rise within the batch");
      last = row;
    }
  }
  if (!groups.empty()) table_entry(ctx, ctx.table->add_lora, "add_lora")(ctx, y_TN, x_TK, groups);
}

void append_lora_tiles(std::vector<std::int32_t>& tiles, std::int32_t slot, std::span<const std::int32_t> rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % kLoraTileRows == 0) {
      tiles.push_back(slot);
      tiles.resize(tiles.size() + kLoraTileRows, -1);
    }
    tiles[tiles.size() - kLoraTileRows + i % kLoraTileRows] = rows[i];
  }
}

bool has_lora_index(const OpContext& ctx) noexcept { return ctx.table->add_lora_indexed != nullptr; }

bool write_lora_entry(OpContext& ctx, std::span<std::byte> entry, const LoraWeight* weight, DType dtype) {
  PRL_CHECK(entry.size() >= kLoraEntryBytes, "room for an adapter's entry is {} bytes, {} are wanted", entry.size(), kLoraEntryBytes);
  return table_entry(ctx, ctx.table->write_lora_entry, "write_lora_entry")(ctx, entry, weight, dtype);
}

void check_lora_index(ShapeCheck& c, const LoraIndex& index) {
  c.require(index.entries.dtype == DType::kU8 && index.entries.row_stride >= static_cast<std::int64_t>(kLoraEntryBytes) &&
                index.entries.row_stride % static_cast<std::int64_t>(kLoraEntryBytes) == 0,
            "entries are not bytes, a multiple of kLoraEntryBytes apart");
  c.require(index.tiles.dtype == DType::kI32 && index.tiles.shape.num_cols() == kLoraTileWords, "tiles are not int32 [., kLoraTileWords]");
  c.require(index.max_rank >= 1 && index.max_rank <= kMaxLoraRank, "the largest rank is not in [1, 512]");
}

void add_lora_indexed(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index) {
  ShapeCheck c("add_lora_indexed", ctx);
  c.check("y", y_TN, "T N").check("x", x_TK, "T K").floating("x", x_TK).same_dtype("y", y_TN.dtype, "x", x_TK.dtype);
  check_lora_index(c, index);
  if (index.tiles.shape.num_rows() > 0) table_entry(ctx, ctx.table->add_lora_indexed, "add_lora_indexed")(ctx, y_TN, x_TK, index);
}

bool linear_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LoraIndex& index) {
  if (ctx.table->linear_lora == nullptr) return false;
  ShapeCheck c("linear_lora", ctx);
  c.extent("N", w.num_outputs(), "w").extent("K", w.num_inputs(), "w");
  c.check("y", y_TN, "T N", w.dtype()).check("x", x_TK, "T K", w.dtype());
  check_lora_index(c, index);
  c.require(index.signal.dtype == DType::kI32 && index.signal.data != nullptr, "a signal is not int32 [1]");
  if (x_TK.shape.num_rows() == 0 || index.tiles.shape.num_rows() == 0) return false;
  return ctx.table->linear_lora(ctx, y_TN, x_TK, w, index);
}

void lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                   ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate) {
  ShapeCheck c("lora_backward", ctx);
  c.check("dy", dy_TN, "T N").check("x", x_TK, "T K").floating("x", x_TK).same_dtype("dy", dy_TN.dtype, "x", x_TK.dtype);
  check_weight(c, w, dy_TN.shape.num_cols());
  c.extent("R", w.num_ranks(), "A");
  c.check("da", da_RK, "R K", DType::kF32).contiguous("da", da_RK);
  c.require(db.size() == w.parts.size(), "one db per part is wanted");
  for (std::size_t i = 0; i < db.size(); ++i) {
    c.require(db[i].dtype == DType::kF32 && db[i].shape.num_rows() == w.parts[i].num_outputs && db[i].shape.num_cols() == w.parts[i].rank,
              "a db is not fp32 [outputs, rank]");
    c.contiguous("db", db[i]);
  }
  if (dx_TK.data != nullptr) c.check("dx", dx_TK, "T K").same_dtype("dx", dx_TK.dtype, "x", x_TK.dtype);
  c.require(accumulate || x_TK.shape.num_rows() > 0, "no tokens to form gradients from");
  if (x_TK.shape.num_rows() == 0) return;
  bool has_backward = w.a->has_backward();
  for (const LoraPart& part : w.parts) has_backward = has_backward && part.b->has_backward();
  c.require(has_backward, "the adapter was packed without its backward form");
  table_entry(ctx, ctx.table->lora_backward, "lora_backward")(ctx, dx_TK, da_RK, db, dy_TN, x_TK, w, accumulate_dx, accumulate);
}

namespace {

void check_groups_of_rows(ShapeCheck& c, std::span<const LoraWeight* const> adapters, std::span<const std::int32_t> begin,
                          std::int64_t num_rows) {
  c.require(begin.size() == adapters.size() + 1 && std::ranges::is_sorted(begin) &&
                (begin.empty() || (begin.front() >= 0 && begin.back() <= num_rows)),
            "wanted where the rows of each group begin, and where they end");
}

}  // namespace

bool add_grouped_lora(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                      std::span<const std::int32_t> begin) {
  if (ctx.table->add_grouped_lora == nullptr) return false;
  ShapeCheck c("add_grouped_lora", ctx);
  c.check("y", y_RN, "R N").check("x", x_RK, "R K").floating("x", x_RK).same_dtype("y", y_RN.dtype, "x", x_RK.dtype);
  check_groups_of_rows(c, adapters, begin, x_RK.shape.num_rows());
  for (const LoraWeight* w : adapters) check_weight(c, *w, y_RN.shape.num_cols());
  return x_RK.shape.num_rows() == 0 || ctx.table->add_grouped_lora(ctx, y_RN, x_RK, adapters, begin);
}

bool grouped_lora_backward(OpContext& ctx, TensorView dx_RK, std::span<const TensorView> da, std::span<const TensorView> db,
                           ConstTensorView dy_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                           std::span<const std::int32_t> begin, bool accumulate_dx, bool accumulate) {
  if (ctx.table->grouped_lora_backward == nullptr || adapters.empty()) return false;
  ShapeCheck c("grouped_lora_backward", ctx);
  c.check("dy", dy_RN, "R N").check("x", x_RK, "R K").floating("x", x_RK).same_dtype("dy", dy_RN.dtype, "x", x_RK.dtype);
  check_groups_of_rows(c, adapters, begin, x_RK.shape.num_rows());
  const std::size_t num_parts = adapters[0]->parts.size();
  c.require(da.size() == adapters.size() && db.size() == adapters.size() * num_parts,
            "wanted one da for each group, and one db for each part");
  for (std::size_t g = 0; g < adapters.size(); ++g) {
    const LoraWeight& w = *adapters[g];
    check_weight(c, w, dy_RN.shape.num_cols());
    if (w.parts.size() != num_parts || !w.a->has_backward()) return false;
    c.require(da[g].shape.num_elements() == w.num_ranks() * w.a->num_inputs(), "a da is not [ranks, inputs]").contiguous("da", da[g]);
    for (std::size_t p = 0; p < num_parts; ++p) {
      const TensorView& view = db[g * num_parts + p];
      c.require(view.dtype == DType::kF32 && view.shape.num_elements() == w.parts[p].num_outputs * w.parts[p].rank,
                "a db is not fp32 [outputs, rank]");
      c.contiguous("db", view);
    }
  }
  if (dx_RK.data != nullptr) c.check("dx", dx_RK, "R K").same_dtype("dx", dx_RK.dtype, "x", x_RK.dtype);
  return ctx.table->grouped_lora_backward(ctx, dx_RK, da, db, dy_RN, x_RK, adapters, begin, accumulate_dx, accumulate);
}

void dropout(OpContext& ctx, TensorView y_TK, ConstTensorView x_TK, const DropoutMask& mask, bool accumulate) {
  ShapeCheck c("dropout", ctx);
  c.check("y", y_TK, "T K").check("x", x_TK, "T K").floating("x", x_TK).same_dtype("y", y_TK.dtype, "x", x_TK.dtype);
  c.require(mask.probability >= 0 && mask.probability < 1, "the probability is not in [0, 1)");
  if (x_TK.shape.num_elements() > 0) table_entry(ctx, ctx.table->dropout, "dropout")(ctx, y_TK, x_TK, mask, accumulate);
}

}  // namespace prl::ops
