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

/// One row's work on its own copy of the logits.
class RowSampler {
 public:
  RowSampler(const Kernels& k, const SampleRow& row, float* x, std::int32_t* order, std::int64_t n) : kernels_(k), row_(row), x_(x), order_(order), n_(n) {}

  void run(SampleResult& out) {
    const bool greedy = row_.temperature == 0.0f;
    for (std::int64_t c = 0; c < n_; c += kVocabChunk) lse_.merge(kernels_.chunk_stats(x_ + c, std::min<std::int64_t>(kVocabChunk, n_ - c), greedy ? 1.0f : row_.temperature));
    if (!std::isfinite(lse_.value())) fail(ErrorCode::kNonFinite, "[sample] a row of logits has no finite maximum (log-sum-exp {}): all tokens banned, or NaN or infinity from the model", lse_.value());
    out.top_logprobs.clear();
    if (greedy) {
      out.token = static_cast<std::int32_t>(std::max_element(x_, x_ + n_) - x_);  // the first of equals
      finish(out, lse_.value(), n_);
    } else if (row_.top_k <= 0 && row_.top_p >= 1.0f && row_.min_p <= 0.0f) {
      out.token = draw_from_all();
      finish(out, lse_.value(), n_);
    } else {
      draw_truncated(out);
    }
  }

 private:
  bool before(std::int32_t a, std::int32_t b) const { return x_[a] != x_[b] ? x_[a] > x_[b] : a < b; }

  std::int32_t draw_from_all() const {
    double total = 0;
    for (std::int64_t i = 0; i < n_; ++i) total += weight(x_[i]);
    double left = uniform(row_) * total;
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < n_; ++i) {
      const double w = weight(x_[i]);
      if (w <= 0) continue;
      last = i;
      if ((left -= w) < 0) break;
    }
    return static_cast<std::int32_t>(last);
  }
  double weight(float x) const { return std::exp(static_cast<double>(x) - static_cast<double>(lse_.max())); }

  /// Orders at least the first `count` candidates best first; those after them are all worse.
  void order_first(std::int64_t candidates, std::int64_t count) {
    const auto less = [this](std::int32_t a, std::int32_t b) { return before(a, b); };
    if (count < candidates) std::nth_element(order_, order_ + count, order_ + candidates, less);
    std::sort(order_, order_ + std::min(count, candidates), less);
  }

  /// min_p, then top_k, then top_p over what is left, as vLLM orders them; kept tokens are renormalised.
  void draw_truncated(SampleResult& out) {
    const float floor = row_.min_p > 0.0f ? lse_.max() + std::log(row_.min_p) : -std::numeric_limits<float>::infinity();
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n_; ++i)
      if (x_[i] >= floor && x_[i] != -std::numeric_limits<float>::infinity()) order_[kept++] = static_cast<std::int32_t>(i);
    if (row_.top_k > 0 && row_.top_k < kept) {
      order_first(kept, row_.top_k);
      kept = row_.top_k;
    }
    double total = 0;
    std::sort(order_, order_ + (row_.top_k > 0 ? kept : 0), [this](std::int32_t a, std::int32_t b) { return before(a, b); });
    for (std::int64_t i = 0; i < kept; ++i) total += weight(x_[order_[i]]);
    if (row_.top_p < 1.0f) {
      const double wanted = static_cast<double>(row_.top_p) * total;
      double sum = 0;
      std::int64_t count = 0, sorted = 0;
      while (count < kept && sum < wanted) {
        if (count == sorted) {  // most mass lies in few tokens: order no more than needed
          sorted = std::min(kept, std::max<std::int64_t>(256, 8 * sorted));
          order_first(kept, sorted);
        }
        sum += weight(x_[order_[count++]]);
      }
      kept = std::max<std::int64_t>(count, 1);
      total = sum;
    }
    double left = uniform(row_) * total;
    std::int64_t pick = 0;
    for (std::int64_t i = 0; i < kept; ++i) {
      pick = i;
      if ((left -= weight(x_[order_[i]])) < 0) break;
    }
    out.token = order_[pick];
    const auto lse = kept == n_ ? lse_.value() : static_cast<float>(static_cast<double>(lse_.max()) + std::log(total));
    // Only the kept tokens stay in the distribution that top_logprobs reports.
    const std::int64_t wanted = std::min<std::int64_t>(row_.num_top_logprobs, kept);
    order_first(kept, wanted);
    report(out, lse, wanted);
  }

  void finish(SampleResult& out, float lse, std::int64_t candidates) {
    const std::int64_t wanted = std::min<std::int64_t>(row_.num_top_logprobs, candidates);
    if (wanted > 0) {
      std::iota(order_, order_ + candidates, 0);
      order_first(candidates, wanted);
    }
    report(out, lse, wanted);
  }
  void report(SampleResult& out, float lse, std::int64_t count) const {
    out.logprob = x_[out.token] - lse;
    for (std::int64_t i = 0; i < count; ++i)
      if (x_[order_[i]] != -std::numeric_limits<float>::infinity()) out.top_logprobs.emplace_back(order_[i], x_[order_[i]] - lse);
  }

  const Kernels& kernels_;
  const SampleRow& row_;
  float* x_;
  std::int32_t* order_;
  std::int64_t n_;
  LogSumExp lse_;
};

}  // namespace

void sample(OpContext& ctx, std::span<SampleResult> out_B, ConstTensorView logits_BV, std::span<const SampleRow> rows_B) {
  const std::int64_t V = logits_BV.shape.num_cols();
  const std::int64_t floats = (V + 15) / 16 * 16;
  char* memory = static_cast<char*>(ctx.workspace->require(static_cast<std::size_t>(num_threads(ctx) * floats * 8)));
  parallel_slots(ctx, static_cast<std::int64_t>(rows_B.size()), [&](std::int64_t b, std::int64_t slot) {
    float* x = reinterpret_cast<float*>(memory) + slot * 2 * floats;
    __builtin_memcpy(x, logits_BV.as<float>() + b * logits_BV.row_stride, static_cast<std::size_t>(V) * sizeof(float));
    RowSampler(kernels(ctx), rows_B[static_cast<std::size_t>(b)], x, reinterpret_cast<std::int32_t*>(x + floats), V).run(out_B[static_cast<std::size_t>(b)]);
  });
}

}  // namespace prl::ops::cpu
