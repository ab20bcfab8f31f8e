#include "engine/sharded_runner.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {
namespace {

std::vector<std::shared_ptr<DeviceRuntime>> devices_of(const std::shared_ptr<DeviceRuntime>& first, const nn::WeightsPtr& weights) {
  std::vector<std::shared_ptr<DeviceRuntime>> devices{first};
  for (const nn::WeightsPtr& part : weights->others) devices.push_back(part->embedding_VH().runtime());
  return devices;
}

const nn::WeightsPtr& part_of(const nn::WeightsPtr& weights, std::size_t rank) { return rank == 0 ? weights : weights->others[rank - 1]; }

}  // namespace

std::size_t ShardedRunner::gathered_bytes(const EngineOptions& options, const nn::ModelConfig& config, DType compute) {
  constexpr std::int64_t kProbeTokens = 32;
  // Recorded steps are filled up: those of a token for each sequence, and with drafts those of several.
  const auto filled = [](std::int64_t rows) { return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(rows))); };
  std::int64_t tokens = std::max({options.max_num_batched_tokens, filled(options.max_num_seqs), kProbeTokens});
  if (options.drafts.num_tokens > 0) tokens = std::max(tokens, filled(std::min(options.max_num_batched_tokens, nn::kMaxRecordedRows)));
  const std::int64_t of_heads = config.num_heads * (config.latent ? config.latent->value_dim : config.head_dim);
  const std::int64_t width = std::max({of_heads, config.linear.value_width(), config.hidden_size, config.intermediate_size,
                                       config.num_active_experts * config.expert_size, config.shared_expert_size});
  return static_cast<std::size_t>(tokens * width) * size_of(compute);
}

/// Each device has files for its part of every block: a block is there if all its parts are.
class ShardedRunner::Files final : public BlockFiles {
 public:
  explicit Files(ShardedRunner& owner) : owner_(owner) {}

  bool write(const DiskCopy& copy) override {
    std::vector<std::uint8_t> is_taken(owner_.runners_.size(), 0);
    owner_.on_all([&](std::size_t rank) { is_taken[rank] = files_of(rank).write(copy) ? 1 : 0; });
    return std::ranges::find(is_taken, 0) == is_taken.end();
  }
  std::vector<DiskRead> read(std::span<const DiskCopy> copies) override {
    std::vector<std::vector<DiskRead>> parts(owner_.runners_.size());
    owner_.on_all([&](std::size_t rank) { parts[rank] = files_of(rank).read(copies); });
    std::vector<DiskRead> outcomes = parts.front();
    for (const std::vector<DiskRead>& part : parts)
      for (std::size_t i = 0; i < outcomes.size(); ++i) outcomes[i] = std::max(outcomes[i], part[i]);
    return outcomes;
  }
  void forget() override {
    for (std::size_t rank = 0; rank < owner_.runners_.size(); ++rank) files_of(rank).forget();
  }
  DiskStats stats() const override {
    DiskStats all = files_of(0).stats();
    for (std::size_t rank = 1; rank < owner_.runners_.size(); ++rank) {
      const DiskStats part = files_of(rank).stats();
      all.num_writes_queued = std::max(all.num_writes_queued, part.num_writes_queued);
      all.num_not_queued += part.num_not_queued;
      all.num_late += part.num_late;
      all.num_damaged += part.num_damaged;
      all.is_off = all.is_off || part.is_off;
    }
    return all;
  }

 private:
  BlockFiles& files_of(std::size_t rank) const { return *owner_.runners_[rank]->block_files(); }
  ShardedRunner& owner_;
};

/// A block is the parts of all devices, one behind the other.
class ShardedRunner::Memory final : public BlockMemory {
 public:
  explicit Memory(ShardedRunner& owner) : owner_(owner) {}

  std::size_t block_bytes() const override {
    std::size_t bytes = 0;
    for (const auto& runner : owner_.runners_) bytes += runner->block_memory()->block_bytes();
    return bytes;
  }
  void fetch(std::span<const BlockCopy> copies) override {
    owner_.on_all([&](std::size_t rank) { owner_.runners_[rank]->block_memory()->fetch(copies); });
  }
  void add_parts(BlockId host, std::vector<std::span<std::byte>>& parts) override {
    std::vector<std::vector<std::span<std::byte>>> of_ranks(owner_.runners_.size());
    owner_.on_all([&](std::size_t rank) { owner_.runners_[rank]->block_memory()->add_parts(host, of_ranks[rank]); });
    for (const auto& own : of_ranks) parts.insert(parts.end(), own.begin(), own.end());
  }

 private:
  ShardedRunner& owner_;
};

ShardedRunner::ShardedRunner(const std::shared_ptr<DeviceRuntime>& first, const EngineOptions& options, nn::WeightsPtr weights) {
  const std::vector<std::shared_ptr<DeviceRuntime>> devices = devices_of(first, weights);
  group_ = ops::make_shard_group(devices, gathered_bytes(options, weights->config, weights->compute));
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    EngineOptions own = options;
    if (rank > 0) {
      own.times = nullptr;
      own.logs_routes = false;  // all ranks route alike
      own.drafts.from_head = false;
    }
    const int num_threads = options.num_threads > 0 ? options.num_threads : static_cast<int>(std::thread::hardware_concurrency());
    own.num_threads = std::max(1, num_threads / static_cast<int>(devices.size()));
    runners_.push_back(std::make_unique<PagedRunner>(devices[rank], own, part_of(weights, rank),
                                                     RunnerShare{{group_.get(), static_cast<int>(rank)}, &sequences_}));
    outputs_.emplace_back(2);
  }
  if (options.num_disk_blocks > 0) files_ = std::make_unique<Files>(*this);
  if (options.num_host_blocks > 0) memory_ = std::make_unique<Memory>(*this);
  try {
    for (std::size_t rank = 1; rank < devices.size(); ++rank) threads_.emplace_back([this, rank] { serve(rank); });
  } catch (...) {
    stop();  // those that the system did start
    throw;
  }
}

ShardedRunner::~ShardedRunner() { stop(); }

void ShardedRunner::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  news_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ShardedRunner::run(std::size_t rank, const std::function<void(std::size_t)>& work) {
  try {
    work(rank);
  } catch (...) {
    {
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
    }
    group_->abort();
  }
}

void ShardedRunner::serve(std::size_t rank) {
  std::uint64_t num_served = 0;
  for (;;) {
    const std::function<void(std::size_t)>* work = nullptr;
    {
      std::unique_lock lock(mutex_);
      news_.wait(lock, [&] { return is_stopping_ || num_calls_ != num_served; });  // ends with the runner
      if (is_stopping_) return;
      num_served = num_calls_;
      work = work_;
    }
    run(rank, *work);
    {
      const std::lock_guard lock(mutex_);
      --num_busy_;
    }
    news_.notify_all();
  }
}

void ShardedRunner::on_all(const std::function<void(std::size_t)>& work) {
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    ++num_calls_;
    num_busy_ = threads_.size();
    error_ = nullptr;
  }
  news_.notify_all();
  run(0, work);
  std::unique_lock lock(mutex_);
  news_.wait(lock, [&] { return num_busy_ == 0; });  // gathers, which are all that a rank waits for, have a deadline
  if (error_ == nullptr) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  group_->reset();
  std::rethrow_exception(error);
}

void ShardedRunner::begin(const StepPlan& plan, StepOutput& output) {
  if (!failure_.empty()) fail(ErrorCode::kUnavailable, "the devices that share the layers are out of step: {}", failure_);
  std::vector<std::uint8_t> has_begun(runners_.size(), 0);
  try {
    on_all([&](std::size_t rank) {
      runners_[rank]->begin(plan, rank == 0 ? output : outputs_[rank][num_begun_ % 2]);
      has_begun[rank] = 1;
    });
  } catch (const std::exception& error) {
    if (std::ranges::find(has_begun, 1) != has_begun.end()) failure_ = error.what();
    throw;
  }
  ++num_begun_;
}

void ShardedRunner::finish(const StepPlan& plan, StepOutput& output) {
  const std::size_t turn = num_finished_++ % 2;
  on_all([&](std::size_t rank) { runners_[rank]->finish(plan, rank == 0 ? output : outputs_[rank][turn]); });
}

void ShardedRunner::set_weights(nn::WeightsPtr weights) {
  if (weights != nullptr && weights->others.size() + 1 != runners_.size())
    fail(ErrorCode::kInvalidArgument, "new weights are for {} devices, the engine has {}", weights->others.size() + 1, runners_.size());
  for (std::size_t rank = runners_.size(); rank-- > 0;) runners_[rank]->set_weights(weights == nullptr ? nullptr : part_of(weights, rank));
}

nn::AdapterPtr ShardedRunner::make_adapter(const nn::StoredAdapter& stored) {
  std::vector<nn::AdapterPtr> parts(runners_.size());
  on_all([&](std::size_t rank) { parts[rank] = runners_[rank]->make_adapter(stored); });
  return nn::join_parts(parts);
}

WeightProof ShardedRunner::prove_with(const nn::AdapterPtr& adapter) {
  WeightProof proof;
  on_all([&](std::size_t rank) {
    if (rank == 0)
      proof = runners_[0]->prove_with(adapter);
    else
      (void)runners_[rank]->probe_logprobs(adapter == nullptr ? nullptr : adapter->others.at(rank - 1));
  });
  return proof;
}

}  // namespace prl::engine
