#include "tools/bench.hpp"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_from.hpp>
#include <chrono>
#include <cmath>
#include <optional>

#include "base/log.hpp"
#include "base/rng.hpp"
#include "base/units.hpp"
#include "engine/engine.hpp"
#include "launch/engine_host.hpp"
#include "launch/memory_plan.hpp"
#include "monitor/sinks.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"
#include "ops/measure.hpp"
#include "rollouts/sample_queue.hpp"
#include "tools/bench_decode.hpp"
#include "tools/bench_lora.hpp"
#include "trainer/metrics.hpp"
#include "trainer/rl_trainer.hpp"
#include "wire/training.hpp"

namespace prl::tools {
namespace {
using Clock = std::chrono::steady_clock;

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

/// Prompt tokens per second until every sequence has its first token.
double time_prefill(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng) {
  BenchOptions one = options;
  one.completion_tokens = 1;
  const auto started = Clock::now();
  generate(engine, num_sequences, one, rng, [](const engine::StepEvent&) {});
  return static_cast<double>(num_sequences * options.prompt_tokens) / seconds_since(started);
}

/// Mean number of bytes that a decode step reads: every weight once, and the keys and values of all sequences.
double decode_step_bytes(const BenchOptions& options, std::int64_t num_sequences) {
  const auto size = static_cast<double>(size_of(options.dtype));
  const nn::ModelConfig& c = options.model;
  const double context = static_cast<double>(options.prompt_tokens) + 0.5 * static_cast<double>(options.completion_tokens);
  const auto kv = static_cast<double>(2 * c.num_softmax_layers() * c.num_kv_heads * c.head_dim);
  return size * (static_cast<double>(c.num_active_parameters()) + static_cast<double>(num_sequences) * context * kv);
}

/// What memory gives a reader. A CPU's neighbours change that from second to second, so there it is measured each time, with memory that
/// no row counts; the engine must be idle.
class Bandwidth {
 public:
  Bandwidth(const BenchOptions& options, double measured) : measured_(measured) {
    if (options.runtime->device().kind == DeviceKind::kCpu) session_.emplace(make_cpu_runtime(), options.num_threads);
  }
  double bytes_per_second() { return session_ ? ops::measure_read(session_->context()) : measured_; }

 private:
  double measured_;
  std::optional<ops::OpSession> session_;
};

std::string in_milliseconds(const std::vector<std::pair<std::string, double>>& parts) {
  std::string text;
  for (const auto& [name, seconds] : parts)
    text += fmt::format("{}{} {:.{}f} ms", text.empty() ? "" : ", ", name, 1e3 * seconds, seconds < 0.01 ? 3 : 1);
  return text;
}

/// Means over steps.
std::vector<std::pair<std::string, double>> parts_of(const engine::StepTimes::Parts& sums, bool has_wait) {
  const auto n = static_cast<double>(std::max<std::int64_t>(1, sums.num_steps));
  std::vector<std::pair<std::string, double>> parts = {{"layers", sums.layers_s / n}, {"head", sums.head_s / n}, {"draw", sums.draw_s / n}};
  if (has_wait) parts.emplace_back("wait", sums.wait_s / n);
  return parts;
}

std::vector<BenchRow> bench_engine(const BenchOptions& options, nn::WeightsPtr weights, Bandwidth& bandwidth,
                                   nn::WeightsPtr drafts = nullptr) {
  const auto times = std::make_shared<engine::StepTimes>();
  const auto engine = make_engine(options, std::move(weights), times, std::move(drafts));
  Rng rng(options.seed, 1);
  std::vector<BenchRow> rows;
  const auto repeat = [&](std::string work, std::int64_t count, bool is_decode, auto&& measure) {
    BenchRow row;
    row.work = std::move(work);
    for (int i = 0; i <= options.num_repeats; ++i) {
      const engine::EngineStats before = engine->stats();
      const double rate = measure(*engine, count);
      const engine::EngineStats after = engine->stats();
      const auto per_token = [&](std::int64_t num) {
        return static_cast<double>(num) /
               static_cast<double>(std::max<std::int64_t>(1, after.num_generation_tokens - before.num_generation_tokens));
      };
      row.drafted = per_token(after.num_draft_tokens - before.num_draft_tokens);
      row.accepted = per_token(after.num_accepted_tokens - before.num_accepted_tokens);
      if (row.drafted > 0)
        log::info("bench {}: of {:.2f} draft tokens for each token {:.2f} came true", row.work, row.drafted, row.accepted);
      if (i > 0) row.tokens_per_s.push_back(rate);
      log::info("bench {} repeat {}: {:.1f} tokens/s", row.work, i, rate);
    }
    // Once more, for timing costs a little time itself. Before its first step an engine has nothing to do, and prompts may be one step.
    times->start();
    (void)measure(*engine, count);
    const engine::StepTimes::Kinds sums = times->take();
    row.seconds = is_decode ? parts_of(sums.decode, true) : parts_of(sums.prompt, false);
    log::info("bench {}: a step's {}", row.work, in_milliseconds(row.seconds));
    row.peak_bytes = options.runtime->peak_bytes();
    rows.push_back(std::move(row));
  };
  if (options.decode) {
    for (const auto& [work, count] : {std::pair<std::string, std::int64_t>{"decode_many", options.num_sequences}, {"decode_one", 1}}) {
      std::vector<double> shares;
      repeat(work, count, true, [&](engine::Engine& e, std::int64_t n) {
        const double read = bandwidth.bytes_per_second();
        Rng same(options.seed, 1);
        const bool is_again = options.draft_tokens > 0 && options.draft_layers == 0 && !options.has_fresh_texts;
        const double rate = time_decode(e, n, options, is_again ? same : rng);
        shares.push_back(rate / static_cast<double>(n) * decode_step_bytes(options, n) / read);
        log::info("bench {}: {:.0f}% of the {:.1f} GB/s that memory gave just before", work, 100 * shares.back(), read / 1e9);
        return rate;
      });
      shares.erase(shares.begin());  // to warm up
      shares.pop_back();             // while steps were timed
      rows.back().share = median(shares);
    }
  }
  if (options.prefill)
    repeat("prefill", options.num_sequences, false, [&](engine::Engine& e, std::int64_t n) { return time_prefill(e, n, options, rng); });
  engine->shutdown();
  return rows;
}

/// The same on devices that share the layers, and how many times as fast they are.
void add_shared_layers(std::vector<BenchRow>& rows, const BenchOptions& options, const Tensor& values, Bandwidth& bandwidth) {
  std::vector<std::shared_ptr<DeviceRuntime>> devices = launch::devices_beside(options.runtime, options.num_devices);
  std::vector<std::unique_ptr<ops::OpSession>> sessions;
  std::vector<ops::OpContext*> contexts;
  for (const auto& device : devices) {
    sessions.push_back(std::make_unique<ops::OpSession>(device, options.num_threads));
    contexts.push_back(&sessions.back()->context());
  }
  std::vector<BenchRow> shared =
      bench_engine(options, nn::load_shared_weights(contexts, options.model, values, PolicyVersion{0}, nullptr), bandwidth);
  for (std::size_t i = 0; i < shared.size(); ++i) {
    log::info("bench {}: {:.2f} times as fast on {} devices as on one", shared[i].work,
              median(shared[i].tokens_per_s) / median(rows[i].tokens_per_s), options.num_devices);
    shared[i].work += fmt::format("_tp{}", options.num_devices);
  }
  rows.insert(rows.end(), std::make_move_iterator(shared.begin()), std::make_move_iterator(shared.end()));
}

/// The same batch of random sequences, packed into one row, for every step.
class RandomSamples final : public rollouts::SampleReceiver {
 public:
  explicit RandomSamples(const BenchOptions& options) {
    const std::int64_t length = std::min(options.sequence_tokens, options.train_tokens);
    const auto total = static_cast<std::size_t>(options.train_tokens);
    Rng rng(options.seed, 2);
    for (std::int64_t i = 0; i < options.train_tokens; ++i) {
      row_.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(options.model.vocab_size))));
      row_.position_ids.push_back(static_cast<std::int32_t>(i % length));
      row_.loss_mask.push_back(i % length > 0);
      if (i % length == 0) {
        row_.sequence_lengths.push_back(0);
        row_.env_names.emplace_back("bench");
      }
      ++row_.sequence_lengths.back();
    }
    row_.advantages.assign(total, 1.0f);
    row_.inference_logprobs.assign(total, -std::log(static_cast<float>(options.model.vocab_size)));
    row_.temperatures.assign(total, 1.0f);
  }
  std::optional<rollouts::RankBatch> pop(std::chrono::milliseconds) override { return rollouts::RankBatch{++step_, {row_}}; }
  bool is_closed() const override { return false; }
  std::string describe() const override { return "random samples"; }

 private:
  wire::MicroBatch row_;
  std::int64_t step_ = 0;
};

/// The trainer's own run over random samples; the first step warms up.
BenchRow bench_train(const BenchOptions& options, double flops) {
  trainer::PolicyOptions policy_options;
  policy_options.shape = options.model;
  policy_options.compute = options.dtype;
  policy_options.num_threads = options.num_threads;
  policy_options.checkpointing = {options.checkpoint_every};
  policy_options.random_init = true;
  if (options.train_lora_rank > 0) policy_options.lora = adapter_of(LoraTargets::kAll, options.train_lora_rank);
  policy_options.seed = options.seed;
  trainer::RlRunOptions run;
  run.step.max_steps = options.num_repeats + 1;
  run.seq_len = options.train_tokens;
  run.peak_flops = flops;
  const launch::PlannedPolicy planned = launch::make_policy(options.runtime, policy_options, run.step, options.train_tokens);
  BenchRow row;
  row.work = "train";
  monitor::Monitor monitor(trainer::trainer_metrics());
  monitor.add_sink(monitor::make_callback_sink([&](std::int64_t step, const monitor::Metrics& metrics) {
    row.seconds = {{"forward_backward", metrics.at("time/forward_backward")}, {"optimizer", metrics.at("time/optimizer")}};
    const double rate = static_cast<double>(options.train_tokens) / metrics.at("time/step");
    if (step > 1) row.tokens_per_s.push_back(rate);
    log::info("bench train repeat {}: {:.1f} tokens/s ({})", step - 1, rate, in_milliseconds(row.seconds));
  }));
  const trainer::ReceiverFactory samples = [&](std::int64_t) { return std::make_unique<RandomSamples>(options); };
  trainer::run_rl_trainer(run, *planned.policy, samples, nullptr, monitor, {});
  if (options.train_lora_rank == 0)  // an adapter has no gradients of weights, so that its products are not the model's
    row.share = median(row.tokens_per_s) * options.model.flops_per_token(std::min(options.sequence_tokens, options.train_tokens)) / flops;
  row.peak_bytes = options.runtime->peak_bytes();
  return row;
}

/// How long an engine in the same process takes to hold and prove weights that a trainer has just made; updates per second.
BenchRow bench_sync(const BenchOptions& options, nn::Parameters& parameters, ops::OpSession& session) {
  ops::OpContext& ctx = session.context();
  nn::WeightsPtr weights = nn::make_weights(ctx, parameters, options.dtype, PolicyVersion{0}, false, nullptr);
  // As in a colocated run: the engine's work has a stream of its own.
  const auto runtime =
      options.runtime->device().kind == DeviceKind::kCuda ? make_cuda_runtime(options.runtime->device().index) : options.runtime;
  BenchOptions own = options;
  own.runtime = runtime;
  const auto engine = make_engine(own, weights);
  BenchRow row;
  row.work = "sync";
  for (int repeat = 0; repeat <= options.num_repeats; ++repeat) {
    const auto started = Clock::now();
    weights = nn::make_weights(ctx, parameters, options.dtype, PolicyVersion{repeat + 1}, false, weights);
    ctx.runtime->synchronize();
    const double pack_s = seconds_since(started);
    (void)engine->update_weights(weights, std::chrono::minutes(1));
    const double total_s = seconds_since(started);
    if (repeat > 0) row.tokens_per_s.push_back(1 / total_s);
    row.seconds = {{"pack", pack_s}, {"flip_and_prove", total_s - pack_s}};
    log::info("bench sync repeat {}: {:.2f} ms (pack {:.2f} ms, flip and prove {:.2f} ms)", repeat, 1e3 * total_s, 1e3 * pack_s,
              1e3 * (total_s - pack_s));
  }
  engine->shutdown();
  row.peak_bytes = runtime->peak_bytes() + (runtime == options.runtime ? 0 : options.runtime->peak_bytes());
  return row;
}

nn::ModelConfig llama_shape(std::int64_t vocab, std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                            std::int64_t kv_heads, std::int64_t head_dim) {
  nn::ModelConfig config;
  config.model_type = "llama";
  config.architecture = "LlamaForCausalLM";
  config.vocab_size = vocab;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.num_layers = layers;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.max_position = 8192;
  config.rope_theta = 100000.0;
  config.rms_norm_eps = 1e-5f;
  config.tie_word_embeddings = true;
  return config;
}
nn::ModelConfig qwen3_shape(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads, bool is_tied) {
  nn::ModelConfig config = llama_shape(151936, hidden, intermediate, layers, heads, 8, 128);
  config.model_type = "qwen3";
  config.architecture = "Qwen3ForCausalLM";
  config.qk_norm = true;
  config.max_position = 40960;
  config.rope_theta = 1e6;
  config.rms_norm_eps = 1e-6f;
  config.tie_word_embeddings = is_tied;
  return config;
}

nn::ModelConfig qwen3_moe_shape(std::int64_t hidden, std::int64_t expert_size, std::int64_t layers, std::int64_t heads,
                                std::int64_t kv_heads) {
  nn::ModelConfig config = qwen3_shape(hidden, 3 * hidden, layers, heads, false);
  config.model_type = "qwen3_moe";
  config.architecture = "Qwen3MoeForCausalLM";
  config.num_kv_heads = kv_heads;
  config.num_experts = 128;
  config.num_active_experts = 8;
  config.expert_size = expert_size;
  config.norm_topk_prob = true;
  return config;
}

nn::ModelConfig qwen35_shape(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads, std::int64_t kv_heads,
                             std::int64_t value_heads) {
  nn::ModelConfig config = llama_shape(248320, hidden, intermediate, layers, heads, kv_heads, 256);
  config.model_type = "qwen3_5_text";
  config.architecture = "Qwen3_5ForCausalLM";
  config.qk_norm = config.gates_heads = config.norms_add_one = true;
  config.partial_rotary_factor = 0.25;
  config.max_position = 262144;
  config.rope_theta = 1e7;
  config.rms_norm_eps = 1e-6f;
  config.linear = {.layers = {}, .num_key_heads = 16, .num_value_heads = value_heads, .key_dim = 128, .value_dim = 128, .num_taps = 4};
  for (std::int64_t layer = 0; layer < layers; ++layer)
    if ((layer + 1) % 4 != 0) config.linear.layers.push_back(layer);
  return config;
}

/// GLM-4.7-Flash: latent attention, and 64 experts of which 4 are active beside a shared one.
nn::ModelConfig glm47_flash_shape() {
  nn::InitModelOptions o;
  o.family = "glm4_moe_lite";
  o.vocab_size = 154880;
  o.hidden_size = 2048;
  o.intermediate_size = 10240;
  o.num_layers = 47;
  o.num_heads = o.num_kv_heads = 20;
  o.head_dim = 256;
  o.num_experts = 64;
  o.num_active_experts = 4;
  o.expert_size = 1536;
  o.max_position = 202752;
  o.rope_theta = 1e6;
  o.rms_norm_eps = 1e-5;
  o.tie_word_embeddings = false;
  nn::ModelConfig config = nn::make_model_config(o);
  config.latent = nn::LatentAttention{.query_rank = 768, .kv_rank = 512, .plain_dim = 192, .rotary_dim = 64, .value_dim = 256};
  config.score_scale = 1.0 / 16;
  return config;
}

struct NamedShape {
  std::string_view name;
  nn::ModelConfig (*make)();
};
constexpr NamedShape kShapes[] = {
    {"smollm2-135m", [] { return llama_shape(49152, 576, 1536, 30, 9, 3, 64); }},
    {"qwen3-0.6b", [] { return qwen3_shape(1024, 3072, 28, 16, true); }},
    {"qwen3-1.7b", [] { return qwen3_shape(2048, 6144, 28, 16, true); }},
    {"qwen3-4b", [] { return qwen3_shape(2560, 9728, 36, 32, true); }},
    {"qwen3-8b", [] { return qwen3_shape(4096, 12288, 36, 32, false); }},
    {"qwen3-14b", [] { return qwen3_shape(5120, 17408, 40, 40, false); }},
    {"qwen3-32b", [] { return qwen3_shape(5120, 25600, 64, 64, false); }},
    {"qwen3.5-0.8b", [] { return qwen35_shape(1024, 3584, 24, 8, 2, 16); }},
    {"qwen3.5-4b", [] { return qwen35_shape(2560, 9216, 32, 16, 4, 32); }},
    {"qwen3-30b-a3b", [] { return qwen3_moe_shape(2048, 768, 48, 32, 4); }},
    {"glm-4.7-flash", glm47_flash_shape},
};

}  // namespace

bool is_named_shape(std::string_view name) noexcept {
  return std::ranges::any_of(kShapes, [&](const NamedShape& shape) { return shape.name == name; });
}

nn::ModelConfig named_shape(std::string_view name) {
  std::string names;
  for (const NamedShape& shape : kShapes) {
    if (shape.name == name) return shape.make();
    names += fmt::format("{}{}", names.empty() ? "" : ", ", shape.name);
  }
  fail(ErrorCode::kInvalidArgument, "there is no shape \"{}\"; there are {}", name, names);
}

std::vector<BenchRow> run_bench(const BenchOptions& options) {
  std::vector<BenchRow> rows;
  ops::OpSession session(options.runtime, options.num_threads);
  const ops::MachinePeak peak = ops::measure_machine(session.context());
  log::info("bench: peak {:.1f} TFLOP/s in bfloat16, {:.1f} in float32, {:.1f} GB/s read", peak.bf16_flops / 1e12, peak.f32_flops / 1e12,
            peak.read_bytes_per_second / 1e9);
  if (options.decode || options.prefill || options.sync) {
    nn::Parameters parameters(options.runtime, options.model);
    parameters.init_random(options.seed);
    if (options.decode || options.prefill) {
      Bandwidth bandwidth(options, peak.read_bytes_per_second);
      nn::WeightsPtr drafts = make_draft_model(options, session.context(), parameters);
      rows = bench_engine(options, nn::make_weights(session.context(), parameters, options.dtype, PolicyVersion{0}, false, nullptr),
                          bandwidth, std::move(drafts));
      if (options.num_devices > 1)
        add_shared_layers(rows, options, nn::flat_values(session.context(), parameters, options.dtype), bandwidth);
    }
    if (options.sync) rows.push_back(bench_sync(options, parameters, session));
  }
  if (options.train) rows.push_back(bench_train(options, options.dtype == DType::kBF16 ? peak.bf16_flops : peak.f32_flops));
  return rows;
}

std::string to_json(const BenchOptions& options, const std::vector<BenchRow>& rows) {
  boost::json::array list;
  for (const BenchRow& row : rows) {
    boost::json::object seconds;
    for (const auto& [name, value] : row.seconds) seconds[name] = value;
    list.push_back(boost::json::object{{"work", row.work},
                                       {"dtype", options.dtype == DType::kBF16 ? "bfloat16" : "float32"},
                                       {"tokens_per_s", boost::json::value_from(row.tokens_per_s)},
                                       {"share", row.share},
                                       {"drafted", row.drafted},
                                       {"accepted", row.accepted},
                                       {"seconds", std::move(seconds)},
                                       {"peak_bytes", row.peak_bytes}});
  }
  return boost::json::serialize(boost::json::object{{"device", to_string(options.runtime->device())},
                                                    {"cpu", cpu_features().name},
                                                    {"threads", options.num_threads > 0 ? options.num_threads : num_available_cores()},
                                                    {"sizes", boost::json::object{{"sequences", options.num_sequences},
                                                                                  {"prompt_tokens", options.prompt_tokens},
                                                                                  {"completion_tokens", options.completion_tokens},
                                                                                  {"train_tokens", options.train_tokens},
                                                                                  {"sequence_tokens", options.sequence_tokens}}},
                                                    {"rows", list}});
}

}  // namespace prl::tools
