#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/host_cache.hpp"
#include "engine/image_features.hpp"
#include "engine/model_runner.hpp"
#include "engine/sampler.hpp"
#include "nn/decoder.hpp"
#include "ops/context.hpp"

namespace prl::engine {

/// Error{kOutOfMemory} with numbers if the cache does not hold one sequence of max_model_len.
void check_cache_size(const EngineOptions& options, const nn::ModelConfig& config, DType compute);

/// One of several runners of the same steps, on devices that share the layers.
struct RunnerShare {
  ops::SharedLayers layers = {};
  std::mutex* sequences = nullptr;  ///< see Sampler
  bool has_adapters = true;         ///< false: rows compute without the adapters that their sequences name
  /// The runner's model is a head for multi-token prediction over the hidden states in this cache, of the same blocks; nullptr: it is none.
  const nn::KvCache* hidden_of = nullptr;
};

/// The decoder over a paged cache on one device. Buffers grow to the largest step and stay.
///
/// Of a head for multi-token prediction a row's token t is read where the model's token t - 1 lies, with the hidden state there, or, if t
/// is drawn by the step before, with that step's own output.
class PagedRunner final : public ModelRunner {
 public:
  /// Error{kOutOfMemory} if the cache does not fit the device, or its blocks in host memory the host.
  PagedRunner(std::shared_ptr<DeviceRuntime> runtime, const EngineOptions& options, nn::WeightsPtr weights, RunnerShare share = {});
  ~PagedRunner() override;
  void begin(const StepPlan& plan, StepOutput& output) override;
  void finish(const StepPlan& plan, StepOutput& output) override;
  bool works_beside_host() const override { return runtime_->stream() != nullptr; }
  void set_weights(nn::WeightsPtr weights) override;
  nn::WeightsPtr weights() const override { return weights_; }
  std::string kernels() const override { return ops::kernels_of(*runtime_); }
  WeightProof prove() override { return prove_with(weights_->adapter); }
  wire::RoutedExperts routes_of(std::span<const BlockLease> blocks, std::int64_t begin, std::int64_t end) override;
  BlockFiles* block_files() override { return host_ && host_->has_files() ? &*host_ : nullptr; }
  BlockMemory* block_memory() override { return host_ ? &*host_ : nullptr; }
  nn::AdapterPtr make_adapter(const nn::StoredAdapter& stored) override;
  WeightProof prove_with(const nn::AdapterPtr& adapter) override;
  /// WeightProof::probe_logprobs of the weights in use with that adapter.
  std::vector<float> probe_logprobs(const nn::AdapterPtr& adapter);
  const nn::KvCache& cache() const noexcept { return cache_; }

 private:
  /// Marks of a step: when it was queued, and behind its layers, head and draw; and the last mark of the step before, if there was one.
  struct Marks {
    std::optional<std::uint64_t> before;
    std::array<std::uint64_t, 4> own{};
    bool is_timed = false, is_decode = false;
  };
  /// Nothing unless steps are timed.
  void mark(std::size_t which);
  void add_times(const Marks& marks);
  void fill_batch(const StepPlan& plan);
  /// One token of a row, which is the last one or not.
  void add_token(const PlanRow& row, std::int64_t token, bool is_last);
  void add_position(const Sequence& sequence, std::int64_t token);
  void add_adapter_rows(const nn::Adapter* adapter, std::int32_t begin, std::int32_t end);
  void score_prompt(const PlanRow& row, ConstTensorView h_TH, std::int64_t first_row, StepOutput::Row& out);
  /// 1 + how many tokens come before `id` in row `row`; `top` holds the first ones.
  std::int32_t rank_of(std::int32_t id, ConstTensorView logits_BV, std::int64_t row, const ops::SampleResult& top);
  void begin_draws(const StepPlan& plan, ConstTensorView h_TH);

  std::shared_ptr<DeviceRuntime> runtime_;
  std::int64_t block_size_;
  int rank_;  ///< among devices that share the layers
  bool has_adapters_;
  std::int64_t shift_;  ///< of a head for multi-token prediction: 1
  nn::WeightsPtr weights_;
  ops::OpSession session_;
  nn::KvCache cache_;
  std::optional<HostCache> host_;
  nn::InferenceModel model_;
  Sampler sampler_;
  // Host arrays of nn::PagedBatch.
  std::vector<std::int32_t> ids_T_, positions_T_, slot_T_, query_start_, context_len_, block_table_, state_slot_;
  std::vector<std::int32_t> read_hidden_T_, write_hidden_T_;
  std::vector<std::int32_t> shared_slots_;  ///< of a head: ends of blocks that this step writes
  std::int32_t max_blocks_ = 0;
  ImageFeatures images_;
  // Where tokens turn by height and width, if that is anywhere not as by time; then all three, one after the other.
  std::vector<std::int32_t> heights_T_, widths_T_, rope_positions_3T_;
  // Rows of the adapters that the step's sequences name, of which the first num_adapters_ count; memory of others is kept.
  std::vector<std::pair<const nn::Adapter*, std::vector<std::int32_t>>> rows_of_adapters_;
  std::vector<nn::AdapterRows> adapters_;
  std::size_t num_adapters_ = 0;
  // Rows of h that are sampled, and for whom.
  std::vector<std::int32_t> sample_rows_B_;
  std::vector<Draw> draws_B_;
  Tensor drawn_B_;                            ///< tokens that the last step draws, on the device
  std::array<ops::PendingSamples, 2> draws_;  ///< of steps that were begun, which take turns; so do marks_
  std::shared_ptr<StepTimes> times_;
  std::unique_ptr<Stopwatch> stopwatch_;  ///< if times_ or a trace wants them
  std::array<Marks, 2> marks_;
  std::size_t num_begun_ = 0, num_finished_ = 0;
  std::vector<ops::SampleResult> results_B_;
  // Prompt log-probabilities.
  std::vector<std::int32_t> targets_T_;
  std::vector<float> temperatures_T_;
  Tensor logp_T_, entropy_T_, lse_T_;
  std::vector<float> logits_row_;
};

}  // namespace prl::engine
