#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "wire/training.hpp"

namespace prl::wire {

/// Cost of a packed row: per_token * sum(n) + per_token_squared * sum(n^2) over its samples' lengths n, in any unit.
/// The defaults count tokens; a model's own are its FLOPs (projections and head; attention).
struct BinCost {
  double per_token = 1.0;
  double per_token_squared = 0.0;
};

struct PackOptions {
  std::int64_t seq_len = 2048;          ///< longest row; longer samples keep their first seq_len tokens
  std::int64_t num_ranks = 1;           ///< W: every rank gets the same number of rows
  std::int64_t pad_to_multiple_of = 1;  ///< of context-parallel ranks
  BinCost cost = {};
};

/// What rows of `seq_len` tokens had no room for.
struct PackLosses {
  std::int64_t num_cut = 0;         ///< samples that lost tokens, but not all
  std::int64_t num_lost = 0;        ///< samples of which nothing is left: they begin with an image longer than a row
  std::int64_t num_cut_tokens = 0;  ///< of both kinds
};

/// Packs samples into rows for W ranks: first-fit decreasing, enough bins for all ranks, padding, masked copies to fill up, and
/// a balanced assignment. Pure and deterministic (spec 2.5).
///
/// Every token of every (truncated) sample is in exactly one row; a fill row is a copy of a real row that takes part in no
/// loss. Empty input gives W empty lists. No image is divided: a sample ends before one that does not fit. Rows with images come first on
/// each rank. `losses` says what was cut.
/// Errors    Error{kInvalidArgument} naming the environment: streams of different lengths, or no advantages although tokens
///           take part in the rl loss; or nothing is left of any sample.
std::vector<std::vector<MicroBatch>> pack(std::vector<TrainingSample> samples, const PackOptions& options, PackLosses* losses = nullptr);

/// One stage of it, for those who only plan: bins of indices into `lengths` (each in (0, seq_len]), first-fit decreasing.
std::vector<std::vector<std::size_t>> first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t seq_len);

/// W lists of indices with equal counts (costs.size() % W == 0) and nearly equal cost sums: Karmarkar-Karp differencing, then
/// pairwise swaps while they lower (largest sum, spread). Karmarkar and Karp 1982.
std::vector<std::vector<std::size_t>> balanced_partition(std::span<const double> costs, std::int64_t num_ranks);

/// True if any token of the row takes part in any loss component.
bool has_loss(const MicroBatch& batch) noexcept;

/// Member tokens of each loss component (spec 2.2), the global normalisers when added over all rows of a step.
struct LossTokenCounts {
  std::int64_t rl = 0, ce = 0, ref_kl = 0;
  LossTokenCounts& operator+=(const LossTokenCounts& other) noexcept;
};
LossTokenCounts count_loss_tokens(const MicroBatch& batch) noexcept;

}  // namespace prl::wire
