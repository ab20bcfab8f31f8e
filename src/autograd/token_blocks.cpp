#include "autograd/token_blocks.hpp"

#include <vector>

#include "base/error.hpp"
#include "ops/pointwise.hpp"

namespace prl::autograd {
namespace {

class BlockTree {
 public:
  BlockTree(ops::OpContext& ctx, Arena& arena, const TokenSum& sum, std::int64_t block_tokens, const FormBlock& form)
      : ctx_(ctx), arena_(arena), sum_(sum), block_tokens_(block_tokens), form_(form) {}

  /// `to` becomes the sum of blocks [first, first + count).
  void form(int first, int count, std::span<const TensorView> to) {
    if (count == 1) {
      if (!sum_.can_overwrite)
        for (const TensorView& view : to)
          if (view.data != nullptr)
            ctx_.runtime->zero(view.data, static_cast<std::size_t>(view.shape.num_elements()) * size_of(view.dtype));
      return form_(first * block_tokens_, block_tokens_, to, !sum_.can_overwrite);
    }
    form(first, count / 2, to);
    add(first + count / 2, count / 2, to);
  }

  /// `to` plus the sum of those blocks.
  void add(int first, int count, std::span<const TensorView> to) {
    const Arena::Mark mark = arena_.mark();
    std::vector<TensorView> parts;
    for (const TensorView& view : to) parts.push_back(view.data != nullptr ? arena_.take(view.shape, view.dtype) : TensorView{});
    form(first, count, parts);
    for (std::size_t i = 0; i < to.size(); ++i)
      if (to[i].data != nullptr) ops::add(ctx_, to[i], to[i], parts[i]);
    arena_.release(mark);
  }

 private:
  ops::OpContext& ctx_;
  Arena& arena_;
  const TokenSum& sum_;
  std::int64_t block_tokens_;
  const FormBlock& form_;
};

}  // namespace

void sum_over_blocks(ops::OpContext& ctx, Arena& arena, const TokenSum& sum, std::int64_t num_tokens, int num_blocks,
                     const FormBlock& form) {
  if (num_blocks == 1) return form(0, num_tokens, sum.outs, sum.accumulate || !sum.can_overwrite);
  PRL_CHECK(num_tokens % num_blocks == 0, "{} tokens in {} blocks", num_tokens, num_blocks);
  BlockTree tree(ctx, arena, sum, num_tokens / num_blocks, form);
  if (sum.accumulate)
    tree.add(0, num_blocks, sum.outs);
  else
    tree.form(0, num_blocks, sum.outs);
}

ConstTensorView part_of_vector(ConstTensorView vector, std::int64_t begin, std::int64_t count) {
  vector.data = static_cast<const char*>(vector.data) + static_cast<std::size_t>(begin) * size_of(vector.dtype);
  vector.shape = Shape{count};
  vector.row_stride = count;
  return vector;
}

}  // namespace prl::autograd
