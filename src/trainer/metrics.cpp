#include "trainer/metrics.hpp"

namespace prl::trainer {

namespace {

using monitor::MetricInfo;

constexpr MetricInfo kShared[] = {
    {"loss/mean", "nats", "loss of the step: sums over all rows divided by the global token count of each component"},
    {"optim/lr", "1", "learning rate: after the schedule's step for RL, the one just used for SFT"},
    {"optim/grad_norm", "1", "L2 norm of all gradients before clipping; absent without optim.max_norm"},
    {"optim/zero_grad_ratio", "1", "share of gradient elements that are exactly zero"},
    {"max_vio", "1",
     "of mixtures of experts, per layer and row: tokens of the busiest expert over the mean, minus 1; a token's number of experts, the "
     "busiest, left out",
     true},
    {"routing_confidence", "1", "probability that the router gives the experts that a token is sent to, per layer and row", true},
    {"replayed_tokens", "1", "share of tokens that were trained with the experts that they were sampled with (enable_router_replay)"},
    {"mtp/loss", "nats", "cross entropy of the token after the next one, of the head that is trained beside the policy (model.mtp)"},
    {"mtp/grad_norm", "1", "L2 norm of that head's gradient, before it is cut to 1"},
    {"perf/throughput", "tokens/s", "trained tokens per second"},
    {"perf/throughput_per_gpu", "tokens/s", "the same per device"},
    {"perf/mfu", "%", "share of the machine's measured peak that forward and backward reached"},
    {"perf/peak_memory", "GiB", "most memory that tensors took at once"},
    {"time/step", "s", "whole step"},
    {"time/forward_backward", "s", "forward and backward over all rows"},
    {"time/optimizer", "s", "clipping, optimizer and packing of the new weights"},
    {"time/save_ckpt", "s", "checkpoint, or handing it to the background"},
    {"time/broadcast_weights", "s", "checksum, probe and publication of the new weights"},
    {"healing/losses", "1", "ranks that were lost since the start, with [healing]"},
    {"healing/recover_seconds", "s", "from the notice of a loss to the step that was done again; 0 if none was lost since the last step"},
    {"system/ckpt_disk_free_gib", "GiB", "free space where checkpoints go"},
    {"system/ckpt_disk_used_gib", "GiB", "used space there"},
    {"system/ckpt_disk_total_gib", "GiB", "size of that disk"},
    {"system/ckpt_disk_free_ratio", "1", "free share of it"},
};

constexpr MetricInfo kRl[] = {
    {"entropy/**", "nats", "entropy of the trainer's distribution over trained tokens, all and per environment", true},
    {"mismatch_kl/**", "nats", "r - 1 - log r of trainer and sampler per trained token, all and per environment", true},
    {"masked_mismatch_kl", "nats", "mismatch over tokens that the loss dropped, per sequence", true},
    {"unmasked_mismatch_kl", "nats", "mismatch over tokens that the loss kept, per sequence", true},
    {"is_masked", "1", "share of tokens that the loss dropped", true},
    {"is_masked_low", "1", "share dropped because their probability fell too far", true},
    {"is_masked_high", "1", "share dropped because their probability rose too far", true},
    {"masked_advantage_positive", "1", "share of dropped tokens with a positive advantage", true},
    {"masked_advantage_negative", "1", "share of dropped tokens with a negative advantage", true},
    {"is_clipped", "1", "share of tokens or sequences whose ratio was clipped", true},
    {"sequence_ratio", "1", "probability ratio of a sequence (gspo)", true},
    {"sequence_masked_low", "1", "sequences dropped for a token of small ratio (masked)", true},
    {"sequence_masked_high", "1", "sequences dropped for a token of large ratio (masked)", true},
    {"geo_masked_low", "1", "sequences dropped for a small geometric mean ratio (masked)", true},
    {"geo_masked_high", "1", "sequences dropped for a large geometric mean ratio (masked)", true},
    {"geo_seq_ratio", "1", "geometric mean ratio of a sequence (masked)", true},
    {"teacher_kl", "nats", "log-probability of the teacher minus the trainer's: per token (masked) or per sequence (opd)", true},
    {"ref_kl", "nats", "log-probability of the trainer minus the reference's, per sequence", true},
    {"ref_kl/*", "nats", "masks and mismatch of the ref_kl component", true},
    {"nll", "nats", "negative log-likelihood of the ce component, per sequence", true},
    {"custom_loss/**", "1", "what a loss of type custom reports, per sequence", true},
    {"kl_ent_ratio/mean", "1", "mean mismatch_kl divided by mean entropy"},
    {"time/wait_for_batch", "s", "waiting for the orchestrator"},
    {"progress/total_tokens", "tokens", "tokens trained since the start of the run"},
    {"progress/total_samples", "samples", "sequences trained since the start of the run"},
};

constexpr MetricInfo kSft[] = {
    {"loss/perplexity", "1", "exp(loss), of a loss of at most 20"},
    {"loss/nan_count", "1", "micro-batches left out because their loss was not finite"},
    {"val/loss", "nats", "mean over all validation tokens"},
    {"val/perplexity", "1", "exp(val/loss), of a loss of at most 20"},
    {"progress/epoch", "1", "passes over the data"},
    {"progress/num_samples", "samples", "samples trained since the start of the run"},
    {"progress/num_tokens", "tokens", "tokens trained since the start of the run"},
    {"progress/**/ratio_samples", "1", "share of a part of a mixture in the samples trained by this process"},
    {"progress/**/ratio_tokens", "1", "share of a part of a mixture in the tokens trained by this process"},
};

}  // namespace

monitor::MetricSet trainer_metrics() {
  monitor::MetricSet set;
  set.declare(kShared);
  set.declare(kRl);
  return set;
}

monitor::MetricSet sft_metrics() {
  monitor::MetricSet set;
  set.declare(kShared);
  set.declare(kSft);
  return set;
}

}  // namespace prl::trainer
