#include "tools/bench_lora.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_from.hpp>
#include <vector>

#include "base/log.hpp"
#include "base/units.hpp"
#include "engine/adapter_set.hpp"
#include "nn/weights.hpp"
#include "ops/context.hpp"
#include "tools/bench_decode.hpp"

namespace prl::tools {
namespace {

using AdapterClock = std::chrono::steady_clock;

double middle(std::vector<double> values) {
  std::ranges::sort(values);
  return values.at(values.size() / 2);
}

/// The adapters and how long a trainer takes to make each of its masters.
struct MadeAdapters {
  std::vector<nn::AdapterPtr> adapters;
  std::vector<double> pack_ms;
};

MadeAdapters make_adapters(ops::OpSession& session, const BenchOptions& options, const nn::WeightsPtr& base, std::int64_t count,
                           const nn::AdapterConfig& config) {
  nn::Parameters trained(options.runtime, options.model, nn::make_adapter_table(options.model, config));
  MadeAdapters made;
  for (std::int64_t i = 0; i < count; ++i) {
    nn::init_adapter(trained, options.seed + static_cast<std::uint64_t>(i));
    options.runtime->synchronize();
    const auto began = AdapterClock::now();
    made.adapters.push_back(nn::adapt_weights(session.context(), trained, config, options.dtype, base, PolicyVersion{1})->adapter);
    options.runtime->synchronize();
    made.pack_ms.push_back(1e3 * seconds_since(began));
  }
  return made;
}

/// Of what an engine does between two steps when an adapter has new weights.
double swap_milliseconds(const std::vector<nn::AdapterPtr>& adapters) {
  engine::AdapterSet set(1);
  set.set("one", PolicyVersion{0}, {adapters.front(), nullptr});
  std::vector<double> times;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const auto began = AdapterClock::now();
    set.set("one", PolicyVersion{static_cast<std::int64_t>(i)}, {adapters[i], nullptr});
    set.apply_news();
    times.push_back(1e3 * seconds_since(began));
  }
  return middle(times);
}

boost::json::object floor_json(const LoraFloor& floor, double speed, double step_s) {
  boost::json::object out{{"adapters_mb", floor.adapter_bytes / 1e6},
                          {"base_mb", floor.base_bytes / 1e6},
                          {"cost_by_bytes", floor.by_bytes},
                          {"cost_by_flops", floor.by_flops}};
  // Adapters are read once at that speed, and the rest is as without them.
  if (speed > 0) out["cost_at_read_speed"] = 1 + floor.adapter_bytes / speed / step_s;
  return out;
}

/// Of the ranks and targets that users take, logged beside what was measured.
boost::json::array floors_of(const nn::ModelConfig& model, const DecodeStep& step, double speed, double step_s) {
  boost::json::array all;
  for (const LoraTargets targets : {LoraTargets::kAll, LoraTargets::kAttention})
    for (const std::int64_t rank : {4, 8, 16}) {
      const LoraFloor floor = lora_floor(model, adapter_of(targets, rank), step);
      boost::json::object one = floor_json(floor, speed, step_s);
      one["rank"] = rank;
      one["targets"] = targets == LoraTargets::kAll ? "all" : "attention";
      log::info("bench lora floor, rank {:>2}, {}: {:.2f} times by bytes, {:.2f} by operations{}", rank,
                targets == LoraTargets::kAll ? "attention and MLP" : "attention", floor.by_bytes, floor.by_flops,
                speed > 0 ? fmt::format(", {:.2f} at the speed of memory", 1 + floor.adapter_bytes / speed / step_s) : "");
      all.push_back(std::move(one));
    }
  return all;
}

}  // namespace

std::string bench_lora(BenchOptions options, std::int64_t num_adapters, std::int64_t rank, LoraTargets targets) {
  ops::OpSession session(options.runtime, options.num_threads);
  nn::WeightsPtr base;
  {
    nn::Parameters parameters(options.runtime, options.model);
    parameters.init_random(options.seed);
    base = nn::make_weights(session.context(), parameters, options.dtype, PolicyVersion{1}, false, nullptr);
  }
  const MadeAdapters made = make_adapters(session, options, base, num_adapters, adapter_of(targets, rank));
  for (std::int64_t i = 0; i < num_adapters; ++i) options.adapters.push_back(fmt::format("adapter-{}", i));
  BenchOptions plain = options;
  const auto engine = make_engine(options, base);
  plain.adapters.clear();
  for (std::size_t i = 0; i < made.adapters.size(); ++i)
    engine->adapters().set(options.adapters[i], PolicyVersion{1}, {made.adapters[i], nullptr});
  Rng rng(options.seed, 1);
  std::vector<double> without, with, costs;
  for (int i = 0; i <= options.num_repeats; ++i) {
    const double rate = time_decode(*engine, options.num_sequences, plain, rng);
    const double adapted = time_decode(*engine, options.num_sequences, options, rng);
    log::info("bench lora repeat {}: {:.1f} tokens/s without adapters, {:.1f} with, {:.3f} times the time", i, rate, adapted,
              rate / adapted);
    if (i == 0) continue;  // to warm up
    without.push_back(rate);
    with.push_back(adapted);
    costs.push_back(rate / adapted);
  }
  engine->shutdown();
  const DecodeStep step{.num_rows = options.num_sequences,
                        .num_adapters = num_adapters,
                        .context = options.prompt_tokens + options.completion_tokens / 2,
                        .dtype = options.dtype};
  const LoraFloor floor = lora_floor(options.model, adapter_of(targets, rank), step);
  // Not on a GPU: its memory is not read by these threads.
  const double speed = options.runtime->device().kind == DeviceKind::kCpu ? measured_read_speed(*session.context().pool) : 0;
  const double step_s = static_cast<double>(options.num_sequences) / middle(without);
  if (speed > 0)
    log::info("bench lora: memory is read at {:.1f} GB/s: {:.0f} MB of adapters in {:.1f} ms, beside a step of {:.1f} ms without",
              speed / 1e9, floor.adapter_bytes / 1e6, 1e3 * floor.adapter_bytes / speed, 1e3 * step_s);
  return boost::json::serialize(boost::json::object{{"num_sequences", options.num_sequences},
                                                    {"num_adapters", num_adapters},
                                                    {"rank", rank},
                                                    {"tokens_per_s_without", boost::json::value_from(without)},
                                                    {"tokens_per_s_with", boost::json::value_from(with)},
                                                    {"cost", middle(costs)},
                                                    {"floor", floor_json(floor, speed, step_s)},
                                                    {"floors", floors_of(options.model, step, speed, step_s)},
                                                    {"pack_ms", middle(made.pack_ms)},
                                                    {"swap_ms", swap_milliseconds(made.adapters)},
                                                    {"adapter_mb", static_cast<double>(made.adapters.front()->num_bytes()) / 1e6}});
}

}  // namespace prl::tools
