#include "trainer/gradient_exchange.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "ops/pointwise.hpp"

namespace prl::trainer {

namespace {

/// Elements per row of the matrix that long arrays are added as, so that threads share the work.
constexpr std::int64_t kAddColumns = 4096;

TensorView view_of(const Tensor& tensor, std::int64_t begin, std::int64_t count) {
  TensorView view = tensor.view();
  view.data = view.as<float>() + begin;
  view.shape = Shape{count};
  view.row_stride = count;
  return view;
}

}  // namespace

void add_arrays(ops::OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b) {
  const std::int64_t n = out.shape.num_elements(), rows = n / kAddColumns, whole = rows * kAddColumns;
  const auto cut = [](auto view, std::int64_t begin, Shape shape) {
    view.data = view.template as<float>() + begin;
    view.shape = shape;
    view.row_stride = shape.num_cols();
    return view;
  };
  const auto add = [&](std::int64_t begin, Shape shape) {
    ops::add(ctx, cut(out, begin, shape), cut(a, begin, shape), cut(b, begin, shape));
  };
  if (rows > 0) add(0, Shape{rows, kAddColumns});
  if (whole < n) add(whole, Shape{n - whole});
}

void add_in_place(ops::OpContext& ctx, TensorView out, ConstTensorView x) { add_arrays(ctx, out, out, x); }

std::int64_t exchange_bucket(std::span<const nn::GradSection> sections, const ShardPlan& plan, const ExchangeOptions& options) {
  std::int64_t of_layers = 0, of_any = 0;
  for (const nn::GradSection& section : sections)
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const std::int64_t part = plan.part(r, section.range).count();
      of_any = std::max(of_any, part);
      if (section.layer >= 0) of_layers = std::max(of_layers, part);
    }
  if (options.overlaps && options.divides_experts) return of_any;
  return std::min(of_any, options.overlaps ? std::max(of_layers, options.bucket_elements) : options.bucket_elements);
}

GradientExchange::GradientExchange(ops::OpContext& ctx, nn::Parameters& parameters, comm::Communicator& group, const ShardPlan& plan,
                                   const ExchangeOptions& options)
    : ctx_(ctx), parameters_(parameters), group_(group), plan_(plan), options_(options) {
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
  if (parameters_.has_experts_apart()) parameters_.lend_expert_grads({0, parameters_.table()->num_master_elements()}, {});
}

void GradientExchange::begin(std::int64_t num_rows) {
  settle();
  num_rows_ = num_rows;
  round_ = 0;
  next_section_ = 0;
  is_in_leaf_ = false;
  parameters_.start_grads();
  if (parameters_.has_experts_apart()) make_sum();
}

void GradientExchange::make_sum() {
  if (sum_.defined() || own().count() == 0) return;
  sum_ = Tensor::empty(ctx_.runtime, {own().count()}, DType::kF32);
  if (!parameters_.has_experts_apart()) return;
  for (const nn::ExpertSection& experts : nn::expert_sections(*parameters_.table()))
    if (const ElementRange mine = part_of(group_.rank(), experts.range()); mine.count() > 0)
      parameters_.lend_expert_grads(mine, sum_.slice(own().place_of(mine.begin), mine.count()));
}

int GradientExchange::num_active() const noexcept {
  return static_cast<int>(std::min<std::int64_t>(group_.size(), (num_rows_ - round_ * num_row_groups()) * options_.ranks_per_row));
}

std::optional<std::int64_t> GradientExchange::row_of(std::int64_t round) const noexcept {
  const std::int64_t row = round * num_row_groups() + group_.rank() / options_.ranks_per_row;
  return row < num_rows_ ? std::optional(row) : std::nullopt;
}

std::int64_t GradientExchange::num_rounds() const noexcept { return (num_rows_ + num_row_groups() - 1) / num_row_groups(); }

void GradientExchange::begin_leaf() {
  if (adds_rows_in_place() && round_ > 0)
    parameters_.start_next_row();
  else if (options_.reduce == Reduce::kExact && round_ > 0)
    parameters_.start_grads();
  is_in_leaf_ = true;
}

TensorView GradientExchange::sum_of(std::size_t section, std::int64_t begin, std::int64_t count) const {
  // Rows of a round send one section after the other, whatever their number: each section has a sum of its own, so that its rows are
  // added in their order.
  const bool is_second = parameters_.sections()[section].is_second;
  return is_second ? view_of(second_, begin - second_range_.begin, count) : view_of(sum_, own().place_of(begin), count);
}

void GradientExchange::end_round() {
  PRL_CHECK(round_ < num_rounds(), "round {} of {}", round_, num_rounds());
  is_in_leaf_ = false;
  // Ranks without a row, and those whose row had no backward pass, take part all the same.
  if (sums_leaves())
    while (next_section_ < parameters_.sections().size()) exchange(next_section_++);
  complete();
  if (adds_rows_in_place()) add_stepwise();
  next_section_ = 0;
  ++round_;
}

void GradientExchange::add_stepwise() {
  const std::vector<ElementRange>& ranges = parameters_.stepwise_grads();
  std::int64_t at = 0;
  for (const ElementRange& range : ranges) at += range.count();
  if (!stepwise_sum_.defined()) stepwise_sum_ = Tensor::empty(ctx_.runtime, {at}, DType::kF32);
  at = 0;
  for (const ElementRange& range : ranges) {
    const TensorView leaf = view_of(parameters_.all_grads(), range.begin, range.count()), sum = view_of(stepwise_sum_, at, range.count());
    if (round_ == 0)
      ctx_.runtime->copy_within(sum.data, leaf.data, static_cast<std::size_t>(range.count()) * sizeof(float));
    else if (round_ + 1 < num_rounds())
      add_in_place(ctx_, sum, leaf);
    else
      add_in_place(ctx_, leaf, sum);  // where the other gradients are
    at += range.count();
  }
}

std::int64_t GradientExchange::longest_part(std::size_t section) const {
  std::int64_t longest = 0;
  for (int r = 0; r < plan_.num_ranks(); ++r) longest = std::max(longest, part_of(r, parameters_.sections()[section].range).count());
  return longest;
}

GradientExchange::Pass GradientExchange::make_pass(std::size_t section, std::int64_t begin) {
  const int size = group_.size(), me = group_.rank();
  const ElementRange whole = parameters_.sections()[section].range;
  const auto leaf_of = [&](ElementRange piece) {
    return view_of(parameters_.section_grads(section), piece.begin - whole.begin, piece.count());
  };
  const auto piece_of = [&](int rank) {
    const ElementRange range = part_of(rank, whole);
    return intersection(range, {range.begin + begin, range.begin + begin + bucket_});
  };
  Pass pass;
  pass.section = section;
  pass.begin = begin;
  pass.is_first = round_ == 0;
  pass.num_active = num_active();
  pass.mine = piece_of(me);
  for (int r = 0; r < size; ++r) {
    const bool is_self = r == me;
    // This rank's own leaf is where it was formed.
    pass.outs.push_back(is_self ? leaf_of(pass.mine) : view_of(received_, r * bucket_, r >= pass.num_active ? 0 : pass.mine.count()));
    const ElementRange piece = piece_of(r);
    const bool sends = !is_self && me < pass.num_active && piece.count() > 0;
    pass.ins.push_back(leaf_of(sends ? piece : ElementRange{whole.begin, whole.begin}));
  }
  return pass;
}

void GradientExchange::add_up(Pass& pass) {
  if (pass.mine.count() == 0) return;
  std::vector<ConstTensorView> leaves;
  for (int row = 0; row < pass.num_active; row += options_.ranks_per_row) {
    for (int apart = 1; apart < options_.ranks_per_row; apart *= 2)
      for (int r = row; r < row + options_.ranks_per_row; r += 2 * apart)
        add_in_place(ctx_, pass.outs[static_cast<std::size_t>(r)], pass.outs[static_cast<std::size_t>(r + apart)]);
    leaves.push_back(pass.outs[static_cast<std::size_t>(row)]);
  }
  add(sum_of(pass.section, pass.mine.begin, pass.mine.count()), leaves, pass.is_first);
}

void GradientExchange::add(TensorView sum, std::span<const ConstTensorView> leaves, bool is_first) {
  std::size_t next = 0;
  if (is_first && leaves.size() > 1) {
    add_arrays(ctx_, sum, leaves[0], leaves[1]);  // the bits of a sum that begins with the first, which is not copied
    next = 2;
  } else if (is_first) {
    ctx_.runtime->copy_within(sum.data, leaves[0].data, static_cast<std::size_t>(sum.shape.num_elements()) * sizeof(float));
    next = 1;
  }
  for (; next < leaves.size(); ++next) add_in_place(ctx_, sum, leaves[next]);
}

void GradientExchange::settle() noexcept {
  sending_.reset();
  under_way_.reset();
}

void GradientExchange::complete() {
  while (under_way_) {
    if (sending_ != nullptr) sending_->join();
    sending_.reset();
    Pass pass = *std::exchange(under_way_, std::nullopt);
    add_up(pass);
    if (const std::int64_t next = pass.begin + bucket_; next < longest_part(pass.section)) send(make_pass(pass.section, next));
  }
}

void GradientExchange::send(Pass pass) {
  // Nothing goes to itself, and nothing may come.
  std::vector<TensorView> outs = pass.outs;
  outs[static_cast<std::size_t>(group_.rank())] = view_of(received_, 0, 0);
  const std::string what = fmt::format("gradients of round {} of {}", round_ + 1, num_rounds());
  if (options_.overlaps)
    sending_ = group_.start_all_to_all(outs, pass.ins, {.what = what});
  else
    group_.all_to_all(outs, pass.ins, {.what = what});
  under_way_ = std::move(pass);
}

void GradientExchange::exchange(std::size_t section) {
  PRL_CHECK(sums_leaves(), "gradients are divided, and not exchanged");
  complete();
  const ElementRange whole = parameters_.sections()[section].range;
  make_sum();
  const bool is_second = parameters_.sections()[section].is_second;
  if (is_second && !second_.defined()) {
    second_range_ = part_of(group_.rank(), whole);
    second_ = Tensor::empty(ctx_.runtime, {second_range_.count()}, DType::kF32);
  }
  if (group_.size() == 1) {
    if (whole.count() == 0) return;
    const ConstTensorView leaf = view_of(parameters_.section_grads(section), 0, whole.count());
    return add(sum_of(section, whole.begin, whole.count()), std::span(&leaf, 1), round_ == 0);
  }
  if (!received_.defined()) {
    bucket_ = exchange_bucket(parameters_.sections(), plan_, options_);
    received_ = Tensor::empty(ctx_.runtime, {group_.size() * bucket_}, DType::kF32);
  }
  if (longest_part(section) == 0) return;
  send(make_pass(section, 0));
  if (!options_.overlaps) complete();
}

Tensor GradientExchange::finish() {
  PRL_CHECK(round_ == num_rounds(), "finish() after {} of {} rounds", round_, num_rounds());
  const std::int64_t count = own().count();
  if (sums_leaves()) {
    if (second_range_.count() > 0)
      add_in_place(ctx_, view_of(sum_, own().place_of(second_range_.begin), second_range_.count()), second_.view());
    return count > 0 ? sum_ : Tensor::empty(ctx_.runtime, {0}, DType::kF32);
  }
  if (parameters_.divides_grads()) return Tensor::zeros(ctx_.runtime, {count}, DType::kF32);  // no rows
  if (adds_rows_in_place()) return parameters_.all_grads();
  parameters_.settle_grads();
  if (group_.size() == 1) return parameters_.all_grads();
  Tensor mine = Tensor::empty(ctx_.runtime, {count}, DType::kF32);
  comm::Communicator& shards = options_.shards != nullptr ? *options_.shards : group_;
  std::int64_t at = 0;
  for (const ShardPlan::Section& section : plan_.sections()) {
    const std::vector<std::int64_t> counts = section.counts();
    const std::int64_t n = counts[static_cast<std::size_t>(shards.rank())];
    shards.reduce_scatter(view_of(mine, at, n), view_of(parameters_.all_grads(), section.range.begin, section.range.count()), counts,
                          {.what = "gradients of the step"});
    at += n;
  }
  if (options_.replicas != nullptr && options_.replicas->size() > 1)
    options_.replicas->all_reduce(mine.view(), comm::ReduceOp::kSum, {.what = "gradients of the copies"});
  return mine;
}

}  // namespace prl::trainer
