#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/background_saver.hpp"
#include "io/checkpoint_dir.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"

namespace prl::trainer {

/// What a trainer checkpoint and its Hugging Face snapshot hold, where they go, and which survive.
struct CheckpointOptions {
  std::filesystem::path checkpoints;     ///< <output_dir>/checkpoints: step_N/trainer, see TrainerCheckpoints
  std::filesystem::path weights;         ///< <output_dir>/weights: step_N/, a servable model in the compute dtype
  nn::Companions companions;             ///< tokenizer files and chat template that go with the weights
  std::optional<std::int64_t> interval;  ///< none: only the final one
  std::optional<std::int64_t> keep_last, keep_interval;
  std::vector<std::string> units{"trainer"};  ///< roles whose parts make a step complete; only complete ones count for retention
  bool save_weights = true;
  bool save_adapter = false;  ///< beside the merged weights of a run that trains an adapter, the adapter itself: step_N/lora_adapters
  bool weights_only = false;
  bool save_async = false;
  std::uint64_t max_shard_bytes = 5'000'000'000ULL;
  bool may_write = true;  ///< false at ranks other than 0, which take part in saves and leave the folders alone
};

/// What a resume takes over.
struct ResumeOptions {
  std::int64_t step = -1;                     ///< -1: the latest; none found then means a fresh start
  std::vector<std::string> units{"trainer"};  ///< roles whose parts of the checkpoint must be complete
  bool skip_progress = false, skip_scheduler = false, skip_optimizer = false, skip_data = false;
};

/// Counters that go with the weights.
struct TrainProgress {
  std::int64_t step = 0;  ///< optimizer steps that made the weights
  std::int64_t total_tokens = 0;
  std::int64_t total_samples = 0;
  std::int64_t num_optimizer_steps = 0, num_scheduled = 0;
  std::int64_t data_position = 0;            ///< SFT: samples of the endless stream taken so far
  std::vector<std::int64_t> data_pending{};  ///< SFT: positions of those that were in no row yet (PackerState)
  std::string optimizer_type;
};
std::string to_json(const TrainProgress& progress);
/// Error{kCorrupt} naming `source` and the key.
TrainProgress parse_progress(std::string_view json, std::string_view source);

inline constexpr const char* kTrainerUnit = "trainer";
inline constexpr const char* kProgressFile = "progress.json";
inline constexpr const char* kAdapterFolder = "lora_adapters";
/// Renames a snapshot that was written under a temporary name. It replaces one of the same step, which a run left that ended
/// before the step's checkpoint was complete.
void publish_weights(const std::filesystem::path& fresh, const std::filesystem::path& weights);
/// The retention of checkpoints for the snapshots in `root`, which are each complete by themselves.
void clean_weights(const std::filesystem::path& root, const io::CheckpointRetention& retention);

class SharedSave;

/// Saves and restores a trainer. One thread; files may be written by a background thread.
///
/// One rank writes model.safetensors and optimizer.safetensors, several rank_R.safetensors each and layout.json (state_files.hpp); both
/// are read by any number of ranks. The snapshot of several ranks is in as many shards at least, whole layers each.
class TrainerCheckpoints {
 public:
  explicit TrainerCheckpoints(CheckpointOptions options);
  ~TrainerCheckpoints();

  /// True after step `step` if the interval asks for one; the last step is left to the final checkpoint.
  bool is_due(std::int64_t step, std::optional<std::int64_t> max_steps) const noexcept;
  /// Writes weights/step_N and checkpoints/step_N/trainer, then removes what retention does not keep. With save_async the
  /// state is copied and written while training goes on; an error of it is thrown by the next call. `before_commit` is called on this
  /// thread before the checkpoint counts: what must not be missing beside it goes to disk there. All ranks call this and write their parts;
  /// without save_async it returns when rank 0 has seen all of them and the checkpoint counts. PeerLost.
  void save(std::int64_t step, TrainProgress progress, Policy& policy, const GradientStep& gradient_step,
            const std::function<void()>& before_commit = {});
  /// Waits for a save in the background and rethrows its error.
  void finish();
  /// The same for all ranks, which call it: that one of them is lost is noticed at once. PeerLost.
  void finish(comm::Communicator& ranks);
  /// After a loss that ends the run: a save in the background waits no more for those ranks, which are gone.
  void give_up_on(const comm::PeerLost& lost);
  /// All ranks of a new group call it: a save in the background is given up if `has_lost` a rank, and saved is what is complete. PeerLost.
  void regroup(comm::Communicator& ranks, bool has_lost);
  std::optional<std::int64_t> last_saved() const noexcept { return last_saved_; }

 private:
  void save_shared(const TrainProgress& progress, Policy& policy, const GradientStep& gradient_step,
                   const std::function<void()>& before_commit);

  CheckpointOptions options_;
  std::shared_ptr<SharedSave> shared_;  ///< the one in the background
  io::BackgroundSaver saver_;
  std::optional<std::int64_t> last_saved_;
};

/// Step to resume from, or nullopt for a fresh start (with a warning). Error{kNotFound} naming the folder for a step that is not
/// there; Error{kCorrupt} for a damaged one, and for "latest" when there are checkpoints but each is damaged.
std::optional<std::int64_t> find_resume_step(const std::filesystem::path& checkpoints, const ResumeOptions& resume);
/// Loads masters, optimizer and counters of a verified checkpoint and packs the weights as version `step`.
TrainProgress restore(const std::filesystem::path& checkpoints, std::int64_t step, const ResumeOptions& resume, Policy& policy,
                      GradientStep& gradient_step);

}  // namespace prl::trainer
