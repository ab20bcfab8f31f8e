#pragma once

#include <cmath>
#include <limits>

#include "ops/cpu/kernels.hpp"

namespace prl::ops::cpu {

/// Log-sum-exp of one row, fed with the statistics of its vocabulary chunks in order. Training and sampling both end here, so
/// their log-probabilities agree bit for bit.
class LogSumExp {
 public:
  void merge(const ChunkStats& c) {
    if (c.max == -std::numeric_limits<float>::infinity()) return;  // a chunk in which every token is banned
    if (empty_) {
      total_ = c;
      empty_ = false;
      return;
    }
    const float m = c.max > total_.max ? c.max : total_.max;
    const float a = std::exp(total_.max - m), b = std::exp(c.max - m);
    // With exponents now relative to m: sum e (x - m) = sum e (x - old) + (old - m) sum e.
    total_.weighted = a * (total_.weighted + (total_.max - m) * total_.sum) + b * (c.weighted + (c.max - m) * c.sum);
    total_.sum = a * total_.sum + b * c.sum;
    total_.max = m;
  }
  /// Not finite if every token was banned or a logit was NaN or +inf.
  float value() const { return empty_ ? -std::numeric_limits<float>::infinity() : total_.max + std::log(total_.sum); }
  /// Nats: log(sum) - sum p (x - max).
  float entropy() const { return std::log(total_.sum) - total_.weighted / total_.sum; }
  float max() const { return total_.max; }

 private:
  ChunkStats total_;
  bool empty_ = true;
};

}  // namespace prl::ops::cpu
