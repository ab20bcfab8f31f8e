#include "launch/cost_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "base/error.hpp"
#include "base/units.hpp"
#include "engine/memory.hpp"
#include "nn/parameters.hpp"
#include "trainer/memory.hpp"
#include "trainer/shard_plan.hpp"

namespace prl::launch {
namespace {

// The efficiencies are what an H200 reached (docs/benchmarks.md): training 50% to 57% of 989 TFLOP/s, decoding 51% to 55% of 4.8 TB/s.
const std::array kCards{Card{"a100", 312e12, 80e9, 2.0e12, 300e9, 25e9, 25e9}, Card{"h100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 50e9},
                        Card{"h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 50e9}, Card{"b200", 2250e12, 180e9, 8.0e12, 900e9, 50e9, 50e9},
                        Card{"l40s", 362e12, 48e9, 0.864e12, 25e9, 12.5e9, 25e9}};

std::size_t weight_bytes(const StepLoad& load) {
  return static_cast<std::size_t>(load.model.num_parameters()) * size_of(load.policy.compute);
}

/// Forward and backward of one row, as training_flops() counts them, where every token is a target.
double row_flops(const StepLoad& load) {
  const auto tokens = static_cast<double>(load.seq_len);
  const double attention =
      12.0 * static_cast<double>(load.model.num_layers) * load.model.attended_width() * static_cast<double>(load.sequence_tokens);
  return tokens * (6.0 * static_cast<double>(load.model.num_active_parameters()) + attention);
}

/// How much more is computed where layers are computed twice: their forward pass, a third of their part, comes again.
double recompute_factor(const StepLoad& load) {
  const int freq = load.policy.checkpointing.freq;
  if (freq <= 0) return 1;
  const auto body = static_cast<double>(load.model.num_active_parameters() - load.model.vocab_size * load.model.hidden_size);
  return 1 + body / static_cast<double>(load.model.num_active_parameters()) / (3.0 * freq);
}

/// Of what each of `num_ranks` ranks sends to the others in equal parts; those of its machine are reached at the same time as the rest.
double transfer_seconds(const StepLoad& load, const Card& card, double bytes, int num_ranks) {
  if (num_ranks <= 1) return 0;
  const int near = std::min(num_ranks, load.devices_per_node) - 1, far = num_ranks - 1 - near;
  const double each = bytes / (num_ranks - 1);
  return std::max(each * near / card.link_bytes_per_s, each * far / card.node_bytes_per_s);
}

/// What ranks have of an array of gradients, on one machine each or on several.
class SectionTraffic {
 public:
  SectionTraffic(const StepLoad& load, const Card& card, const trainer::ShardPlan& plan) : load_(load), card_(card), plan_(plan) {}

  /// Of one exchange where `num_active` ranks have a leaf: all of them send to each owner at once, and the rank with most to send or to
  /// take in on one of its links is waited for.
  double seconds(const nn::ElementRange& section, int num_active) const {
    const int ranks = load_.step.num_ranks, per_node = load_.devices_per_node;
    std::vector<double> owned(static_cast<std::size_t>(ranks)), of_node(static_cast<std::size_t>((ranks + per_node - 1) / per_node));
    double all = 0;
    for (int r = 0; r < ranks; ++r) {
      owned[static_cast<std::size_t>(r)] = sizeof(float) * static_cast<double>(plan_.part(r % plan_.num_ranks(), section).count());
      of_node[static_cast<std::size_t>(r / per_node)] += owned[static_cast<std::size_t>(r)];
      all += owned[static_cast<std::size_t>(r)];
    }
    double longest = 0;
    for (int r = 0; r < ranks; ++r) {
      const double mine = owned[static_cast<std::size_t>(r)], node = of_node[static_cast<std::size_t>(r / per_node)];
      const int first = r / per_node * per_node;
      const bool sends = r < num_active;
      const int near = std::clamp(num_active - first, 0, std::min(per_node, ranks - first)) - (sends ? 1 : 0);
      const double near_bytes = std::max(sends ? node - mine : 0, mine * near);
      const double far_bytes = std::max(sends ? all - node : 0, mine * (num_active - near - (sends ? 1 : 0)));
      longest = std::max({longest, near_bytes / card_.link_bytes_per_s, far_bytes / card_.node_bytes_per_s});
    }
    return longest;
  }

 private:
  const StepLoad& load_;
  const Card& card_;
  const trainer::ShardPlan& plan_;
};

trainer::ShardPlan plan_of(const StepLoad& load, const nn::TensorTable& table) {
  trainer::MasterShare share = load.policy.share;
  share.keeps_blocks = trainer::keeps_whole_blocks(load.step.optim);
  return trainer::shard_plan(table, load.step.num_ranks / load.step.num_replicas, share);
}

/// Seconds of a row on a rank, the head's and each layer's; forward takes a third of what is computed once.
struct PassSeconds {
  double layer_forward = 0, layer_backward = 0, head_backward = 0;
};
PassSeconds pass_seconds(const StepLoad& load, const Card& card) {
  const double once = row_flops(load) / (card.flops * card.compute_efficiency), all = once * recompute_factor(load);
  const auto active = static_cast<double>(load.model.num_active_parameters());
  const double head = static_cast<double>(load.model.vocab_size * load.model.hidden_size) / active;
  const auto layers = static_cast<double>(std::max<std::int64_t>(load.model.num_layers, 1));
  PassSeconds seconds;
  seconds.head_backward = once * 2 / 3 * head;
  seconds.layer_forward = once / 3 * (1 - head) / layers;
  seconds.layer_backward = (all - once / 3 - seconds.head_backward) / layers;
  return seconds;
}

/// A section's exchange begins when the backward pass has completed it and the one before has arrived, and is waited for when the pass has
/// completed the next; of a section larger than a bucket the rest follows then (trainer::GradientExchange).
class ExchangeTimeline {
 public:
  void add(double backward, double exchange, double part_beside) {
    now_ += backward;
    computed_ += backward;
    join();
    arrives_ = now_ + part_beside * exchange;
    rest_ = (1 - part_beside) * exchange;
  }
  /// What the pass has waited for, all of it done.
  double waited() {
    join();
    return now_ - computed_;
  }

 private:
  void join() {
    now_ = std::max(now_, arrives_) + rest_;
    rest_ = 0;
  }
  double now_ = 0, computed_ = 0, arrives_ = 0, rest_ = 0;
};

void add_exchange(StepCost& cost, const StepLoad& load, const Card& card, const nn::TensorTable& table) {
  const int ranks = load.step.num_ranks;
  const double all = sizeof(float) * static_cast<double>(table.num_trainable());
  const double memory = card.memory_bytes_per_s * card.bandwidth_efficiency;
  const auto rows = static_cast<double>(load.num_rows);
  if (load.step.reduce == trainer::Reduce::kFast) {
    if (ranks > 1) {
      cost.exchange_bytes = all * (ranks - 1) / ranks;
      cost.exchange = transfer_seconds(load, card, cost.exchange_bytes, ranks) + load.latency_s;
    }
    return;
  }
  // Sum of leaves: of each row the owner reads its part, reads the sum and writes it. One rank adds the rest of a row where the sum is.
  if (ranks == 1) {
    double summed = 0;
    for (const nn::ElementRange& range : nn::stepwise_ranges(table)) summed += sizeof(float) * static_cast<double>(range.count());
    const bool splits_tied = trainer::splits_tied_grads(load.step.cut.num_leaves, load.step.reduce) && table.has_tied_head();
    if (rows > 1) cost.exchange = 3 * (splits_tied ? all : summed) * rows / memory;
    return;
  }
  const std::vector<nn::GradSection> sections = nn::grad_sections(table, false, load.policy.share.divides_experts);
  double exchanged = 0;  // of all, without experts that ranks divide, whose owners form what they add
  for (const nn::GradSection& section : sections) exchanged += sizeof(float) * static_cast<double>(section.range.count());
  cost.exchange = 3 * exchanged / ranks * rows / memory;
  cost.exchange_bytes = exchanged * (ranks - 1) / ranks * static_cast<double>(cost.num_rounds);
  const trainer::ShardPlan plan = plan_of(load, table);
  const SectionTraffic traffic(load, card, plan);
  const auto bucket = static_cast<double>(trainer::exchange_bucket(
      sections, plan,
      {.reduce = load.step.reduce, .overlaps = load.step.overlaps_exchange, .divides_experts = load.policy.share.divides_experts}));
  const PassSeconds pass = pass_seconds(load, card);
  const auto add_rounds = [&](std::int64_t num_rounds, int num_active) {
    if (num_rounds == 0) return;
    ExchangeTimeline timeline;
    double travels = 0;
    for (const nn::GradSection& section : sections) {
      const double seconds = traffic.seconds(section.range, num_active) + load.latency_s;
      std::int64_t longest = 1;
      for (int r = 0; r < plan.num_ranks(); ++r) longest = std::max(longest, plan.part(r, section.range).count());
      const double beside = load.step.overlaps_exchange ? std::min(1.0, bucket / static_cast<double>(longest)) : 0;
      const double backward = section.layer >= 0 ? pass.layer_backward : section.layer == nn::GradSection::kHead ? pass.head_backward : 0;
      timeline.add(backward, seconds, beside);
      travels += seconds;
    }
    const double waited = timeline.waited();
    cost.exchange += static_cast<double>(num_rounds) * waited;
    cost.hidden_exchange += static_cast<double>(num_rounds) * std::max(travels - waited, 0.0);
  };
  const std::int64_t num_full = load.num_rows / ranks;
  add_rounds(num_full, ranks);
  add_rounds(cost.num_rounds - num_full, static_cast<int>(load.num_rows % ranks));
}

/// Tokens that travel to the ranks of their experts: the rows of x, forward and backward and where layers are computed again, and of the
/// gradient of the output; back come the outputs and the gradient of x. Taken as waited for, which is what two GPUs showed for long rows,
/// though rows travel beside products.
void add_travel(StepCost& cost, const StepLoad& load, const Card& card) {
  if (!load.policy.share.divides_experts) return;
  const nn::ModelConfig& m = load.model;
  const int ranks = load.step.num_ranks;
  const double trips = 5 + (load.policy.checkpointing.freq > 0 ? 1.0 / static_cast<double>(load.policy.checkpointing.freq) : 0);
  const auto layers = static_cast<double>(m.num_layers - static_cast<std::int64_t>(m.dense_layers.size()));
  const double bytes = static_cast<double>(load.seq_len * m.num_active_experts * m.hidden_size) *
                       static_cast<double>(size_of(load.policy.compute)) * (ranks - 1) / ranks;
  const double times = trips * layers * static_cast<double>(cost.num_rounds);
  cost.exchange += times * (transfer_seconds(load, card, bytes, ranks) + load.latency_s);
  cost.exchange_bytes += times * bytes;
}

/// Layers' weights of the other ranks, forward and backward, each beside the layer that is computed before it.
void add_layers(StepCost& cost, const StepLoad& load, const Card& card, double layer_elements, int shards) {
  const double bytes = layer_elements / shards * static_cast<double>(size_of(load.policy.compute)) * (shards - 1);
  const double seconds = transfer_seconds(load, card, bytes, shards) + load.latency_s;
  const PassSeconds pass = pass_seconds(load, card);
  const auto layers = static_cast<double>(load.model.num_layers), rounds = static_cast<double>(cost.num_rounds);
  // The two that a pass ends with are there when it turns; one that begins with fresh weights waits for its first.
  const double times = rounds * std::max(2 * layers - 4, 0.0) + 2;
  const double waited = seconds + rounds * std::max(layers - 2, 0.0) *
                                      (std::max(seconds - pass.layer_forward, 0.0) + std::max(seconds - pass.layer_backward, 0.0));
  cost.gather_bytes += times * bytes;
  cost.gather += waited;
  cost.hidden_gather += std::max(times * seconds - waited, 0.0);
}

/// Whole weights, section by section in the order of a forward pass, which waits for what lies outside of layers when it begins and for a
/// layer when it enters the one before (trainer::WeightGather). Who publishes a step's weights waits for all of them first.
void add_whole(StepCost& cost, const StepLoad& load, const Card& card, const nn::TensorTable& table, int shards) {
  const auto size = static_cast<double>(size_of(load.policy.compute));
  const trainer::ShardPlan plan(table, shards, trainer::keeps_whole_blocks(load.step.optim));
  std::vector<double> arrivals;  // of each section
  for (const trainer::ShardPlan::Section& section : plan.sections()) {
    const double bytes = static_cast<double>(section.range.count()) / shards * size * (shards - 1);
    const double seconds = transfer_seconds(load, card, bytes, shards) + load.latency_s;
    arrivals.push_back((arrivals.empty() ? 0 : arrivals.back()) + seconds);
    cost.gather_bytes += bytes;
  }
  const bool is_beside = load.step.overlaps_exchange && !load.policy.lora && !load.sampling && arrivals.size() > 1;
  double now = is_beside ? arrivals.front() : arrivals.back(), computed = 0;
  if (is_beside) {
    const PassSeconds pass = pass_seconds(load, card);
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(load.model.num_layers); ++layer) {
      const std::size_t next = std::min(layer + 2, arrivals.size() - 1);  // sections before the layers: one
      now = std::max(now, arrivals[next]) + pass.layer_forward;
      computed += pass.layer_forward;
    }
  }
  cost.gather = now - computed;
  cost.hidden_gather = std::max(arrivals.back() - cost.gather, 0.0);
}

void add_update(StepCost& cost, const StepLoad& load, const Card& card, const nn::TensorTable& table) {
  const int ranks = load.step.num_ranks, shards = ranks / load.step.num_replicas;
  const double own = static_cast<double>(table.num_master_elements()) / shards;
  const double memory = card.memory_bytes_per_s * card.bandwidth_efficiency;
  const auto size = static_cast<double>(size_of(load.policy.compute));
  // AdamW: the norm reads the gradient; the step reads gradient, master and two moments and writes the last three and the new weights.
  cost.optimizer = own * (8 * sizeof(float) + size) / memory;
  if (load.step.optimizer_memory.host != nullptr) {
    const double visitors = load.policy.masters_host != nullptr ? 3 : 2;  // go there and back
    cost.optimizer += own * visitors * sizeof(float) * 2 / card.host_bytes_per_s;
  }
  if (shards == 1) return;
  if (!load.policy.gathers_layers || load.policy.lora) add_whole(cost, load, card, table, shards);
  if (!load.policy.gathers_layers) return;
  const nn::TensorTablePtr base = load.policy.lora ? nn::make_tensor_table(load.model) : nullptr;
  double of_layers = 0;
  for (const nn::GradSection& section : nn::grad_sections(base != nullptr ? *base : table, false, load.policy.share.divides_experts))
    if (section.layer >= 0) of_layers += static_cast<double>(section.range.count());
  if (base != nullptr) return add_layers(cost, load, card, of_layers / static_cast<double>(load.model.num_layers), shards);
  double gathered = own;
  gathered -= of_layers / shards;
  if (load.policy.share.divides_experts)
    for (const nn::ExpertSection& experts : nn::expert_sections(table)) gathered -= static_cast<double>(experts.range().count()) / shards;
  cost.gather_bytes = gathered * size * (shards - 1);
  cost.gather = transfer_seconds(load, card, cost.gather_bytes, shards) + load.latency_s;
  if (of_layers > 0) add_layers(cost, load, card, of_layers / static_cast<double>(load.model.num_layers), shards);
}

bool engines_are_near(const StepLoad& load) { return load.step.num_ranks + load.sampling->num_engines <= load.devices_per_node; }

/// Sequences of one engine that its cache holds at once.
std::int64_t num_at_once(const StepLoad& load, const Card& card, std::int64_t wanted) {
  const SamplingLoad& sampling = *load.sampling;
  const DevicePlans plans = device_plans(load, card);
  const MemoryPlan& plan = plans.engine ? *plans.engine : plans.trainer;
  const engine::EngineBytes bytes = engine::engine_bytes({.max_model_len = sampling.prompt_tokens + sampling.completion_tokens,
                                                          .block_size = 16,
                                                          .max_num_seqs = sampling.max_num_seqs,
                                                          .max_num_batched_tokens = 2048},
                                                         load.model, load.policy.compute);
  if (plan.num_kv_blocks == 0) return wanted;  // it does not fit anyway
  return std::clamp<std::int64_t>(plan.num_kv_blocks / std::max<std::int64_t>(bytes.blocks_per_sequence, 1), 1, wanted);
}

void add_sampling(StepCost& cost, const StepLoad& load, const Card& card) {
  const SamplingLoad& sampling = *load.sampling;
  const int engines = sampling.num_engines > 0 ? sampling.num_engines : load.step.num_ranks;
  const std::int64_t mine = (sampling.num_rollouts + engines - 1) / engines;
  const std::int64_t at_once = num_at_once(load, card, std::min(mine, sampling.max_num_seqs));
  const nn::ModelConfig& m = load.model;
  const auto size = static_cast<double>(size_of(load.policy.compute));
  const double context = static_cast<double>(sampling.prompt_tokens) + 0.5 * static_cast<double>(sampling.completion_tokens);
  const auto kv_bytes = static_cast<double>(m.num_softmax_layers() * m.cached_width()) * size;
  const auto matrices = static_cast<double>(m.num_active_parameters());
  const auto sequences = static_cast<double>(at_once);
  const double flops = card.flops * card.compute_efficiency;
  const double reading = (matrices * size + sequences * context * kv_bytes) / (card.memory_bytes_per_s * card.bandwidth_efficiency);
  const double step = std::max(reading, sequences * 2 * matrices / flops);
  const double decode = std::ceil(static_cast<double>(mine) / sequences) * static_cast<double>(sampling.completion_tokens) * step;
  const double attention = 4.0 * static_cast<double>(m.num_layers) * m.attended_width() * static_cast<double>(sampling.prompt_tokens);
  const double prefill = static_cast<double>(mine * sampling.prompt_tokens) * (2 * matrices + attention) / flops;
  cost.sampling = decode + prefill;
  // In one process a pointer changes hands, and the engine reads the weights for their checksum. Else they are sent to each engine.
  const auto bytes = static_cast<double>(weight_bytes(load));
  const int senders = num_weight_senders(load);
  const double proof = bytes / (card.memory_bytes_per_s * card.bandwidth_efficiency);
  cost.weight_sync = proof;
  if (sampling.num_engines > 0)
    cost.weight_sync += bytes * std::max(1.0, static_cast<double>(sampling.num_engines) / senders) /
                            (engines_are_near(load) ? card.link_bytes_per_s : card.node_bytes_per_s) +
                        load.latency_s;
}

config::InferenceConfig inference_of(const StepLoad& load) {
  config::InferenceConfig inference;
  inference.model.max_model_len = static_cast<int>(load.sampling->prompt_tokens + load.sampling->completion_tokens);
  inference.max_num_seqs = static_cast<int>(load.sampling->max_num_seqs);
  return inference;
}

}  // namespace

int num_weight_senders(const StepLoad& load) { return engines_are_near(load) ? 1 : load.step.num_ranks; }

Card named_card(std::string_view name) {
  std::string names;
  for (const Card& card : kCards) {
    if (card.name == name) return card;
    names += fmt::format("{}, ", card.name);
  }
  fail(ErrorCode::kInvalidArgument, "card: there is no \"{}\"; there are {}local", name, names);
}

StepCost step_cost(const StepLoad& load, const Card& card) {
  StepCost cost;
  const int ranks = load.step.num_ranks;
  const nn::TensorTablePtr table = trainer::trained_tensors(load.policy, load.model);
  cost.num_rounds = (load.num_rows + ranks - 1) / ranks;
  cost.train_flops = static_cast<double>(load.num_rows) * row_flops(load);
  cost.compute = static_cast<double>(cost.num_rounds) * row_flops(load) * recompute_factor(load) / (card.flops * card.compute_efficiency);
  add_exchange(cost, load, card, *table);
  add_travel(cost, load, card);
  add_update(cost, load, card, *table);
  double busy = cost.training();
  int devices = ranks;
  if (load.sampling) {
    add_sampling(cost, load, card);
    const bool shares_devices = load.sampling->num_engines == 0;
    devices += load.sampling->num_engines;
    busy = load.sampling->is_beside_training && !shares_devices ? std::max(busy, cost.sampling) : busy + cost.sampling;
    busy += cost.weight_sync;
  }
  cost.total = busy;
  cost.tokens_per_s = static_cast<double>(load.num_rows * load.seq_len) / cost.total;
  cost.model_flops_share = cost.train_flops / (cost.total * card.flops * devices);
  return cost;
}

DevicePlans device_plans(const StepLoad& load, const Card& card) {
  DevicePlans plans;
  const auto available = static_cast<std::size_t>(card.memory_bytes);
  std::size_t others = 0;
  const bool shares_devices = load.sampling && load.sampling->num_engines == 0;
  try {
    const std::size_t of_version = version_bytes(load.policy, load.model);
    if (shares_devices) others = least_engine_bytes(inference_of(load), load.model, load.policy.compute, of_version);
    plans.trainer = foretell_training(available, {load.model, load.policy, load.step, load.seq_len, others});
    if (!plans.trainer.fits()) {
      plans.missing = fmt::format("a device that trains needs {:.1f} GiB and has {:.1f}, of which {:.0f}% stay free",
                                  static_cast<double>(plans.trainer.total()) / kGiB, card.memory_bytes / kGiB, 100 * kMemoryReserve);
      return plans;
    }
    if (shares_devices) add_engine(plans.trainer, inference_of(load), load.model, load.policy.compute, of_version);
    // Beside the version that is served one is on its way.
    if (load.sampling && !shares_devices) plans.engine = plan_engine(available, inference_of(load), load.model, load.policy.compute, 2);
    plans.fits = true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    plans.missing = error.what();
  }
  return plans;
}

int least_devices(StepLoad load, const Card& card, int most) {
  trainer::GradientStepOptions step = load.step;
  for (int ranks = step.num_replicas; ranks <= most; ranks *= 2) {
    step.num_ranks = ranks;
    const StepLoad tried{load.model,    load.policy,           step,           load.seq_len, load.sequence_tokens,
                         load.num_rows, load.devices_per_node, load.latency_s, load.sampling};
    if (device_plans(tried, card).fits) return ranks;
  }
  return 0;
}

std::int64_t longest_row(StepLoad load, const Card& card) {
  std::int64_t longest = 0;
  for (std::int64_t tokens = 1024; tokens <= load.model.max_position; tokens *= 2) {
    load.seq_len = tokens;
    if (!device_plans(load, card).fits) break;
    longest = tokens;
  }
  return longest;
}

}  // namespace prl::launch
