#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nn/decoder.hpp"
#include "trainer/optim/optimizer.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

struct MtpTrainingOptions {
  double lr = 1e-4;     ///< of AdamW, constant
  bool init = false;    ///< begin with a new head where the model has none
  double max_norm = 1;  ///< of the head's gradient
};

/// Trains a head for multi-token prediction (nn/mtp_head.hpp) beside a policy, by cross entropy of the token after the next one, over the
/// tokens that the policy is trained on. It reads the policy's hidden states, embedding and output head, and gives them no gradient: the
/// policy's bits do not depend on it. One rank. One thread.
class MtpTraining {
 public:
  /// Of a model with ModelConfig::mtp. Error{kCorrupt|...} from reading the head in `folder`.
  MtpTraining(ops::OpContext& ctx, const nn::ModelConfig& model, const MtpTrainingOptions& options, std::uint64_t seed);
  /// The masters as weights of a head of `model`.
  nn::WeightsPtr weights_of(const nn::Weights& model) const;

  /// Forgets what rows have added.
  void start_step();
  /// The row that add_row() is of, whole. `targets_T`: what the policy predicts at each position, -1 for nothing.
  void read_row(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T);
  /// Forward and backward over it; the policy has computed its hidden states [T, H] with `model`, which has the head.
  void add_row(const nn::WeightsPtr& model, ConstTensorView hidden_TH);
  struct StepResult {
    std::int64_t num_tokens = 0;  ///< that were guessed; 0: the step had none, and changed nothing
    double loss = 0;              ///< mean, nats
    double grad_norm = 0;         ///< of the mean's gradient, before it is cut to max_norm
  };
  /// Steps the masters. A gradient that is not finite is left out, with a warning.
  StepResult step();

  nn::Parameters& parameters() noexcept { return *parameters_; }
  const nn::Parameters& parameters() const noexcept { return *parameters_; }
  Optimizer& optimizer() noexcept { return *optimizer_; }
  /// As a checkpoint has it: masters, then the optimizer's state. `copies` that may be written while training goes on.
  struct State {
    std::vector<io::NamedTensor> masters, optimizer;
    std::shared_ptr<const nn::Parameters> owned = {};  ///< what `masters` lie in, if they are copies
  };
  State state(bool copies) const;
  /// From the folder of a checkpoint, of a run of so many steps. False if it has no head. Error{kCorrupt}.
  bool load(const std::filesystem::path& folder, std::int64_t num_steps, bool has_optimizer);

 private:
  /// What a head guesses in a row, and what it reads beside hidden states: both of the next position.
  struct Row {
    std::vector<std::int32_t> ids, positions, targets, cu_seqlens;
    std::int64_t num_targets = 0;
  };
  ops::OpContext& ctx_;
  MtpTrainingOptions options_;
  std::unique_ptr<nn::Parameters> parameters_;
  std::unique_ptr<nn::TrainableModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  Row row_;
  std::int64_t num_tokens_ = 0;  ///< of the step under way
  double loss_ = 0;
};

inline constexpr const char* kMtpMastersFile = "mtp.safetensors";
inline constexpr const char* kMtpOptimizerFile = "mtp_optimizer.safetensors";

}  // namespace prl::trainer
