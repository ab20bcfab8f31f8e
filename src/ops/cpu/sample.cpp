#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.hpp"
#include "ops/cpu/bodies.hpp"
#include "ops/cpu/detail/log_softmax.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

/// Uniform in [0, 1) with 53 bits: a pure function of the request's seed and the token's index in it.
double uniform(const SampleRow& row) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto r = Rng::philox({low(row.position), low(row.position >> 32), 0, 0}, {low(row.seed), low(row.seed >> 32)});
  return static_cast<double>(((static_cast<std::uint64_t>(r[0]) << 32) | r[1]) >> 11) * 0x1.0p-53;
}

/// One row's work on its own copy of the logits. Scratch: three arrays of n.
class RowSampler {
 public:
  RowSampler(const Kernels& k, const SampleRow& row, float* x, float* weight, std::int32_t* order, std::int64_t n)
      : kernels_(k), row_(row), x_(x), weight_(weight), order_(order), n_(n) {}

  void run(SampleResult& out) {
    const bool greedy = row_.temperature == 0.0f;
    for (std::int64_t c = 0; c < n_; c += kVocabChunk)
      lse_.merge(kernels_.chunk_stats(x_ + c, std::min<std::int64_t>(kVocabChunk, n_ - c), greedy ? 1.0f : row_.temperature));
    out.top_logprobs.clear();
    out.named_logprobs.assign(row_.named_ids.size(), -std::numeric_limits<float>::infinity());
    if (!std::isfinite(lse_.value())) {
      out.token = 0;
      out.logprob = std::numeric_limits<float>::quiet_NaN();
      return;
    }
    if (greedy) {
      out.token = static_cast<std::int32_t>(std::max_element(x_, x_ + n_) - x_);  // the first of equals
      all_are_candidates(row_.num_top_logprobs > 0);
      report(out, lse_.value(), n_, -1);
      return;
    }
    kernels_.exponentials(weight_, x_, lse_.max(), n_);
    if (row_.top_k <= 0 && row_.top_p >= 1.0f && row_.min_p <= 0.0f) {
      out.token = draw(-1);
      all_are_candidates(row_.num_top_logprobs > 0);
      report(out, lse_.value(), n_, -1);
      return;
    }
    const std::int64_t kept = truncate();
    const std::int32_t worst = order_[kept - 1];
    out.token = draw(worst);
    report(out, kept == n_ ? lse_.value() : lse_.max() + static_cast<float>(std::log(mass_up_to(worst))), kept, worst);
  }

 private:
  bool before(std::int32_t a, std::int32_t b) const { return x_[a] != x_[b] ? x_[a] > x_[b] : a < b; }
  void all_are_candidates(bool wanted) {
    if (wanted) std::iota(order_, order_ + n_, 0);
  }
  /// Moves the `count` best of order_[begin, end) to its front, sorted or not.
  void select(std::int64_t begin, std::int64_t count, std::int64_t end, bool sorted) {
    const auto less = [this](std::int32_t a, std::int32_t b) { return before(a, b); };
    if (begin + count < end) std::nth_element(order_ + begin, order_ + begin + count, order_ + end, less);
    if (sorted) std::sort(order_ + begin, order_ + std::min(begin + count, end), less);
  }
  double mass(std::int64_t begin, std::int64_t end) const {
    double sum = 0;
    for (std::int64_t i = begin; i < end; ++i) sum += static_cast<double>(weight_[order_[i]]);
    return sum;
  }

  /// min_p, then top_k, then top_p over what is left, as vLLM orders them. Returns how many of order_ stay, the worst last.
  std::int64_t truncate() {
    const float floor = row_.min_p > 0.0f ? lse_.max() + std::log(row_.min_p) : -std::numeric_limits<float>::infinity();
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n_; ++i)
      if (x_[i] >= floor && x_[i] != -std::numeric_limits<float>::infinity()) order_[kept++] = static_cast<std::int32_t>(i);
    if (row_.top_k > 0 && row_.top_k < kept) {
      select(0, row_.top_k, kept, false);
      kept = row_.top_k;
    }
    if (row_.top_p >= 1.0f) {
      const auto less = [this](std::int32_t a, std::int32_t b) { return before(a, b); };
      std::iter_swap(order_ + kept - 1, std::max_element(order_, order_ + kept, less));
      return kept;
    }
    // Halve the range in which the cut lies until it is short, summing what is certain to stay; then walk it in order.
    const double wanted = static_cast<double>(row_.top_p) * mass(0, kept);
    std::int64_t low = 0, high = kept;
    double sum = 0;
    while (high - low > 64) {
      const std::int64_t half = (high - low) / 2;
      select(low, half, high, false);
      const double best_half = mass(low, low + half);
      if (sum + best_half >= wanted) {
        high = low + half;
      } else {
        sum += best_half;
        low += half;
      }
    }
    select(low, high - low, high, true);
    do {
      sum += static_cast<double>(weight_[order_[low++]]);
    } while (low < high && sum < wanted);
    return low;
  }

  bool stays(std::int64_t i, std::int32_t worst) const { return worst < 0 || !before(worst, static_cast<std::int32_t>(i)); }
  double mass_up_to(std::int32_t worst) const {
    double sum = 0;
    for (std::int64_t i = 0; i < n_; ++i)
      if (stays(i, worst)) sum += static_cast<double>(weight_[i]);
    return sum;
  }
  /// Inverts the cumulative distribution in index order, over all tokens or those not worse than `worst`.
  std::int32_t draw(std::int32_t worst) const {
    double left = uniform(row_) * mass_up_to(worst);
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < n_; ++i) {
      if (weight_[i] <= 0.0f || !stays(i, worst)) continue;
      last = i;
      if ((left -= static_cast<double>(weight_[i])) < 0) break;
    }
    return static_cast<std::int32_t>(last);
  }

  /// The chosen token, the named ones not worse than `worst` (-1: all), and the best of the first `candidates` of order_, under one
  /// normalisation.
  void report(SampleResult& out, float lse, std::int64_t candidates, std::int32_t worst) {
    out.logprob = x_[out.token] - lse;
    for (std::size_t k = 0; k < row_.named_ids.size(); ++k)
      if (stays(row_.named_ids[k], worst)) out.named_logprobs[k] = x_[row_.named_ids[k]] - lse;
    const std::int64_t count = std::min<std::int64_t>(row_.num_top_logprobs, candidates);
    if (count <= 0) return;
    select(0, count, candidates, true);
    for (std::int64_t i = 0; i < count; ++i)
      if (x_[order_[i]] != -std::numeric_limits<float>::infinity()) out.top_logprobs.emplace_back(order_[i], x_[order_[i]] - lse);
  }

  const Kernels& kernels_;
  const SampleRow& row_;
  float* x_;
  float* weight_;
  std::int32_t* order_;
  std::int64_t n_;
  LogSumExp lse_;
};

}  // namespace

void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B) {
  if (pending.results_B.size() < rows_B.size()) pending.results_B.resize(rows_B.size());
  const std::int64_t V = logits_BV.shape.num_cols();
  const std::int64_t floats = (V + 15) / 16 * 16;
  char* memory = static_cast<char*>(ctx.workspace->require(static_cast<std::size_t>(num_threads(ctx) * floats * 12)));
  parallel_slots(ctx, static_cast<std::int64_t>(rows_B.size()), [&](std::int64_t b, std::int64_t slot) {
    float* x = reinterpret_cast<float*>(memory) + slot * 3 * floats;
    __builtin_memcpy(x, logits_BV.as<float>() + b * logits_BV.row_stride, static_cast<std::size_t>(V) * sizeof(float));
    RowSampler(kernels(ctx), rows_B[static_cast<std::size_t>(b)], x, x + floats, reinterpret_cast<std::int32_t*>(x + 2 * floats), V)
        .run(pending.results_B[static_cast<std::size_t>(b)]);
  });
  if (drawn_B.data != nullptr)
    for (std::size_t b = 0; b < rows_B.size(); ++b) drawn_B.as<std::int32_t>()[b] = pending.results_B[b].token;
}

void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending) {
  std::copy_n(pending.results_B.begin(), out_B.size(), out_B.begin());
}

}  // namespace prl::ops::cpu
