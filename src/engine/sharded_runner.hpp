#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/model_runner.hpp"
#include "engine/paged_runner.hpp"
#include "ops/shard_group.hpp"

namespace prl::engine {

/// Devices of this process that share every layer (tensor parallelism): each runs all steps with its part of the weights and of the cache,
/// on a thread of its own. Sums are not divided and draws depend on the sequence alone, so that all devices draw the same tokens, and the
/// same as one device would.
class ShardedRunner final : public ModelRunner {
 public:
  /// For weights of several devices (Weights::others), the first of which is `first`. Errors of PagedRunner and ops::make_shard_group.
  ShardedRunner(const std::shared_ptr<DeviceRuntime>& first, const EngineOptions& options, nn::WeightsPtr weights);
  ~ShardedRunner() override;
  void begin(const StepPlan& plan, StepOutput& output) override;
  void finish(const StepPlan& plan, StepOutput& output) override;
  bool works_beside_host() const override { return runners_.front()->works_beside_host(); }
  void set_weights(nn::WeightsPtr weights) override;
  nn::WeightsPtr weights() const override { return runners_.front()->weights(); }
  std::string kernels() const override { return runners_.front()->kernels(); }
  WeightProof prove() override { return prove_with(weights()->adapter); }
  wire::RoutedExperts routes_of(std::span<const BlockLease> blocks, std::int64_t begin, std::int64_t end) override {
    return runners_.front()->routes_of(blocks, begin, end);
  }
  BlockFiles* block_files() override { return files_.get(); }
  BlockMemory* block_memory() override { return memory_.get(); }
  nn::AdapterPtr make_adapter(const nn::StoredAdapter& stored) override;
  WeightProof prove_with(const nn::AdapterPtr& adapter) override;
  /// That of the first device, which alone keeps hidden states for a head for multi-token prediction.
  const nn::KvCache& first_cache() const noexcept { return runners_.front()->cache(); }

  /// Bytes of the largest rows that a step gathers.
  static std::size_t gathered_bytes(const EngineOptions& options, const nn::ModelConfig& config, DType compute);

 private:
  class Files;
  class Memory;
  void stop();
  /// work(rank) of each rank, of rank 0 here. Throws the first error; the others of a step that failed on one are ended.
  void on_all(const std::function<void(std::size_t rank)>& work);
  void run(std::size_t rank, const std::function<void(std::size_t rank)>& work);
  void serve(std::size_t rank);

  std::unique_ptr<ops::ShardGroup> group_;
  std::mutex sequences_;
  std::vector<std::unique_ptr<PagedRunner>> runners_;
  std::unique_ptr<BlockFiles> files_;             ///< the parts that all ranks have; nullptr: none
  std::unique_ptr<BlockMemory> memory_;           ///< the same in host memory
  std::vector<std::vector<StepOutput>> outputs_;  ///< of the other ranks, which are dropped: two steps take turns
  std::size_t num_begun_ = 0, num_finished_ = 0;
  std::string failure_;  ///< why no step can be begun any more: some ranks have begun one that others have not

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable news_;
  const std::function<void(std::size_t rank)>* work_ = nullptr;  ///< of the call under way
  std::uint64_t num_calls_ = 0;
  std::size_t num_busy_ = 0;  ///< of the other ranks
  std::exception_ptr error_;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace prl::engine
