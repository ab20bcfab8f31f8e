#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "nn/weights.hpp"

namespace prl::nn {

class Slicer;

/// All values of a model, of which parts may still be on their way.
struct LateValues {
  Tensor values;                    ///< [num_master_elements] in the compute dtype
  std::vector<ElementRange> parts;  ///< all of them, in the order in which they arrive
  /// Work that is queued after it finds parts[i]; called for each in turn, by who computes. Errors of who sends. nullptr: all are there.
  std::function<void(std::size_t i)> await;
};

/// Weights that are computed with while they arrive: a layer's matrices are made when a pass enters the layer before it. What lies outside
/// of layers is there from begin() on, all of them once complete() has returned, after which the weights do not change any more.
/// One thread.
class LateWeights final : public LayerSource {
 public:
  /// make_weights() of `late`, whose vectors lie in the first part.
  LateWeights(ops::OpContext& ctx, const Parameters& parameters, DType compute, PolicyVersion version, bool with_backward,
              const WeightsPtr& previous, LateValues late);
  ~LateWeights() override;
  LateWeights(const LateWeights&) = delete;
  LateWeights& operator=(const LateWeights&) = delete;

  const WeightsPtr& weights() const noexcept { return shared_; }
  bool is_complete() const noexcept { return num_arrived_ == num_parts_; }
  void begin() { bring(num_first_); }
  void complete() { bring(num_parts_); }
  void enter(std::int64_t layer, std::int64_t next) override;

 private:
  /// The first `n` parts.
  void bring(std::size_t n);

  ops::OpContext& ctx_;
  bool with_backward_;
  LateValues late_;
  std::shared_ptr<Weights> weights_;
  WeightsPtr shared_;
  std::unique_ptr<Slicer> slicer_;
  std::size_t num_parts_, num_arrived_ = 0;
  std::size_t num_first_ = 1;            ///< parts that a pass begins with
  std::vector<std::size_t> num_wanted_;  ///< parts that a pass needs when it enters a layer: the next one's too, which ops prefetch
};

}  // namespace prl::nn
