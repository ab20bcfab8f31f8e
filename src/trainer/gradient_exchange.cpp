#include "trainer/gradient_exchange.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.hpp"
#include "ops/pointwise.hpp"

namespace prl::trainer {

namespace {

/// Elements per row of the matrix that long arrays are added as, so that threads share the work.
constexpr std::int64_t kAddColumns = 4096;

TensorView part_of(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  TensorView view = tensor.view();
  view.data = view.as<float>() + begin;
  view.shape = Shape{count};
  view.row_stride = count;
  return view;
}

}  // namespace

void add_in_place(ops::OpContext& ctx, TensorView out, ConstTensorView x) {
  const std::int64_t n = out.shape.num_elements(), rows = n / kAddColumns, whole = rows * kAddColumns;
  const auto cut = [](auto view, std::int64_t begin, Shape shape) {
    view.data = view.template as<float>() + begin;
    view.shape = shape;
    view.row_stride = shape.num_cols();
    return view;
  };
  if (rows > 0) {
    const Shape shape{rows, kAddColumns};
    const TensorView to = cut(out, 0, shape);
    ops::add(ctx, to, to, cut(x, 0, shape));
  }
  if (whole < n) {
    const TensorView to = cut(out, whole, Shape{n - whole});
    ops::add(ctx, to, to, cut(x, whole, Shape{n - whole}));
  }
}

GradientExchange::GradientExchange(ops::OpContext& ctx, nn::Parameters& parameters, comm::Communicator& group, const ShardPlan& plan,
                                   Reduce reduce, comm::Communicator* shards, comm::Communicator* replicas)
    : ctx_(ctx), parameters_(parameters), group_(group), plan_(plan), reduce_(reduce), shards_(shards), replicas_(replicas) {
  PRL_CHECK(group.size() % plan.num_ranks() == 0, "a plan for {} ranks, a group of {}", plan.num_ranks(), group.size());
  parameters_.on_section([this](std::size_t section) {
    if (!is_in_leaf_) return;
    PRL_CHECK(section == next_section_, "section {} of the gradient after {}", section, next_section_);
    exchange(next_section_++);
  });
}

GradientExchange::~GradientExchange() { parameters_.on_section({}); }

void GradientExchange::begin(std::int64_t num_rows) {
  num_rows_ = num_rows;
  round_ = 0;
  next_section_ = 0;
  is_in_leaf_ = false;
  parameters_.start_grads();
}

std::optional<std::int64_t> GradientExchange::row_of(std::int64_t round) const noexcept {
  const std::int64_t row = round * group_.size() + group_.rank();
  return row < num_rows_ ? std::optional(row) : std::nullopt;
}

std::int64_t GradientExchange::num_rounds() const noexcept { return (num_rows_ + group_.size() - 1) / group_.size(); }

void GradientExchange::begin_leaf() {
  if (reduce_ == Reduce::kExact && round_ > 0) parameters_.start_grads();
  is_in_leaf_ = true;
}

void GradientExchange::add(std::int64_t begin, ConstTensorView leaf, bool is_first) {
  const std::int64_t n = leaf.shape.num_elements();
  if (n == 0) return;
  const TensorView to = part_of(sum_, begin, n);
  if (is_first)
    ctx_.runtime->copy_within(to.data, leaf.data, static_cast<std::size_t>(n) * sizeof(float));
  else
    add_in_place(ctx_, to, leaf);
}

void GradientExchange::end_round() {
  PRL_CHECK(round_ < num_rounds(), "round {} of {}", round_, num_rounds());
  is_in_leaf_ = false;
  // Ranks without a row, and those whose row had no backward pass, take part all the same.
  if (sums_leaves())
    while (next_section_ < parameters_.sections().size()) exchange(next_section_++);
  next_section_ = 0;
  ++round_;
}

void GradientExchange::exchange(std::size_t section) {
  PRL_CHECK(sums_leaves(), "gradients are divided, and not exchanged");
  const int size = group_.size(), me = group_.rank();
  const ElementRange own = range_of(me), whole = parameters_.sections()[section].range;
  const Tensor& grads = parameters_.section_grads(section);
  if (!sum_.defined() && own.count() > 0) sum_ = Tensor::empty(ctx_.runtime, {own.count()}, DType::kF32);
  const auto leaf_of = [&](ElementRange piece) { return part_of(grads, piece.begin - whole.begin, piece.count()); };
  if (size == 1) return add(whole.begin, leaf_of(whole), round_ == 0);
  const std::int64_t num_active = std::min<std::int64_t>(size, num_rows_ - round_ * size);
  std::int64_t longest = 0, longest_range = 0;
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    longest = std::max(longest, intersection(plan_.range(r), whole).count());
    longest_range = std::max(longest_range, plan_.range(r).count());
  }
  const std::int64_t bucket = std::min(longest_range, kBucketElements);
  if (!received_.defined()) received_ = Tensor::empty(ctx_.runtime, {size * bucket}, DType::kF32);
  const std::string what = fmt::format("gradients of round {} of {}", round_ + 1, num_rounds());
  for (std::int64_t begin = 0; begin < longest; begin += bucket) {
    const auto piece_of = [&](int rank) {
      const ElementRange range = intersection(range_of(rank), whole);
      return intersection(range, {range.begin + begin, range.begin + begin + bucket});
    };
    std::vector<TensorView> outs;
    std::vector<ConstTensorView> ins;
    for (int r = 0; r < size; ++r) {
      const bool is_self = r == me;
      outs.push_back(part_of(received_, r * bucket, is_self || r >= num_active ? 0 : piece_of(me).count()));
      const ElementRange piece = piece_of(r);
      const bool sends = !is_self && me < num_active && piece.count() > 0;
      ins.push_back(leaf_of(sends ? piece : ElementRange{whole.begin, whole.begin}));
    }
    group_.all_to_all(outs, ins, {.what = what});
    const ElementRange mine = piece_of(me);
    if (mine.count() == 0) continue;
    for (int r = 0; r < num_active; ++r) {
      const ConstTensorView leaf = r == me ? ConstTensorView(leaf_of(mine)) : ConstTensorView(outs[static_cast<std::size_t>(r)]);
      add(mine.begin - own.begin, leaf, round_ == 0 && r == 0);
    }
  }
}

Tensor GradientExchange::finish() {
  PRL_CHECK(round_ == num_rounds(), "finish() after {} of {} rounds", round_, num_rounds());
  const ElementRange own = range_of(group_.rank());
  if (sums_leaves()) return own.count() > 0 ? sum_ : Tensor::empty(ctx_.runtime, {0}, DType::kF32);
  if (parameters_.divides_grads()) return Tensor::zeros(ctx_.runtime, {own.count()}, DType::kF32);  // no rows
  parameters_.settle_grads();
  if (group_.size() == 1) return parameters_.all_grads();
  Tensor part = Tensor::empty(ctx_.runtime, {own.count()}, DType::kF32);
  comm::Communicator& shards = shards_ != nullptr ? *shards_ : group_;
  shards.reduce_scatter(part.view(), parameters_.all_grads().view(), plan_.counts(), {.what = "gradients of the step"});
  if (replicas_ != nullptr && replicas_->size() > 1)
    replicas_->all_reduce(part.view(), comm::ReduceOp::kSum, {.what = "gradients of the copies"});
  return part;
}

}  // namespace prl::trainer
