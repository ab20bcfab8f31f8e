#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/mesh.hpp"
#include "config/loss_config.hpp"
#include "config/optim_config.hpp"
#include "trainer/context_group.hpp"
#include "trainer/expert_group.hpp"
#include "trainer/gradient_exchange.hpp"
#include "trainer/layer_gather.hpp"
#include "trainer/loss/batch_loss.hpp"
#include "trainer/metric_pool.hpp"
#include "trainer/optim/optimizer.hpp"
#include "trainer/optim/schedule.hpp"
#include "trainer/policy.hpp"
#include "trainer/weight_gather.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

struct GradientStepOptions {
  config::LossConfig loss = {};
  LossFunction loss_function = {};  ///< what computes a loss of type custom
  config::OptimConfig optim = {};
  OptimizerMemory optimizer_memory = {};
  config::SchedulerConfig scheduler = {};
  std::optional<std::int64_t> max_steps = std::nullopt;
  /// Leave a row whose loss is not finite out of the step (and count it) instead of failing; the step still fails if no row is left.
  bool skip_non_finite_rows = false;
  /// The ranks that train together, borrowed; nullptr: this one alone. All of them make the same calls with the same rows.
  comm::Mesh* mesh = nullptr;
  Reduce reduce = Reduce::kExact;
  int num_ranks = 1;  ///< that will train together, for plans of memory made before they meet
  /// Replica groups, each of which holds the whole state; new weights are gathered within a group. Must divide the number of ranks; if it
  /// no longer does after ranks were lost, the step continues with a single group.
  int num_replicas = 1;
  /// How rows are cut, and how many neighbouring ranks share one. A group that lost a rank goes on with fewer to a row, if it must.
  RowCut cut = {};
  /// Gradients of a layer are sent while those of the next are formed (GradientExchange), and new weights gathered under the next forward
  /// pass (WeightGather).
  bool overlaps_exchange = false;
  /// What was found of each token of a step goes there (TokenExporter); empty: nowhere.
  std::filesystem::path token_exports = {};
};

/// What one optimizer step did, of all ranks and the same at each. Times in seconds.
struct GradientStepResult {
  double loss = 0;                  ///< of the whole step, divided by global counts
  std::optional<double> grad_norm;  ///< before clipping; absent without a max_norm
  std::optional<double> zero_grad_ratio;
  double lr_used = 0, lr_next = 0;
  std::int64_t num_tokens = 0;           ///< in all rows, padding included
  std::int64_t num_non_finite_rows = 0;  ///< left out of the loss, the gradient and the token counts that divide them
  double forward_backward_s = 0, optimizer_s = 0;
  double flops = 0;                             ///< of forward and backward over the rows that were trained (training_flops)
  std::optional<MtpTraining::StepResult> head;  ///< of the head that is trained beside the policy
  MetricPool pool;                              ///< per-token and per-sequence metrics, and "loss" per row
};

/// Floating-point operations that forward and backward over a row need: 6 per matrix weight and token, for the head per token that is a
/// target, and 12 * attended_width() * attended_keys(n) (ModelConfig) per token of a sequence of n for attention. Recomputed activations do
/// not count. With `trained`, the tensors of an adapter and the modules that are trained beside it, weights that are not trained need 4.
double training_flops(const nn::ModelConfig& model, const wire::MicroBatch& row, std::span<const std::int32_t> targets,
                      const nn::TensorTable* trained = nullptr);

/// The order in which rows are trained on, as indices: the costliest first, so that the rows of a round, which ranks take side by side,
/// cost alike. Depends on the rows alone.
std::vector<std::size_t> balanced_order(const nn::ModelConfig& model, std::span<const wire::MicroBatch> rows);

/// One optimizer step over packed rows: global token counts, gradient accumulation, clipping, optimizer, schedule, new packed
/// weights. The same code serves RL and SFT; they differ in the streams of the rows.
///
/// Ranks    each runs its rows of balanced_order() in turn, steps the values that it owns (ShardPlan), and gathers those of
/// the
///          others. With Reduce::kExact the weights after a step are the same bits on any number of ranks.
class GradientStep {
 public:
  GradientStep(Policy& policy, GradientStepOptions options);

  /// Every rank calls it before its first run(), and in a new group. Error{kInvalidArgument} if the ranks' devices differ, so that their
  /// kernels may round differently; PeerLost.
  void check_ranks() const;

  /// All `rows` of the step, at every rank; `version` is what the weights become. Error{kNonFinite} says which row's environment, or which
  /// environments were in the batch when a gradient overflowed; masters and optimizer are then unchanged. PeerLost; an error of this
  /// rank ends the group of ranks and is told to the others, unless it is a SharedError, as those of losses and norms are.
  GradientStepResult run(std::span<const wire::MicroBatch> rows, PolicyVersion version);

  comm::Communicator& ranks() const noexcept { return mesh().world(); }
  /// Those that share the state: a copy of it each, if there are several.
  comm::Communicator& shards() const noexcept { return mesh().along(comm::Axis::kShard); }
  const ShardPlan& shard_plan() const noexcept { return shard_->plan; }
  /// Continues with the ranks of another group, over which the state is sharded again. The optimizer's state is zero then, and so are
  /// masters that this rank did not hold before, until they are restored (peer_snapshot.hpp).
  void move_to(std::unique_ptr<comm::Communicator> group);
  /// Every rank calls it after its masters were restored: their weights become `version`. PeerLost.
  void refresh_weights(PolicyVersion version);
  /// Ends the group for this rank; the others are told `reason`.
  void abort(std::string_view reason) noexcept;
  /// True at every rank if it is at one. A rank that is told to stop takes the others along between two steps.
  bool is_any_rank(bool claim) const;

  /// Called with how many of this rank's rows of a step are done, after each. The callback outlives the last step.
  void on_row(std::function<void(std::int64_t done, std::int64_t total)> callback) { on_row_ = std::move(callback); }

  Optimizer& optimizer() noexcept { return shard_->optimizer; }
  const Optimizer& optimizer() const noexcept { return shard_->optimizer; }
  const LrSchedule& schedule() const noexcept { return schedule_; }
  /// Optimizer steps of the schedule so far; differs from the optimizer's own count when a resume skips either.
  std::int64_t num_scheduled() const noexcept { return num_scheduled_; }
  void restore_num_scheduled(std::int64_t n) noexcept { num_scheduled_ = n; }
  /// Starts the schedule anew over the steps that remain after `num_done`.
  void restart_schedule(std::int64_t num_done);

 private:
  /// What a row adds to the result of the step.
  struct RowResult {
    bool is_finite = true;
    std::optional<Error> error = {};  ///< why the row has no loss; the step ends with it once all ranks know of it
    double loss = 0;
    MetricPool pool;
  };
  /// What depends on who the ranks are.
  struct Shard {
    Shard(Policy& policy, const GradientStepOptions& options, comm::Mesh& mesh);
    ~Shard();
    Policy& trained;
    std::unique_ptr<ContextGroup> context;  ///< who shares rows with this rank
    int ranks_per_row() const noexcept { return context != nullptr ? context->size() : 1; }
    bool is_first_of_row() const noexcept { return context == nullptr || context->rank() == 0; }
    /// A loss that was noticed in one group ends all: ranks wait for this one there.
    void give_up_on(const comm::PeerLost& lost) noexcept;
    void abort(std::string_view reason) noexcept;
    /// After an error: waits for what is under way and forgets it.
    void settle() noexcept;
    comm::Mesh& mesh;
    ShardPlan plan;
    bool overlaps;
    /// All ranks call it; once is enough. The groups that it makes come with the first work, so that a rank lost by then is one lost in it.
    void bring_weights();
    std::optional<ShardPlan> base_plan;   ///< of a base whose layers are brought, under adapters
    std::unique_ptr<LayerGather> layers;  ///< if the policy has layered weights, after that
    /// Whether new weights are of layers that are brought.
    bool brings_trained() const noexcept { return layers != nullptr && !base_plan; }
    std::unique_ptr<WeightGather> gather;  ///< else if new weights are gathered beside other work
    std::unique_ptr<ExpertGroup> experts;  ///< if ranks divide them, with the first work too
    std::vector<MemberGroup*> groups_of_weights() const;
    GradientExchange exchange;
    Optimizer optimizer;
  };
  comm::Mesh& mesh() const noexcept { return own_mesh_ != nullptr ? *own_mesh_ : *options_.mesh; }
  /// work(shards()), with ranks in errors as the world counts them.
  template <typename Work>
  auto among_shards(const Work& work) const;
  GradientStepResult run_on_ranks(std::span<const wire::MicroBatch> rows, PolicyVersion version);
  /// Forward and backward over the rows that are not left out. False if a row's loss was not finite: it is left out from now on, and
  /// the gradients must be formed once more. SharedError with that of the first row that has one.
  bool add_gradients(std::span<const wire::MicroBatch> rows, std::vector<bool>& is_left_out, GradientStepResult& result);
  RowResult train_on(const wire::MicroBatch& row, std::size_t index, const LossCounts& counts);
  /// The results of all rows in the order of leaves, from those of this rank's.
  std::vector<RowResult> gather_results(std::vector<RowResult> mine, std::size_t num_leaves) const;
  void end_export();
  void update_weights(const Tensor& own_grads, double grad_scale, double lr, PolicyVersion version);
  /// `rounded` has this rank's own of the new weights.
  void gather_weights(const Tensor& rounded, PolicyVersion version);

  Policy& policy_;
  GradientStepOptions options_;
  std::unique_ptr<comm::Mesh> own_mesh_;  ///< if options.mesh is none, and after move_to()
  std::unique_ptr<Shard> shard_;
  LrSchedule schedule_;
  std::int64_t num_scheduled_ = 0;
  std::unique_ptr<Stopwatch> watch_;
  std::function<void(std::int64_t done, std::int64_t total)> on_row_;
  std::optional<TokenExporter> exporter_;  ///< of the step under way
};

}  // namespace prl::trainer
