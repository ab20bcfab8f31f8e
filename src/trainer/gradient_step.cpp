#include "trainer/gradient_step.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/spans.hpp"
#include "base/units.hpp"
#include "ops/pointwise.hpp"
#include "trainer/agreement.hpp"

namespace prl::trainer {

namespace {

std::set<std::string> environments(std::span<const wire::MicroBatch> rows) {
  std::set<std::string> names;
  for (const wire::MicroBatch& row : rows) names.insert(row.env_names.begin(), row.env_names.end());
  names.erase(std::string());  // of sequences that fill rows up
  return names;
}

/// Kernels are chosen by what a device can do, and two choices may round differently.
void check_alike(comm::Communicator& ranks, Device device) {
  if (ranks.size() == 1) return;
  std::string mine;
  if (device.kind == DeviceKind::kCuda) {
    const CudaDevices gpus = list_cuda_devices();
    for (const CudaDeviceInfo& gpu : gpus.devices)
      if (gpu.index == device.index) mine = fmt::format("{}, {}", gpu.name, gpus.versions);
  } else {
    const CpuFeatures& cpu = cpu_features();
    const char* forced = std::getenv("PRL_CPU");
    mine = fmt::format("CPU with avx2 {} avx512 {} avx512_bf16 {} amx {} forced to '{}'", cpu.avx2, cpu.avx512, cpu.avx512_bf16,
                       cpu.amx_bf16, forced != nullptr ? forced : "");
  }
  const std::vector<std::string> all = ranks.gather_bytes(mine, {.what = "devices"});
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      fail(ErrorCode::kInvalidArgument,
           "[trainer] rank 0 runs on {}, rank {} on {}: gradients would not be the same bits on both; use devices that are alike, or "
           "reduce = \"fast\"",
           all[0], rank, all[rank]);
}

/// What the device did, by its own marks, set back from the moment when all of it was done; and the step as the host sees it.
void add_spans(spans::Clock::time_point begin, const GradientStepResult& result, PolicyVersion version, Device device) {
  if (!spans::is_on(spans::Detail::kCoarse)) return;
  const auto end = spans::Clock::now();
  const auto before = [&](double seconds) {
    return end - std::chrono::duration_cast<spans::Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const auto middle = before(result.optimizer_s);
  spans::add(spans::Detail::kCoarse,
             {.lane = "trainer", .name = "forward and backward", .begin = begin, .end = std::max(begin, middle), .step = version.value});
  spans::add(spans::Detail::kCoarse,
             {.lane = "trainer", .name = "optimizer", .begin = std::max(begin, middle), .end = end, .step = version.value});
  const std::string lane = fmt::format("{} of the trainer", to_string(device));
  spans::add(spans::Detail::kFine, {.lane = lane,
                                    .name = "forward and backward",
                                    .begin = before(result.optimizer_s + result.forward_backward_s),
                                    .end = middle,
                                    .step = version.value});
  spans::add(spans::Detail::kFine, {.lane = lane, .name = "optimizer", .begin = middle, .end = end, .step = version.value});
}

}  // namespace

double training_flops(const nn::ModelConfig& model, const wire::MicroBatch& row, std::span<const std::int32_t> targets,
                      const nn::TensorTable* trained) {
  double unneeded = 0, of_adapter = 0;  ///< per token: gradients of weights that are not trained, and what adapters add
  double head_factor = 6;
  if (trained != nullptr) {
    double whole = 0;
    for (const nn::TensorSpec& spec : trained->tensors()) {
      if (!spec.is_matrix() || spec.slot == nn::Slot::kEmbedding || spec.slot == nn::Slot::kLmHead) continue;
      (nn::is_lora(spec.block) ? of_adapter : whole) += static_cast<double>(spec.num_elements());
    }
    unneeded = static_cast<double>(model.num_active_parameters() - model.vocab_size * model.hidden_size) - whole;
    head_factor = trained->has(nn::Block::kLmHead) ? 6 : 4;
  }
  const double head = static_cast<double>(model.vocab_size * model.hidden_size);
  const double body = static_cast<double>(model.num_active_parameters()) - head;
  double pairs = 0;  // of tokens within a sequence, of all layers, as if attention were not causal
  for (const std::int32_t length : row.sequence_lengths)
    pairs += static_cast<double>(length) * static_cast<double>(model.attended_keys(length));
  return (6 * body - 2 * unneeded + 6 * of_adapter) * static_cast<double>(row.input_ids.size()) +
         head_factor * head * static_cast<double>(std::ranges::count_if(targets, [](std::int32_t target) { return target >= 0; })) +
         12 * model.attended_width() * pairs;
}

std::vector<std::size_t> balanced_order(const nn::ModelConfig& model, std::span<const wire::MicroBatch> rows) {
  std::vector<double> costs;
  for (const wire::MicroBatch& row : rows) costs.push_back(training_flops(model, row, make_targets(row)));
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  return order;
}

namespace {

/// The plan, by which masters are held from now on.
ShardPlan divide(Policy& policy, const GradientStepOptions& options, comm::Mesh& mesh) {
  const comm::Communicator& shards = mesh.along(comm::Axis::kShard);
  MasterShare share = policy.options().share;
  share.keeps_blocks = keeps_whole_blocks(options.optim);
  ShardPlan plan = shard_plan(*policy.parameters().table(), shards.size(), share);
  policy.parameters().hold(plan.elements(shards.rank()));
  if (share.divides_experts) {
    PRL_CHECK(shards.size() == mesh.world().size() && options.reduce == Reduce::kExact && options.cut.num_leaves == 1,
              "experts are divided among all ranks, of which each has rows of its own");
    check_experts_divide(policy.config(), shards.size());
    policy.share_experts({shards.rank(), shards.size()});
  }
  const bool splits_tied = splits_tied_grads(options.cut.num_leaves, options.reduce) && policy.parameters().table()->has_tied_head();
  policy.parameters().divide_grads(divides_grads(mesh.world().size(), options.reduce) || splits_tied || share.divides_experts, splits_tied,
                                   num_grad_places(options.overlaps_exchange, mesh.world().size()), share.divides_experts);
  return plan;
}

/// The ranks that share rows with this one, which the policy knows from now on; nullptr if none does.
std::unique_ptr<ContextGroup> share_rows(Policy& policy, const GradientStepOptions& options, comm::Mesh& mesh) {
  RowCut cut = options.cut;
  cut.num_ranks = fitting_context(options.cut, mesh.world().size());
  if (cut.num_ranks != options.cut.num_ranks)
    log::warning("model.cp: {} ranks share a row in place of {}, which do not divide {}", cut.num_ranks, options.cut.num_ranks,
                 mesh.world().size());
  check_row_cut(policy.config(), cut);
  auto context = cut.num_ranks > 1 ? std::make_unique<ContextGroup>(mesh.world(), cut.num_ranks) : nullptr;
  policy.share_rows(cut, context.get());
  return context;
}

}  // namespace

GradientStep::Shard::Shard(Policy& policy, const GradientStepOptions& options, comm::Mesh& of_mesh)
    : trained(policy),
      context(share_rows(policy, options, of_mesh)),
      mesh(of_mesh),
      plan(divide(policy, options, mesh)),
      overlaps(options.overlaps_exchange),
      exchange(policy.context(), policy.parameters(), mesh.world(), plan,
               {.reduce = options.reduce,
                .shards = &mesh.along(comm::Axis::kShard),
                .replicas = mesh.shape().size(comm::Axis::kReplicate) > 1 ? &mesh.along(comm::Axis::kReplicate) : nullptr,
                .ranks_per_row = context != nullptr ? context->size() : 1,
                .overlaps = options.overlaps_exchange,
                .divides_experts = policy.options().share.divides_experts}),
      optimizer(policy.context(), policy.parameters(), options.optim, options.optimizer_memory, policy.parameters().held()) {}

GradientStep::Shard::~Shard() { trained.share_rows({}, nullptr); }

void GradientStep::Shard::bring_weights() {
  if (layers != nullptr || gather != nullptr) return;
  const std::vector<int> members = mesh.shape().line(mesh.world().rank(), comm::Axis::kShard);
  if (trained.layered() != nullptr) {
    if (trained.options().lora)
      base_plan = trainer::shard_plan(*trained.layered()->weights()->table, mesh.along(comm::Axis::kShard).size(), trained.options().share);
    layers = std::make_unique<LayerGather>(mesh.world(), members, base_plan ? *base_plan : plan, *trained.layered());
    layers->keep_masters(trained);
    trained.know_base([this](bool says) {
      const std::vector<double> all = mesh.world().gather_number(says ? 1 : 0, {.what = "whether all know the base"});
      return std::ranges::any_of(all, [](double one) { return one != 0; });
    });
    if (trained.options().share.divides_experts) {
      experts = std::make_unique<ExpertGroup>(mesh.world(), *trained.layered());
      trained.layered()->pack_experts();
    }
  } else if (overlaps && members.size() > 1 && !trained.options().lora) {
    gather = std::make_unique<WeightGather>(mesh.world(), members, plan);
  }
}

std::vector<MemberGroup*> GradientStep::Shard::groups_of_weights() const {
  std::vector<MemberGroup*> groups;
  if (layers != nullptr) groups.push_back(&layers->group());
  if (gather != nullptr) groups.push_back(&gather->group());
  if (experts != nullptr) groups.push_back(&experts->group());
  return groups;
}

void GradientStep::Shard::give_up_on(const comm::PeerLost& lost) noexcept {
  mesh.give_up_on(lost);
  if (context != nullptr) context->give_up_on(lost);
  for (MemberGroup* const group : groups_of_weights()) group->give_up_on(lost);
}

void GradientStep::Shard::abort(std::string_view reason) noexcept {
  mesh.abort(reason);
  if (context != nullptr) context->abort(reason);
  for (MemberGroup* const group : groups_of_weights()) group->abort(reason);
}

void GradientStep::Shard::settle() noexcept {
  exchange.settle();
  if (layers != nullptr) layers->settle();
}

GradientStep::GradientStep(Policy& policy, GradientStepOptions options)
    : policy_(policy),
      options_(std::move(options)),
      own_mesh_(options_.mesh == nullptr ? std::make_unique<comm::Mesh>(comm::make_local_communicator(policy.context().runtime)) : nullptr),
      shard_(std::make_unique<Shard>(policy_, options_, mesh())),
      schedule_(options_.scheduler, base_lr(options_.optim), options_.max_steps),
      watch_(policy.context().runtime->make_stopwatch()) {
  if (options_.mesh == nullptr && options_.num_replicas != 1)
    fail(ErrorCode::kInvalidArgument, "model.dp_replicate: {} copies of the state on one rank; use 1, or more trainer ranks",
         options_.num_replicas);
  if (policy_.head() != nullptr && (ranks().size() > 1 || options_.cut.num_leaves > 1))
    fail(ErrorCode::kNotImplemented, "model.mtp: a head is trained on one rank, on whole rows (model.cp and model.leaves_per_row of 1)");
  if (options_.mesh == nullptr && options_.cut.num_ranks != 1)
    fail(ErrorCode::kInvalidArgument, "model.cp: {} devices to a row on one rank; use 1, or more trainer ranks", options_.cut.num_ranks);
}

void GradientStep::abort(std::string_view reason) noexcept {
  if (shard_ != nullptr) return shard_->abort(reason);
  mesh().abort(reason);  // in the middle of move_to()
}

void GradientStep::move_to(std::unique_ptr<comm::Communicator> group) {
  shard_.reset();  // its memory first
  const comm::MeshShape shape = comm::replicated_shape(group->size(), options_.num_replicas);
  own_mesh_ = std::make_unique<comm::Mesh>(std::move(group), shape);
  shard_ = std::make_unique<Shard>(policy_, options_, mesh());
}

void GradientStep::check_ranks() const {
  if (options_.reduce == Reduce::kExact) check_alike(ranks(), policy_.context().runtime->device());
  shard_->bring_weights();
}

bool GradientStep::is_any_rank(bool claim) const {
  if (ranks().size() == 1) return claim;
  return std::ranges::any_of(ranks().gather_number(claim ? 1 : 0, {.what = "whether to go on"}), [](double value) { return value != 0; });
}

void GradientStep::restart_schedule(std::int64_t num_done) {
  std::optional<std::int64_t> remaining;
  if (options_.max_steps) remaining = std::max<std::int64_t>(*options_.max_steps - num_done, 1);
  schedule_ = LrSchedule(options_.scheduler, base_lr(options_.optim), remaining);
  num_scheduled_ = 0;
}

namespace {

/// How evenly the experts of each layer are used (spec 2.11). The busiest, as many as a token has, are left out: they take what is padded.
void add_routing(MetricPool& pool, std::span<const autograd::ExpertLoad> loads, std::int64_t num_active) {
  for (const autograd::ExpertLoad& load : loads) {
    std::vector<std::int64_t> tokens = load.tokens_of_expert;
    std::ranges::sort(tokens, std::ranges::greater());
    const auto total = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
    const std::span rest = std::span(tokens).subspan(std::min(static_cast<std::size_t>(num_active), tokens.size()));
    const auto of_rest = static_cast<double>(std::accumulate(rest.begin(), rest.end(), std::int64_t{0}));
    if (of_rest > 0) {
      const double mean = of_rest / static_cast<double>(rest.size());
      pool.add("max_vio", (static_cast<double>(rest.front()) - mean) / mean);
    }
    if (total > 0) pool.add("routing_confidence", load.mass * static_cast<double>(num_active) / static_cast<double>(total));
  }
}

}  // namespace

GradientStep::RowResult GradientStep::train_on(const wire::MicroBatch& row, std::size_t index, const LossCounts& counts) {
  RowResult result;
  shard_->exchange.begin_leaf();
  BatchLoss loss;
  bool has_forward = false;
  try {
    const nn::TokenStats stats = policy_.forward(row, make_targets(row));
    has_forward = true;
    add_routing(result.pool, stats.expert_loads, policy_.config().num_active_experts);
    LossHooks hooks{.custom = options_.loss_function};
    if (exporter_ && shard_->is_first_of_row()) hooks.on_sequence = [this](const SequenceValues& values) { exporter_->add(values); };
    loss = compute_batch_loss(options_.loss, row, stats.logp_T, stats.entropy_T, counts, result.pool, hooks);
  } catch (const comm::PeerLost&) {
    throw;
  } catch (const Error& error) {
    // Those that share the row, or bring its layers, wait within a forward pass.
    if (!has_forward && (shard_->context != nullptr || shard_->layers != nullptr)) throw;
    const bool is_left_out = error.code() == ErrorCode::kNonFinite && options_.skip_non_finite_rows;
    if (!is_left_out && (ranks().size() == 1 || error.code() == ErrorCode::kInternal)) throw;
    // Other ranks go on with their rows: the step ends where all of them learn why.
    result.is_finite = false;
    if (!is_left_out)
      result.error = error;
    else
      log::warning("micro-batch {} is left out: {}", index, error.what());
    if (shard_->layers != nullptr) policy_.pass(false);
    return result;
  }
  policy_.backward(loss.dlogp_T);
  result.loss = loss.loss;
  result.pool.add("loss", loss.loss);
  return result;
}

namespace {

void add_error(std::string& bytes, const std::optional<Error>& error) {
  const std::string_view text = error ? error->what() : "";
  const std::int32_t head[] = {error ? static_cast<std::int32_t>(error->code()) : -1, static_cast<std::int32_t>(text.size())};
  bytes.append(reinterpret_cast<const char*>(head), sizeof head);
  bytes += text;
}

std::optional<Error> take_error(std::string_view& bytes, std::size_t rank) {
  std::int32_t head[2] = {};
  if (bytes.size() < sizeof head) fail(ErrorCode::kCorrupt, "[trainer] rank {} does not say how its rows went", rank);
  std::memcpy(head, bytes.data(), sizeof head);
  bytes.remove_prefix(sizeof head);
  const std::string text(bytes.substr(0, static_cast<std::size_t>(head[1])));
  bytes.remove_prefix(text.size());
  if (head[0] < 0) return std::nullopt;
  return Error(static_cast<ErrorCode>(head[0]), text);
}

}  // namespace

std::vector<GradientStep::RowResult> GradientStep::gather_results(std::vector<RowResult> mine, std::size_t num_leaves) const {
  if (ranks().size() == 1) return mine;
  std::string bytes;
  for (const RowResult& result : mine) {
    bytes += result.is_finite ? '\1' : '\0';
    bytes.append(reinterpret_cast<const char*>(&result.loss), sizeof result.loss);
    add_error(bytes, result.error);
    result.pool.encode(bytes);
  }
  std::vector<RowResult> all(num_leaves);
  const std::vector<std::string> of_ranks = ranks().gather_bytes(bytes, {.what = "losses"});
  // Those that share a row know the same of it; the first of them is believed.
  const std::size_t num_groups = of_ranks.size() / static_cast<std::size_t>(shard_->ranks_per_row());
  for (std::size_t group = 0; group < num_groups; ++group) {
    const std::size_t rank = group * static_cast<std::size_t>(shard_->ranks_per_row());
    std::string_view left = of_ranks[rank];
    for (std::size_t leaf = group; leaf < num_leaves; leaf += num_groups) {
      RowResult& result = all[leaf];
      if (left.size() < 1 + sizeof result.loss) fail(ErrorCode::kCorrupt, "[trainer] rank {} reports fewer rows than it has", rank);
      result.is_finite = left.front() != '\0';
      std::memcpy(&result.loss, left.data() + 1, sizeof result.loss);
      left.remove_prefix(1 + sizeof result.loss);
      result.error = take_error(left, rank);
      result.pool = MetricPool::decode(left);
    }
  }
  return all;
}

bool GradientStep::add_gradients(std::span<const wire::MicroBatch> rows, std::vector<bool>& is_left_out, GradientStepResult& result) {
  LossCounts counts;
  std::vector<std::size_t> leaves;
  for (const std::size_t i : balanced_order(policy_.config(), rows)) {
    if (is_left_out[i]) continue;
    const LossCounts own = count_losses(rows[i]);
    counts += own;
    if (own.micro_batches > 0) leaves.push_back(i);  // any other row would add nothing
  }
  if (policy_.head() != nullptr) policy_.head()->start_step();
  result.loss = result.flops = 0;
  result.num_tokens = 0;
  result.pool = {};
  for (const wire::MicroBatch& row : rows) result.num_tokens += static_cast<std::int64_t>(row.input_ids.size());
  std::vector<RowResult> mine;
  shard_->exchange.begin(static_cast<std::int64_t>(leaves.size()));
  for (std::int64_t round = 0; round < shard_->exchange.num_rounds(); ++round) {
    if (shard_->experts != nullptr)
      shard_->experts->count({.num_active = shard_->exchange.num_active(), .is_first = shard_->exchange.is_first_round()});
    if (const auto leaf = shard_->exchange.row_of(round)) {
      const std::size_t index = leaves[static_cast<std::size_t>(*leaf)];
      if (exporter_ && shard_->is_first_of_row()) exporter_->begin_row(*leaf);
      const spans::Scope span(spans::Detail::kFine, "rows", "forward and backward of a row");
      mine.push_back(train_on(rows[index], index, counts));
      log::debug("Micro Step {}/{} | Loss {:.4f}", *leaf, leaves.size(), mine.back().loss);
    } else if (shard_->layers != nullptr) {
      // The others need this rank's part of each layer, and send its gradients meanwhile.
      shard_->exchange.begin_leaf();
      policy_.pass(true);
      policy_.pass(false);
    }
    shard_->exchange.end_round();
    if (on_row_) on_row_(round + 1, shard_->exchange.num_rounds());
  }
  const std::int64_t num_before = result.num_non_finite_rows;
  const std::vector<RowResult> all = gather_results(std::move(mine), leaves.size());
  for (const RowResult& row : all)
    if (row.error) throw SharedError(*row.error);
  for (std::size_t leaf = 0; leaf < all.size(); ++leaf) {
    const std::size_t index = leaves[leaf];
    if (!all[leaf].is_finite) {
      is_left_out[index] = true;
      ++result.num_non_finite_rows;
      continue;
    }
    result.loss += all[leaf].loss;
    result.pool.add_all(all[leaf].pool);
    result.flops += training_flops(policy_.config(), rows[index], make_targets(rows[index]),
                                   policy_.options().lora ? policy_.parameters().table().get() : nullptr);
  }
  if (result.num_non_finite_rows == num_before) return true;
  if (result.pool.values("loss").empty())
    throw SharedError(
        ErrorCode::kNonFinite,
        fmt::format("[trainer] every one of {} micro-batches has a loss that is not finite: the weights have diverged; lower optim.lr or "
                    "set optim.max_norm",
                    result.num_non_finite_rows));
  return false;
}

template <typename Work>
auto GradientStep::among_shards(const Work& work) const {
  try {
    return work(shards());
  } catch (const comm::PeerLost& lost) {
    if (shards().size() == ranks().size()) throw;
    const std::vector<int> line = mesh().shape().line(ranks().rank(), comm::Axis::kShard);
    std::vector<int> of_all;
    for (const int rank : lost.ranks()) of_all.push_back(line[static_cast<std::size_t>(rank)]);
    const comm::PeerLost told(
        of_all, fmt::format("{} (within a copy of the state; among all ranks: {})", lost.what(), fmt::join(of_all, ", ")), lost.gave_up());
    shard_->give_up_on(told);
    throw told;
  }
}

GradientStepResult GradientStep::run(std::span<const wire::MicroBatch> rows, PolicyVersion version) {
  try {
    return run_on_ranks(rows, version);
  } catch (const comm::PeerLost& lost) {
    // Sums in place are taken in groups that number their ranks in ways of their own.
    shard_->give_up_on(options_.reduce == Reduce::kExact ? lost : comm::PeerLost({}, lost.what(), lost.gave_up()));
    shard_->settle();
    throw;
  } catch (const SharedError&) {
    shard_->settle();
    throw;
  } catch (const std::exception& error) {
    abort(error.what());
    shard_->settle();
    throw;
  }
}

GradientStepResult GradientStep::run_on_ranks(std::span<const wire::MicroBatch> rows, PolicyVersion version) {
  GradientStepResult result;
  shard_->bring_weights();
  const auto begin = spans::Clock::now();
  // The device is not waited for between the two parts: it forms the gradient's norm right behind them.
  const std::uint64_t started = watch_->mark();
  std::vector<bool> is_left_out(rows.size(), false);
  // The tokens of rows that turn out not finite must not count in the divisors of the others: then once more without them.
  do {
    if (!options_.token_exports.empty()) exporter_.emplace(options_.token_exports, version.value, ranks().rank());
  } while (!add_gradients(rows, is_left_out, result));
  if (exporter_) end_export();
  const Tensor own_grads = shard_->exchange.finish();
  const std::uint64_t has_gradient = watch_->mark();

  const std::optional<double> max_norm = max_grad_norm(options_.optim);
  const double norm =
      among_shards([&](comm::Communicator& group) { return global_grad_norm(policy_.context(), own_grads, shard_->plan, group); });
  if (!std::isfinite(norm))
    throw SharedError(ErrorCode::kNonFinite,
                      fmt::format("[trainer] the gradient norm is {} with a loss of {} over environments [{}]: the weights have diverged; "
                                  "lower optim.lr or set optim.max_norm",
                                  norm, result.loss, fmt::join(environments(rows), ", ")));
  if (max_norm) result.grad_norm = norm;
  result.zero_grad_ratio = among_shards(
      [&](comm::Communicator& group) { return zero_grad_ratio(policy_.context(), policy_.parameters(), own_grads, shard_->plan, group); });
  if (policy_.head() != nullptr) result.head = policy_.head()->step();
  result.lr_used = schedule_.at(num_scheduled_);
  update_weights(own_grads, clip_scale(norm, max_norm), result.lr_used, version);
  result.lr_next = schedule_.at(++num_scheduled_);
  const std::uint64_t done = watch_->mark();
  policy_.context().runtime->synchronize();
  result.forward_backward_s = watch_->seconds(started, has_gradient);
  result.optimizer_s = watch_->seconds(has_gradient, done);
  add_spans(begin, result, version, policy_.context().runtime->device());
  return result;
}

void GradientStep::end_export() {
  exporter_->finish();
  if (ranks().size() > 1) ranks().gather_number(0, {.what = "the export of token values"});
  if (ranks().rank() == 0) exporter_->mark_stable();
  exporter_.reset();
}

void GradientStep::update_weights(const Tensor& own_grads, double grad_scale, double lr, PolicyVersion version) {
  (void)policy_.weights();  // a rank that had no row may still wait for them
  const Tensor rounded = shard_->brings_trained() ? Tensor() : policy_.room_for_weights();
  shard_->optimizer.step(lr, grad_scale, rounded, own_grads);
  gather_weights(rounded, version);
}

void GradientStep::gather_weights(const Tensor& rounded, PolicyVersion version) {
  if (shard_->brings_trained()) {
    shard_->layers->take_masters(policy_);
    return policy_.refresh(version);
  }
  if (shard_->gather != nullptr) return policy_.refresh(version, shard_->gather->start(rounded));
  if (shards().size() > 1)
    among_shards([&](comm::Communicator& group) {
      for (const ShardPlan::Section& section : shard_->plan.sections()) {
        const ElementRange own = section.parts[static_cast<std::size_t>(group.rank())];
        group.all_gather(rounded.slice(section.range.begin, section.range.count()).view(), section.counts(),
                         rounded.slice(own.begin, own.count()).view(), {.what = "new weights"});
      }
    });
  policy_.refresh(version, {.values = rounded, .parts = {}, .await = {}});
  // Where weights were only queued a rank may be lost until now.
  among_shards([](comm::Communicator& group) { group.settle({.what = "new weights"}); });
}

void GradientStep::refresh_weights(PolicyVersion version) {
  shard_->bring_weights();
  const Tensor rounded = shard_->brings_trained() ? Tensor() : policy_.room_for_weights();
  if (rounded.defined())
    for (const ElementRange held : policy_.parameters().held().ranges()) policy_.round(held, rounded.slice(held.begin, held.count()));
  gather_weights(rounded, version);
}

}  // namespace prl::trainer
