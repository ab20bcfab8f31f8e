// How long a device waits for the host between two steps while clients stream. Every token of every stream goes through a queue to a
// coroutine on another thread, as in generation.cpp. `beside`: the device computes beside the host, so that tokens are sent meanwhile and
// steps are queued ahead.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "engine/core.hpp"
#include "net/async_result.hpp"

namespace prl::server {
namespace {

using Clock = std::chrono::steady_clock;

/// A device whose steps take as long as those of a GPU with 128 sequences of Qwen3-0.6B.
class WaitingDevice final : public engine::ModelRunner {
 public:
  explicit WaitingDevice(bool is_beside_host) : is_beside_host_(is_beside_host) {}
  void begin(const engine::StepPlan&, engine::StepOutput&) override {
    // Behind the step that computes, if there is one.
    const auto now = Clock::now();
    waited_s_ = std::max(0.0, std::chrono::duration<double>(now - ends_.back()).count());
    ends_.push_back(std::max(now, ends_.back()) + std::chrono::microseconds(1800));
  }
  void finish(const engine::StepPlan& plan, engine::StepOutput& output) override {
    ends_.pop_front();
    while (Clock::now() < ends_.front()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (ends_.size() == 1) ends_.front() = Clock::now();  // what was slept too long is not the host's
    if (output.rows.size() < plan.rows.size()) output.rows.resize(plan.rows.size());
    for (engine::StepOutput::Row& row : output.rows) {
      row.error.clear();
      row.samples.resize(1);
      row.samples[0].token = 5;
      row.samples[0].logprob = -1.0f;
      row.num_good = 1;
    }
  }
  bool works_beside_host() const override { return is_beside_host_; }
  void set_weights(nn::WeightsPtr weights) override { weights_ = std::move(weights); }
  nn::WeightsPtr weights() const override { return weights_; }
  engine::WeightProof prove() override { return {}; }
  double waited_s() const { return waited_s_; }

 private:
  bool is_beside_host_;
  double waited_s_ = 0;
  std::deque<Clock::time_point> ends_{Clock::now()};  ///< of the step that was finished last and of those behind it
  nn::WeightsPtr weights_ = std::make_shared<nn::Weights>();
};

using Queue = net::AsyncQueue<wire::GenerateOutput>;

net::asio::awaitable<void> read_all(Queue queue) {
  for (;;) {
    const auto delta = co_await queue.pop(net::Clock::now() + std::chrono::minutes(1));
    if (!delta) co_return;
  }
}

void device_waits(benchmark::State& state) {
  constexpr std::int64_t kPrompt = 128;
  const std::int64_t num_streams = state.range(0), num_tokens = static_cast<std::int64_t>(state.max_iterations) + 8;
  engine::CoreOptions options;
  options.block_size = 32;
  options.num_blocks = num_streams * ((kPrompt + num_tokens) / options.block_size + 2);
  options.scheduler.max_num_seqs = num_streams;
  options.scheduler.max_num_batched_tokens = num_streams * kPrompt;
  auto owned = std::make_unique<WaitingDevice>(state.range(1) != 0);
  const WaitingDevice& device = *owned;
  engine::EngineCore core(options, std::move(owned));
  net::asio::io_context io;
  std::vector<Queue> queues;
  for (std::int64_t i = 0; i < num_streams; ++i) {
    const Queue& queue = queues.emplace_back(static_cast<std::size_t>(num_tokens) + 1);
    net::asio::co_spawn(io, read_all(queue), net::asio::detached);
    engine::ResolvedRequest request;
    request.prompt_ids.assign(kPrompt, static_cast<std::int32_t>(i));
    request.max_new_tokens = num_tokens;
    core.add(RequestId{static_cast<std::uint64_t>(i + 1)}, std::move(request), [queue](const engine::StepEvent& event) {
      wire::GenerateOutput delta = event.delta;
      (void)queue.try_push(delta);
    });
  }
  std::thread reader([&io] { io.run(); });
  core.step();
  for (auto _ : state) {
    core.step();
    state.SetIterationTime(device.waited_s());
  }
  core.abort_all(wire::FinishReason::kAbort, "");
  for (const Queue& queue : queues) queue.close();
  reader.join();
}
BENCHMARK(device_waits)
    ->ArgNames({"streams", "beside"})
    ->ArgsProduct({{32, 128, 256}, {0, 1}})
    ->Iterations(200)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace prl::server
