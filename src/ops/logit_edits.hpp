#pragma once

#include <cstdint>
#include <vector>

#include "ops/context.hpp"

#ifdef __CUDACC__
#define PRL_ON_BOTH __host__ __device__ inline
#else
#define PRL_ON_BOTH inline
#endif

namespace prl::ops {

/// Logit of a token that must not be drawn. Finite, so that a vocabulary chunk of only such tokens adds nothing instead of NaN.
inline constexpr float kMaskedLogit = -1e30f;

/// Changes to some rows of logits before tokens are drawn from them, each row's in the order of its fields. The entries of a row follow
/// those of the row before it. Ids of one kind occur once in a row. Kept from step to step, so that a warm one allocates nothing.
struct LogitEdits {
  /// logit += value
  struct Bias {
    std::int32_t id = 0;
    float value = 0;
  };
  /// A token of the prompt or the output: divided by `repetition` if above 0, else multiplied; then, if it is of the output, less
  /// frequency * count + presence.
  struct Seen {
    std::int32_t id = 0;
    std::int32_t count = 0;  ///< in the output; 0: in the prompt alone
  };
  struct Row {
    std::int32_t row = 0;
    std::int32_t num_biases = 0, num_seen = 0;
    float repetition = 1, frequency = 0, presence = 0;
    std::int32_t drawn_row = -1;       ///< not -1: one more token of the output, which `seen` does not count, is in this row of drawn_B
    std::int32_t num_masked = 0;       ///< logits that become kMaskedLogit
    bool has_allowed = false;          ///< a bit for each vocabulary entry, in whole words: where it is 0,
    float not_allowed = kMaskedLogit;  ///< this becomes the logit
  };
  std::vector<Row> rows{};
  std::vector<Bias> biases{};
  std::vector<Seen> seen{};
  std::vector<std::int32_t> masked{};
  std::vector<std::uint64_t> allowed{};

  void clear();
  static std::int64_t words_per_row(std::int64_t vocab_size) noexcept { return (vocab_size + 63) / 64; }
};

/// The logit of a token that was seen, with its count in the output; one expression for all devices.
PRL_ON_BOTH float penalised(float logit, std::int32_t count, const LogitEdits::Row& row) {
  const float repeated = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
  return count > 0 ? repeated - (row.frequency * static_cast<float>(count) + row.presence) : repeated;
}

/// logits_BV fp32 and drawn_B int32 on the device. Queued like any op; `edits` may change as soon as this returns. Formulas and order are
/// vLLM's, with the same bits on every device.
void edit_logits(OpContext& ctx, TensorView logits_BV, ConstTensorView drawn_B, const LogitEdits& edits);

}  // namespace prl::ops

#undef PRL_ON_BOTH
