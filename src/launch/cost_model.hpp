#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "launch/memory_plan.hpp"
#include "nn/model_config.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::launch {

/// A kind of device as its data sheet describes it: dense products in bf16, one direction of each link. Bytes and seconds.
struct Card {
  std::string name;
  double flops = 0;                   ///< floating-point operations per second
  double memory_bytes = 0;            ///< in all
  double memory_bytes_per_s = 0;      ///< reading it
  double link_bytes_per_s = 0;        ///< to devices of the same machine
  double node_bytes_per_s = 0;        ///< to other machines, a device's share
  double host_bytes_per_s = 0;        ///< to and from host memory
  double compute_efficiency = 0.5;    ///< part of `flops` that forward and backward reach
  double bandwidth_efficiency = 0.5;  ///< part of `memory_bytes_per_s` that decoding and the optimizer reach
};
/// "a100", "h100", "h200", "b200", "l40s". Error{kInvalidArgument} with the names there are.
Card named_card(std::string_view name);

/// The work of a step of RL that makes its rows.
struct SamplingLoad {
  std::int64_t num_rollouts = 0, prompt_tokens = 0, completion_tokens = 0;  ///< lengths are means
  std::int64_t max_num_seqs = 0;                                            ///< decoded at once by an engine
  int num_engines = 0;                                                      ///< on devices of their own; 0: the ranks sample too
  bool is_beside_training = false;                                          ///< sampling goes on while the trainer trains
};

/// What a step is: `policy` and `step` as a run would make them, with step.num_ranks and step.num_replicas.
struct StepLoad {
  const nn::ModelConfig& model;
  const trainer::PolicyOptions& policy;
  const trainer::GradientStepOptions& step;
  std::int64_t seq_len = 0;          ///< tokens of a row
  std::int64_t sequence_tokens = 0;  ///< mean length of what is packed into it
  std::int64_t num_rows = 0;         ///< of all ranks
  int devices_per_node = 8;
  double latency_s = 0;  ///< of one exchange
  std::optional<SamplingLoad> sampling = std::nullopt;
};

/// Seconds of a step by parts, which follow each other but for sampling beside training.
struct StepCost {
  double compute = 0;    ///< forward, backward and what is recomputed
  double exchange = 0;   ///< gradients to the ranks that own them: what the backward pass waits for, and their sums; tokens to experts
  double optimizer = 0;  ///< with the gradient's norm and the packing of new weights
  double gather = 0;     ///< weights of the other ranks: what is waited for
  double sampling = 0, weight_sync = 0;
  double total = 0;

  /// What travels beside compute, and is in no other part.
  double hidden_exchange = 0, hidden_gather = 0;

  std::int64_t num_rounds = 0;   ///< rows that follow each other on a rank
  double exchange_bytes = 0;     ///< that a rank sends in a step, in the mean of all
  double gather_bytes = 0;       ///< likewise
  double tokens_per_s = 0;       ///< trained, of all devices
  double train_flops = 0;        ///< of all rows, what is recomputed not counted
  double model_flops_share = 0;  ///< train_flops / (total * peak of all devices)

  double training() const noexcept { return compute + exchange + optimizer + gather; }
};

/// Ranks that send engines a part of new weights each: the first alone where all are on one node (launch::num_senders), else all. Of a load
/// with sampling.
int num_weight_senders(const StepLoad& load);
StepCost step_cost(const StepLoad& load, const Card& card);

/// The plan of one device that trains, and of one that samples if those are others. `fits` where both do.
struct DevicePlans {
  MemoryPlan trainer;
  std::optional<MemoryPlan> engine;
  bool fits = false;
  std::string missing;  ///< why not
};
DevicePlans device_plans(const StepLoad& load, const Card& card);
/// The least number of devices that train, a multiple of the copies of the state and at most `most`, on which the load fits otherwise as
/// it is; 0 if it never does.
int least_devices(StepLoad load, const Card& card, int most = 1024);
/// The longest row, of the powers of two times 1,024 tokens up to the model's positions, that fits; 0 if none does.
std::int64_t longest_row(StepLoad load, const Card& card);

}  // namespace prl::launch
