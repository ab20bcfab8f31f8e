#include "engine/engine.hpp"

#include <utility>

#include "base/error.hpp"
#include "engine/loop.hpp"
#include "engine/paged_runner.hpp"

namespace prl::engine {
namespace {

CoreOptions core_options(const EngineOptions& options, std::int64_t num_blocks) {
  CoreOptions core;
  core.num_blocks = num_blocks;
  core.block_size = options.block_size;
  core.scheduler.max_num_seqs = options.max_num_seqs;
  core.scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
  core.scheduler.enable_prefix_caching = options.enable_prefix_caching;
  core.scheduler.enable_chunked_prefill = options.enable_chunked_prefill;
  return core;
}

std::unique_ptr<EngineLoop> make_loop(std::shared_ptr<DeviceRuntime> runtime, const EngineOptions& options, nn::WeightsPtr weights) {
  if (weights == nullptr) fail(ErrorCode::kInvalidArgument, "an engine needs weights to start with");
  const nn::ModelConfig config = weights->config;
  check_options(options, config);
  const std::int64_t num_blocks = resolve_num_blocks(options, config, weights->compute);
  auto runner = std::make_unique<PagedRunner>(std::move(runtime), options, num_blocks, std::move(weights));
  return std::make_unique<EngineLoop>(options, config, core_options(options, num_blocks), std::move(runner));
}

}  // namespace

struct Engine::Impl {
  std::unique_ptr<EngineLoop> loop;
};

Engine::Engine(std::shared_ptr<DeviceRuntime> runtime, EngineOptions options, nn::WeightsPtr weights)
    : impl_(std::make_unique<Impl>(Impl{make_loop(std::move(runtime), options, std::move(weights))})) {}

Engine::~Engine() = default;

const EngineOptions& Engine::options() const noexcept { return impl_->loop->options(); }
const nn::ModelConfig& Engine::model_config() const noexcept { return impl_->loop->model_config(); }
RequestId Engine::submit(wire::GenerateRequest request, EventSink sink) { return impl_->loop->submit(std::move(request), std::move(sink)); }
void Engine::cancel(RequestId id) { impl_->loop->cancel(id); }

void Engine::stop(RequestId id, std::string stop_string, std::int64_t, std::int32_t choice_idx) {
  impl_->loop->stop(id, std::move(stop_string), choice_idx);
}

WeightProof Engine::update_weights(nn::WeightsPtr weights, std::chrono::milliseconds timeout) {
  return impl_->loop->update_weights(std::move(weights), timeout);
}
WeightProof Engine::proof(std::chrono::milliseconds timeout) { return impl_->loop->proof(timeout); }
nn::WeightsPtr Engine::weights() const { return impl_->loop->weights(); }
void Engine::pause(std::chrono::milliseconds timeout) { impl_->loop->pause(timeout); }
void Engine::resume() { impl_->loop->resume(); }
void Engine::reset_prefix_cache() { impl_->loop->reset_prefix_cache(); }
EngineStats Engine::stats() const { return impl_->loop->stats(); }
bool Engine::is_alive(std::chrono::milliseconds max_age) const { return impl_->loop->is_alive(max_age); }
void Engine::shutdown() { impl_->loop->shutdown(); }

}  // namespace prl::engine
