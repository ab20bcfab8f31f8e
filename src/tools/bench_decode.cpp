#include "tools/bench_decode.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "engine/adapter_set.hpp"
#include "launch/engine_host.hpp"

namespace prl::tools {

using Clock = std::chrono::steady_clock;

void generate(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng,
              const std::function<void(const engine::StepEvent&)>& on_event) {
  std::mutex mutex;
  std::condition_variable done;
  std::int64_t num_finished = 0;
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    wire::GenerateRequest request;
    for (std::int64_t t = 0; t < options.prompt_tokens; ++t)
      request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(options.model.vocab_size))));
    request.sampling.max_tokens = static_cast<std::int32_t>(options.completion_tokens);
    request.sampling.ignore_eos = true;
    if (options.draft_tokens > 0) request.sampling.seed = rng.next_below(std::uint64_t{1} << 40);
    if (options.has_fresh_texts) request.sampling.top_k = 3;
    const std::string adapter = options.adapters.empty() ? "" : options.adapters[static_cast<std::size_t>(i) % options.adapters.size()];
    const auto sink = [&](const engine::StepEvent& event) {
      std::lock_guard lock(mutex);
      on_event(event);
      if (event.delta.finish_reason != wire::FinishReason::kNone && ++num_finished == num_sequences) done.notify_all();
    };
    engine.submit(std::move(request), sink, adapter);
  }
  std::unique_lock lock(mutex);
  if (!done.wait_for(lock, std::chrono::minutes(10), [&] { return num_finished == num_sequences; }))
    fail(ErrorCode::kDeadline, "the benchmark waited 10 minutes for the engine to serve {} sequences", num_sequences);
}

double time_decode(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng) {
  std::set<RequestId> begun;
  std::int64_t num_tokens = 0;
  Clock::time_point all_begun, end;
  generate(engine, num_sequences, options, rng, [&](const engine::StepEvent& event) {
    end = Clock::now();
    if (static_cast<std::int64_t>(begun.size()) == num_sequences) {
      num_tokens += static_cast<std::int64_t>(event.delta.token_ids.size());
    } else if (begun.insert(event.id); static_cast<std::int64_t>(begun.size()) == num_sequences) {
      all_begun = end;
    }
  });
  return static_cast<double>(num_tokens) / std::chrono::duration<double>(end - all_begun).count();
}

nn::WeightsPtr make_draft_model(const BenchOptions& options, ops::OpContext& ctx, nn::Parameters& parameters) {
  if (options.draft_layers == 0 || options.draft_tokens == 0) return nullptr;
  for (nn::NamedParameter& p : parameters.named()) {
    const bool ends_branch = p.name.ends_with("o_proj.weight") || p.name.ends_with("down_proj.weight");
    if (p.layer < options.draft_layers || !ends_branch) continue;
    std::vector<float> values(static_cast<std::size_t>(p.num_elements()));
    options.runtime->copy_to_host(values.data(), p.value.data(), values.size() * sizeof(float));
    for (float& value : values) value *= options.draft_gap;
    options.runtime->copy_from_host(p.value.data(), values.data(), values.size() * sizeof(float));
  }
  nn::ModelConfig config = options.model;
  config.num_layers = options.draft_layers;
  nn::Parameters first(options.runtime, config);
  for (nn::NamedParameter& p : first.named())
    options.runtime->copy_within(p.value.data(), parameters.at(p.name).value.data(), p.value.num_bytes());
  nn::WeightsPtr drafts = nn::make_weights(ctx, first, options.dtype, PolicyVersion{0}, false, nullptr);
  options.runtime->synchronize();
  return drafts;
}

std::unique_ptr<engine::Engine> make_engine(const BenchOptions& options, nn::WeightsPtr weights, std::shared_ptr<engine::StepTimes> times,
                                            nn::WeightsPtr drafts) {
  engine::EngineOptions engine_options;
  engine_options.max_model_len = options.prompt_tokens + options.completion_tokens + 1;
  engine_options.max_num_seqs = options.num_sequences;
  engine_options.max_num_batched_tokens = std::max<std::int64_t>(2048, options.num_sequences);
  if (options.runtime->device().kind == DeviceKind::kCuda) engine_options.max_num_batched_tokens = 16384;
  engine_options.block_size = launch::default_block_size(options.runtime->device().kind);
  engine_options.num_blocks = (options.num_sequences + 1) * (engine_options.max_model_len / engine_options.block_size + 2);
  engine_options.num_threads = options.num_threads;
  engine_options.enable_prefix_caching = false;
  if (!options.adapters.empty()) engine_options.adapters = std::make_shared<engine::AdapterSet>(std::ssize(options.adapters));
  engine_options.drafts.num_tokens = options.draft_tokens;
  engine_options.draft_model = std::move(drafts);
  if (options.has_fresh_texts) engine_options.drafts.min_ngram = 1;
  engine_options.times = std::move(times);
  return std::make_unique<engine::Engine>(options.runtime, engine_options, std::move(weights));
}

}  // namespace prl::tools
