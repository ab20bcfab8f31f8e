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
                                   Reduce reduce, comm::Communicator* shards, comm::Communicator* replicas, int ranks_per_row,
                                   bool overlaps)
    : ctx_(ctx),
      parameters_(parameters),
      group_(group),
      plan_(plan),
      reduce_(reduce),
      shards_(shards),
      replicas_(replicas),
      ranks_per_row_(ranks_per_row),
      overlaps_(overlaps) {
  PRL_CHECK(group.size() % plan.num_ranks() == 0, "a plan for {} ranks, a group of {}", plan.num_ranks(), group.size());
  parameters_.on_section([this](std::size_t section) {
    if (!is_in_leaf_) return;
    PRL_CHECK(section == next_section_, "section {} of the gradient after {}", section, next_section_);
    exchange(next_section_++);
  });
}

GradientExchange::~GradientExchange() {
  parameters_.on_section({});
  settle();
}

void GradientExchange::begin(std::int64_t num_rows) {
  settle();
  num_rows_ = num_rows;
  round_ = 0;
  next_section_ = 0;
  is_in_leaf_ = false;
  parameters_.start_grads();
}

std::optional<std::int64_t> GradientExchange::row_of(std::int64_t round) const noexcept {
  const std::int64_t row = round * num_row_groups() + group_.rank() / ranks_per_row_;
  return row < num_rows_ ? std::optional(row) : std::nullopt;
}

std::int64_t GradientExchange::num_rounds() const noexcept { return (num_rows_ + num_row_groups() - 1) / num_row_groups(); }

void GradientExchange::begin_leaf() {
  if (reduce_ == Reduce::kExact && round_ > 0) parameters_.start_grads();
  is_in_leaf_ = true;
}

void GradientExchange::add(std::size_t section, std::int64_t begin, ConstTensorView leaf, bool is_first) {
  const std::int64_t n = leaf.shape.num_elements();
  if (n == 0) return;
  // Rows of a round send one section after the other, whatever their number: each section has a sum of its own, so that its rows are
  // added in their order.
  const bool is_second = parameters_.sections()[section].is_second;
  const TensorView to =
      is_second ? part_of(second_, begin - second_range_.begin, n) : part_of(sum_, begin - range_of(group_.rank()).begin, n);
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
  complete();
  next_section_ = 0;
  ++round_;
}

GradientExchange::Pass GradientExchange::make_pass(std::size_t section, std::int64_t begin, std::int64_t bucket) {
  const int size = group_.size(), me = group_.rank();
  const ElementRange whole = parameters_.sections()[section].range;
  const auto leaf_of = [&](ElementRange piece) {
    return part_of(parameters_.section_grads(section), piece.begin - whole.begin, piece.count());
  };
  const auto piece_of = [&](int rank) {
    const ElementRange range = intersection(range_of(rank), whole);
    return intersection(range, {range.begin + begin, range.begin + begin + bucket});
  };
  Pass pass;
  pass.section = section;
  pass.is_first = round_ == 0;
  pass.num_active = static_cast<int>(std::min<std::int64_t>(size, (num_rows_ - round_ * num_row_groups()) * ranks_per_row_));
  pass.mine = piece_of(me);
  for (int r = 0; r < size; ++r) {
    const bool is_self = r == me;
    // This rank's own leaf is where it was formed.
    pass.outs.push_back(is_self ? leaf_of(pass.mine) : part_of(received_, r * bucket, r >= pass.num_active ? 0 : pass.mine.count()));
    const ElementRange piece = piece_of(r);
    const bool sends = !is_self && me < pass.num_active && piece.count() > 0;
    pass.ins.push_back(leaf_of(sends ? piece : ElementRange{whole.begin, whole.begin}));
  }
  return pass;
}

void GradientExchange::add_up(Pass& pass) {
  if (pass.mine.count() == 0) return;
  for (int row = 0; row < pass.num_active; row += ranks_per_row_) {
    for (int apart = 1; apart < ranks_per_row_; apart *= 2)
      for (int r = row; r < row + ranks_per_row_; r += 2 * apart)
        add_in_place(ctx_, pass.outs[static_cast<std::size_t>(r)], pass.outs[static_cast<std::size_t>(r + apart)]);
    add(pass.section, pass.mine.begin, pass.outs[static_cast<std::size_t>(row)], pass.is_first && row == 0);
  }
}

void GradientExchange::settle() noexcept {
  if (sending_.valid()) sending_.wait();
  sending_ = {};
}

void GradientExchange::complete() {
  if (!sending_.valid()) return;
  sending_.get();
  add_up(under_way_);
}

void GradientExchange::exchange(std::size_t section) {
  PRL_CHECK(sums_leaves(), "gradients are divided, and not exchanged");
  complete();
  const ElementRange own = range_of(group_.rank()), whole = parameters_.sections()[section].range;
  if (!sum_.defined() && own.count() > 0) sum_ = Tensor::empty(ctx_.runtime, {own.count()}, DType::kF32);
  const bool is_second = parameters_.sections()[section].is_second;
  if (is_second && !second_.defined()) {
    second_range_ = intersection(own, whole);
    second_ = Tensor::empty(ctx_.runtime, {second_range_.count()}, DType::kF32);
  }
  if (group_.size() == 1) return add(section, whole.begin, part_of(parameters_.section_grads(section), 0, whole.count()), round_ == 0);
  std::int64_t longest = 0, longest_range = 0, largest = 0;
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    longest = std::max(longest, intersection(plan_.range(r), whole).count());
    longest_range = std::max(longest_range, plan_.range(r).count());
    for (const nn::GradSection& any : parameters_.sections()) largest = std::max(largest, intersection(plan_.range(r), any.range).count());
  }
  const std::int64_t bucket = overlaps_ ? largest : std::min(longest_range, kBucketElements);
  if (!received_.defined()) received_ = Tensor::empty(ctx_.runtime, {group_.size() * bucket}, DType::kF32);
  const std::string what = fmt::format("gradients of round {} of {}", round_ + 1, num_rounds());
  const auto send = [this, what](Pass& pass) {
    // Nothing goes to itself, and nothing may come.
    std::vector<TensorView> outs = pass.outs;
    outs[static_cast<std::size_t>(group_.rank())] = part_of(received_, 0, 0);
    group_.all_to_all(outs, pass.ins, {.what = what});
  };
  for (std::int64_t begin = 0; begin < longest; begin += bucket) {
    under_way_ = make_pass(section, begin, bucket);
    if (overlaps_) {
      sending_ = std::async(std::launch::async, [this, send] { send(under_way_); });
      return;
    }
    send(under_way_);
    add_up(under_way_);
  }
}

Tensor GradientExchange::finish() {
  PRL_CHECK(round_ == num_rounds(), "finish() after {} of {} rounds", round_, num_rounds());
  const ElementRange own = range_of(group_.rank());
  if (sums_leaves()) {
    if (second_range_.count() > 0)
      add_in_place(ctx_, part_of(sum_, second_range_.begin - own.begin, second_range_.count()), second_.view());
    return own.count() > 0 ? sum_ : Tensor::empty(ctx_.runtime, {0}, DType::kF32);
  }
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
