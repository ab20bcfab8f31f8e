#include "launch/bench.hpp"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_from.hpp>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>

#include "base/log.hpp"
#include "base/rng.hpp"
#include "engine/engine.hpp"
#include "nn/decoder.hpp"
#include "ops/measure.hpp"
#include "ops/optimizer.hpp"

namespace prl::launch {
namespace {
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

/// Tokens per second from the first event of all sequences on, so that the prompt pass does not count.
double time_decode(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng) {
  std::mutex mutex;
  std::condition_variable done;
  std::int64_t num_started = 0, num_finished = 0, num_tokens = 0;
  Clock::time_point all_started, end;
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    wire::GenerateRequest request;
    for (std::int64_t t = 0; t < options.prompt_tokens; ++t)
      request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(options.model.vocab_size))));
    request.sampling.max_tokens = static_cast<std::int32_t>(options.completion_tokens);
    request.sampling.ignore_eos = true;
    auto is_first = std::make_shared<bool>(true);
    engine.submit(std::move(request), [&, is_first](const engine::StepEvent& event) {
      std::lock_guard lock(mutex);
      if (*is_first) {
        *is_first = false;
        if (++num_started == num_sequences) all_started = Clock::now();
      } else if (num_started == num_sequences) {
        num_tokens += static_cast<std::int64_t>(event.delta.token_ids.size());
      }
      if (event.delta.finish_reason == wire::FinishReason::kNone) return;
      end = Clock::now();
      if (++num_finished == num_sequences) done.notify_all();
    });
  }
  std::unique_lock lock(mutex);
  if (!done.wait_for(lock, std::chrono::minutes(10), [&] { return num_finished == num_sequences; }))
    fail(ErrorCode::kDeadline, "the benchmark waited 10 minutes for the engine to decode {} sequences", num_sequences);
  return static_cast<double>(num_tokens) / std::chrono::duration<double>(end - all_started).count();
}

std::vector<BenchRow> bench_decode(const BenchOptions& options, nn::WeightsPtr weights, const std::shared_ptr<DeviceRuntime>& runtime,
                                   double read_bytes_per_second) {
  engine::EngineOptions engine_options;
  engine_options.max_model_len = options.prompt_tokens + options.completion_tokens + 1;
  engine_options.max_num_seqs = options.num_sequences;
  engine_options.max_num_batched_tokens = std::max<std::int64_t>(2048, options.num_sequences);
  engine_options.num_blocks = (options.num_sequences + 1) * (engine_options.max_model_len / engine_options.block_size + 2);
  engine_options.num_threads = options.num_threads;
  engine_options.enable_prefix_caching = false;
  engine::Engine engine(runtime, engine_options, weights);
  Rng rng(options.seed, 1);
  std::vector<BenchRow> rows;
  for (const auto& [work, count] : {std::pair<std::string, std::int64_t>{"decode_many", options.num_sequences}, {"decode_one", 1}}) {
    BenchRow row{work, {}, 0};
    for (int repeat = 0; repeat <= options.num_repeats; ++repeat) {
      const double rate = time_decode(engine, count, options, rng);
      if (repeat) row.tokens_per_s.push_back(rate);
      log::info("bench {} repeat {}: {:.1f} tokens/s", work, repeat, rate);
    }
    if (count == 1) {
      const double bytes = static_cast<double>(options.model.num_active_parameters()) * static_cast<double>(size_of(options.dtype));
      row.share = median(row.tokens_per_s) * bytes / read_bytes_per_second;
    }
    rows.push_back(std::move(row));
  }
  engine.shutdown();
  return rows;
}

BenchRow bench_train(const BenchOptions& options, nn::Parameters& parameters, ops::OpSession& session, double flops) {
  ops::OpContext& ctx = session.context();
  parameters.ensure_grads();
  nn::TrainableModel model(ctx, parameters, {});
  constexpr std::int64_t kLength = 512;
  const auto total = static_cast<std::size_t>(options.train_tokens);
  std::vector<std::int32_t> ids(total), positions(total), targets(total), cu{0};
  std::vector<float> temperatures(total, 1.0f), dlogp(total, -1.0f / static_cast<float>(total));
  Rng rng(options.seed, 2);
  for (std::size_t i = 0; i < total; ++i) {
    ids[i] = static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(options.model.vocab_size)));
    positions[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % kLength);
  }
  for (std::size_t i = 0; i < total; ++i) targets[i] = i + 1 < total && positions[i + 1] != 0 ? ids[i + 1] : -1;
  for (std::int64_t at = kLength; at <= options.train_tokens; at += kLength) cu.push_back(static_cast<std::int32_t>(at));
  std::vector<Tensor> m, v;
  for (auto& p : parameters.named()) {
    m.push_back(Tensor::zeros(session.context().runtime, p.value.shape(), DType::kF32));
    v.push_back(Tensor::zeros(session.context().runtime, p.value.shape(), DType::kF32));
  }
  BenchRow row{"train", {}, 0};
  nn::WeightsPtr weights = nn::make_weights(ctx, parameters, options.dtype, PolicyVersion{0}, true, nullptr);
  for (int repeat = 0; repeat <= options.num_repeats; ++repeat) {
    const auto started = Clock::now();
    model.forward(weights, {ids, positions, cu}, targets, temperatures);
    const double forward_s = seconds_since(started);
    model.backward(dlogp);
    const double backward_s = seconds_since(started) - forward_s;
    double norm = 0;
    for (auto& p : parameters.named()) norm += ops::sum_squares(ctx, p.grad);
    ops::AdamWArgs args{.lr = 1e-5f, .grad_scale = norm > 1 ? static_cast<float>(1 / std::sqrt(norm)) : 1.0f, .step = repeat + 1};
    for (std::size_t i = 0; i < m.size(); ++i) ops::adamw(ctx, parameters.named()[i].value, m[i], v[i], parameters.named()[i].grad, args);
    parameters.zero_grads();
    weights = nn::make_weights(ctx, parameters, options.dtype, PolicyVersion{repeat + 1}, true, weights);
    const double total_s = seconds_since(started);
    if (repeat) row.tokens_per_s.push_back(static_cast<double>(options.train_tokens) / total_s);
    log::info("bench train repeat {}: {:.1f} tokens/s (forward {:.2f} s, backward {:.2f} s, step and repack {:.2f} s)", repeat,
              static_cast<double>(options.train_tokens) / total_s, forward_s, backward_s, total_s - forward_s - backward_s);
  }
  row.share = median(row.tokens_per_s) * options.model.flops_per_token(kLength) / flops;
  return row;
}

}  // namespace

nn::ModelConfig smollm2_135m_shape() {
  nn::ModelConfig config;
  config.model_type = "llama";
  config.architecture = "LlamaForCausalLM";
  config.vocab_size = 49152;
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_layers = 30;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.max_position = 8192;
  config.rope_theta = 100000.0;
  config.rms_norm_eps = 1e-5f;
  config.tie_word_embeddings = true;
  return config;
}

std::vector<BenchRow> run_bench(const BenchOptions& options) {
  const auto& runtime = options.runtime;
  std::vector<BenchRow> rows;
  ops::OpSession session(runtime, options.num_threads);
  const ops::MachinePeak peak = ops::measure_machine(session.context());
  nn::Parameters parameters(runtime, options.model);
  parameters.init_random(options.seed);
  if (options.decode) {
    auto weights = nn::make_weights(session.context(), parameters, options.dtype, PolicyVersion{0}, false, nullptr);
    rows = bench_decode(options, std::move(weights), runtime, peak.read_bytes_per_second);
  }
  if (options.train)
    rows.push_back(bench_train(options, parameters, session, options.dtype == DType::kBF16 ? peak.bf16_flops : peak.f32_flops));
  return rows;
}

std::string to_json(const BenchOptions& options, const std::vector<BenchRow>& rows) {
  boost::json::array list;
  for (const BenchRow& row : rows)
    list.push_back(boost::json::object{{"work", row.work},
                                       {"dtype", options.dtype == DType::kBF16 ? "bfloat16" : "float32"},
                                       {"tokens_per_s", boost::json::value_from(row.tokens_per_s)},
                                       {"share", row.share}});
  return boost::json::serialize(boost::json::object{{"device", to_string(options.runtime->device())},
                                                    {"cpu", cpu_features().name},
                                                    {"threads", options.num_threads > 0 ? options.num_threads : num_available_cores()},
                                                    {"rows", list}});
}

}  // namespace prl::launch
