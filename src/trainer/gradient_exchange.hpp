#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "nn/parameters.hpp"
#include "ops/context.hpp"
#include "trainer/shard_plan.hpp"

namespace prl::trainer {

/// How gradients of rows become the gradient of a step.
enum class Reduce : std::uint8_t {
  /// gradient = leaf_0 + leaf_1 + ..., one row after the other, where a leaf is the gradient of one row, formed whole before it is added:
  /// the same bits on any number of ranks.
  kExact,
  /// Each rank adds its rows in place, then the ranks' sums are added: less memory and traffic, bits that depend on the number of ranks.
  kFast,
};

/// Whether gradients are held one section at a time (nn::Parameters::divide_grads), each sent as soon as it is complete.
constexpr bool divides_grads(int num_ranks, Reduce reduce) noexcept { return num_ranks > 1 && reduce == Reduce::kExact; }
/// Whether a matrix that is head and embedding has a gradient as each, which are sent one after the other: where rows have several leaves,
/// which must be added in one order wherever they are formed.
constexpr bool splits_tied_grads(int leaves_per_row, Reduce reduce) noexcept { return leaves_per_row > 1 && reduce == Reduce::kExact; }

/// Layers whose gradients there is memory for: one is sent while the next is formed.
constexpr int num_grad_places(bool overlaps, int num_ranks) noexcept { return overlaps && num_ranks > 1 ? 2 : 1; }

struct ExchangeOptions {
  Reduce reduce = Reduce::kExact;
  /// Reduce::kFast: the ranks that the plan is of, if they are not the whole group, and those that own the same part; borrowed.
  comm::Communicator *shards = nullptr, *replicas = nullptr;
  int ranks_per_row = 1;
  bool overlaps = false;
  /// Sections have no experts (nn::Parameters::has_experts_apart): then embedding and head are larger than all layers by far, and are sent
  /// at once where it overlaps.
  bool divides_experts = false;
  /// Of what one rank sends another, so much at once, unless it overlaps: then all that another owns of a layer.
  std::int64_t bucket_elements = std::int64_t{1} << 22;
};
/// Elements that a rank takes in from each other rank at once.
std::int64_t exchange_bucket(std::span<const nn::GradSection> sections, const ShardPlan& plan, const ExchangeOptions& options);

/// Adds up the gradients of a step's rows and gives each rank the part that it owns. Every rank makes the same calls.
///
/// Rows go round: row i is of rank i mod W, in round i / W; with C ranks to a row, of ranks C (i mod W / C) and the C - 1 after it, whose
/// leaves are added as a balanced tree first. Each rank sends the parts of its leaf to their owners (all-to-all), which add
/// them in the order of rows: section by section as its backward pass completes them if the parameters divide their gradients, else after
/// the round. Memory beside the gradients: the sum of the own part once a step has several rows, and for each rank a bucket of what
/// arrives. On one rank products are added where the sum is, and only what backward passes form stepwise (nn::Parameters::stepwise_grads)
/// has a sum beside it. With fewer parts than ranks, ranks r, r + parts, ... own the same part. One thread.
/// With `overlaps` a section is sent while the backward pass goes on (Communicator::start_all_to_all), and added when the next one is
/// complete; the pass writes the section's place again only then, so that layers need two places (nn::Parameters::divide_grads). A section
/// larger than a bucket, as embedding and head may be, is sent in several passes, of which the first overlaps.
/// Experts that ranks divide (nn::Parameters::has_experts_apart) have their gradients where the sum is: the rank that owns them adds the
/// leaf of each rank's rows itself, in the same order (autograd::ExpertRanks).
class GradientExchange {
 public:
  /// Everything is borrowed and must outlive this; `plan` has a part per rank of `group`, or a part for several.
  GradientExchange(ops::OpContext& ctx, nn::Parameters& parameters, comm::Communicator& group, const ShardPlan& plan,
                   const ExchangeOptions& options = {});
  ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  /// A step over `num_rows` rows begins, or begins anew.
  void begin(std::int64_t num_rows);
  /// The row of this rank in round `round`; nullopt if rows are used up.
  std::optional<std::int64_t> row_of(std::int64_t round) const noexcept;
  std::int64_t num_rounds() const noexcept;
  /// Ranks [0, n) have a row, or a part of one, in this round; its first row is the step's first.
  int num_active() const noexcept;
  bool is_first_round() const noexcept { return round_ == 0; }
  /// Before the forward pass of a row, which decides whether backward overwrites: gradients count as zero where they must.
  void begin_leaf();
  /// After it, or in its place on a rank that has no row: the round is over.
  void end_round();
  /// After a step that failed: waits for what is under way, at most for the group's timeout, and forgets it.
  void settle() noexcept;
  /// The gradient of this rank's elements of the plan; call once after the last round. Valid until begin(). [count] fp32.
  Tensor finish();

 private:
  /// Leaves are added in a place of their own.
  bool sums_leaves() const noexcept {
    return options_.reduce == Reduce::kExact && num_rows_ > 0 && (group_.size() > 1 || parameters_.divides_grads());
  }
  /// Backward passes add where the sum is; one row is its own sum.
  bool adds_rows_in_place() const noexcept {
    return options_.reduce == Reduce::kExact && num_rows_ > 1 && group_.size() == 1 && !parameters_.divides_grads();
  }
  /// What they form stepwise.
  void add_stepwise();
  int num_row_groups() const noexcept { return group_.size() / options_.ranks_per_row; }
  ElementRange part_of(int rank, ElementRange section) const { return plan_.part(rank % plan_.num_ranks(), section); }
  const ElementRanges& own() const { return plan_.elements(group_.rank() % plan_.num_ranks()); }
  /// What arrives of a section, or of a bucket of it, and where it is added.
  struct Pass {
    std::size_t section = 0;
    std::int64_t begin = 0;  ///< of the bucket, within what each rank owns of the section
    std::vector<TensorView> outs;
    std::vector<ConstTensorView> ins;
    ElementRange mine;
    bool is_first = false;
    int num_active = 0;
  };
  Pass make_pass(std::size_t section, std::int64_t begin);
  /// `pass` has arrived.
  void add_up(Pass& pass);
  void exchange(std::size_t section);
  void send(Pass pass);
  /// What is under way is joined and added, and so is the rest of its section.
  void complete();
  /// The most that one rank owns of a section.
  std::int64_t longest_part(std::size_t section) const;
  /// Where leaves of elements from `begin` on of the array of masters, all of them this rank's own, are added.
  TensorView sum_of(std::size_t section, std::int64_t begin, std::int64_t count) const;
  void make_sum();
  /// Leaves of rows that follow each other; `is_first`: of the step's first rows.
  void add(TensorView sum, std::span<const ConstTensorView> leaves, bool is_first);

  ops::OpContext& ctx_;
  nn::Parameters& parameters_;
  comm::Communicator& group_;
  const ShardPlan& plan_;
  ExchangeOptions options_;
  std::int64_t bucket_ = 0;
  std::optional<Pass> under_way_;
  std::unique_ptr<comm::Started> sending_;  ///< of under_way_, if that is not there yet
  Tensor sum_;                              ///< of the own elements
  Tensor stepwise_sum_;                     ///< of what add_stepwise() adds
  Tensor second_;                           ///< of what a section has that comes a second time, of which this rank owns second_range_
  ElementRange second_range_;
  Tensor received_;  ///< a bucket per rank
  std::int64_t num_rows_ = 0, round_ = 0;
  bool is_in_leaf_ = false;
  std::size_t next_section_ = 0;  ///< of this round
};

/// out += x for fp32 arrays of any length.
void add_in_place(ops::OpContext& ctx, TensorView out, ConstTensorView x);

}  // namespace prl::trainer
