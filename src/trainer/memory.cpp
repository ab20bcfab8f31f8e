#include "trainer/memory.hpp"

#include <algorithm>
#include <cmath>

#include "nn/tensor_table.hpp"
#include "nn/weights.hpp"

namespace prl::trainer {

namespace {

/// Of nn::LayeredWeights and a rank's part of all layers, or of their matrices beside the experts, and its experts.
std::size_t layered_bytes(const nn::TensorTable& table, const ShardPlan& plan, DType compute, bool divides_experts) {
  std::int64_t outside = 0, longest = 0, own = 0;
  const std::vector<nn::GradSection> sections = nn::grad_sections(table, false, divides_experts);
  for (const nn::GradSection& section : sections) {
    if (section.layer < 0) outside += section.range.count();
    if (section.layer >= 0) longest = std::max(longest, section.range.count());
  }
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    std::int64_t of_rank = 0;
    for (const nn::GradSection& section : sections)
      if (section.layer >= 0) of_rank += plan.part(rank, section.range).count();
    if (divides_experts)
      for (const nn::ExpertSection& experts : nn::expert_sections(table)) of_rank += plan.part(rank, experts.range()).count();
    own = std::max(own, of_rank);
  }
  return static_cast<std::size_t>(outside + 2 * longest + own) * size_of(compute);
}

}  // namespace

TrainingBytes training_bytes(const nn::ModelConfig& model, const PolicyOptions& policy, const GradientStepOptions& step) {
  const nn::TensorTablePtr table = trained_tensors(policy, model);
  const OptimizerMemory& optimizer = step.optimizer_memory;
  const int num_ranks = step.num_ranks, num_shards = num_ranks / step.num_replicas;
  MasterShare shared = policy.share;
  shared.keeps_blocks = keeps_whole_blocks(step.optim);
  const bool divides_experts = shared.divides_experts;
  const ShardPlan plan = shard_plan(*table, num_shards, shared);
  const double share = static_cast<double>(plan.longest()) / static_cast<double>(std::max<std::int64_t>(table->num_master_elements(), 1));
  const auto part_of = [&](std::size_t bytes) {
    return num_shards == 1 ? bytes : static_cast<std::size_t>(std::ceil(share * static_cast<double>(bytes)));
  };
  const std::size_t state = part_of(state_bytes_of(step.optim, optimizer.dtype, *table));
  const bool is_in_host = optimizer.host != nullptr;
  TrainingBytes bytes;
  const std::size_t all = sizeof(float) * static_cast<std::size_t>(table->num_trainable());
  (policy.masters_host != nullptr ? bytes.host_masters : bytes.masters) = part_of(all);
  // Beside the gradient of a row there is the sum of those before it, and a bucket of each rank's on its way; each rank sums its part. One
  // rank has that sum beside it for what its backward passes form stepwise alone.
  // Several ranks hold a row's gradient in parts: all layers' lie in the same memory.
  bytes.gradients = all;
  const bool splits_tied = splits_tied_grads(step.cut.num_leaves, step.reduce) && table->has_tied_head();
  std::vector<nn::GradSection> sections{{nn::GradSection::kRest, {0, table->num_master_elements()}}};
  if (divides_grads(num_ranks, step.reduce) || splits_tied || divides_experts) {
    std::int64_t longest_layer = 0, others = 0;
    sections = nn::grad_sections(*table, splits_tied, divides_experts);
    for (const nn::GradSection& section : sections) {
      if (section.layer >= 0)
        longest_layer = std::max(longest_layer, section.range.count());
      else
        others += section.range.count();
    }
    const int num_places = num_grad_places(step.overlaps_exchange, num_ranks);
    bytes.gradients = sizeof(float) * static_cast<std::size_t>(num_places * longest_layer + others);
  }
  if (num_ranks > 1 || splits_tied || divides_experts) {
    bytes.gradients += part_of(all);
  } else if (step.reduce == Reduce::kExact) {
    for (const ElementRange& range : nn::stepwise_ranges(*table))
      bytes.gradients += sizeof(float) * static_cast<std::size_t>(range.count());
  }
  // A matrix that is head and embedding has a sum as each.
  if (splits_tied) bytes.gradients += part_of(sizeof(float) * static_cast<std::size_t>(model.vocab_size * model.hidden_size));
  if (divides_grads(num_ranks, step.reduce)) {  // fast sums are reduced where they are
    const std::int64_t bucket =
        exchange_bucket(sections, plan, {.reduce = step.reduce, .overlaps = step.overlaps_exchange, .divides_experts = divides_experts});
    bytes.gradients += sizeof(float) * static_cast<std::size_t>(num_ranks * bucket);
  }
  const std::int64_t num_packed = model.num_parameters() + (policy.lora ? table->num_trainable() : 0);
  bytes.weights = static_cast<std::size_t>(num_packed) * size_of(policy.compute);
  if (policy.lora && !policy.random_init && nn::gpus_hold_codes_alone(model, policy.compute)) {
    const nn::CodesAloneBytes base = nn::codes_alone_bytes(*nn::make_tensor_table(model), policy.compute);
    bytes.weights = base.weights + static_cast<std::size_t>(table->num_trainable()) * size_of(policy.compute);
    bytes.widened = base.widened;
  } else if (model.eight_bits != nn::EightBits::kNone) {
    bytes.weights += nn::eight_bit_code_bytes(*nn::make_tensor_table(model), policy.compute);
  }
  if (policy.gathers_layers && num_shards > 1) {
    const nn::TensorTablePtr of_model = policy.lora ? nn::make_tensor_table(model) : table;
    bytes.weights = layered_bytes(*of_model, shard_plan(*of_model, num_shards, shared), policy.compute, divides_experts);
    if (policy.lora) bytes.weights += static_cast<std::size_t>(table->num_trainable()) * size_of(policy.compute);
  }
  bytes.optimizer = is_in_host ? visit_bytes_of(step.optim, optimizer, *table) : state;
  bytes.host_optimizer = is_in_host ? state : 0;
  return bytes;
}

}  // namespace prl::trainer
