#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace prl::launch {

/// Rules of an output folder: which names in it are a run's, whose run it is, and what may be removed or moved away.
///
/// run.json says that a command of this program keeps its records here. Without it nothing is ever removed: the names may be the user's
/// own. With it, cleaning removes our names alone; other files, and folders that are links, stay. A caller that removes or moves holds
/// the RunLock of the folder and has validated everything else before.
class OutputFolder {
 public:
  static constexpr const char* kMarkerName = "run.json";
  /// `saved` is the folder with checkpoints/ and weights/ if it is another one (ckpt.output_dir). Reads run.json; Error{kCorrupt}.
  explicit OutputFolder(std::filesystem::path root, std::filesystem::path saved = {}, std::filesystem::path metrics_file = "metrics.jsonl");

  const std::filesystem::path& root() const noexcept { return root_; }
  const std::filesystem::path& saved() const noexcept { return saved_; }
  std::filesystem::path checkpoints() const { return saved_ / "checkpoints"; }
  std::filesystem::path weights() const { return saved_ / "weights"; }
  std::filesystem::path metrics() const { return root_ / metrics_file_; }

  /// What commands have recorded here, in words ("checkpoints in X", "metrics.jsonl", ...); empty if nothing would mix with a new run.
  std::vector<std::string> records() const;
  bool is_marked() const noexcept { return is_marked_; }
  /// Whether a command of this kind ("rl", "sft", "eval", "synthesize") has worked here; true as well where nothing says whose it is.
  bool may_be_of(const std::string& kind) const;
  /// The records are a benchmark's, which nobody keeps.
  bool is_bench() const noexcept { return is_bench_; }
  /// In words: "another run (of `prl rl`, `prl eval`)".
  std::string owner() const;

  /// Writes run.json. Adds the kind; of a folder without records "rl" and "sft" become the only one.
  void claim(const std::string& kind, bool is_bench = false);
  /// Removes every record, log and configuration of ours. Error{kInvalidArgument} if there are records and no run.json.
  void clean();

  struct Dropped {
    std::vector<std::int64_t> checkpoints, half_checkpoints, weights, rollouts;
    std::int64_t num_rows = 0, num_damaged_rows = 0;
    std::filesystem::path moved_to;  ///< empty: removed
    /// "checkpoints 10, 12; weights 10, 12; rollouts 9 to 13; 10 rows of metrics.jsonl"; empty if nothing was dropped.
    std::string describe() const;
  };
  /// Takes away what was made after `step`, so that a resumed run neither mixes with it nor falls back to it: checkpoints, snapshots,
  /// rollouts, rows of `roles` in the metrics, broadcasts of `step` and later (the trainer publishes `step` anew, unless
  /// `keeps_broadcast`), and steps that lack one of `units`. If whole checkpoints or snapshots are among it, or NEVER_CLEAN is set, all but
  /// the rows and the incomplete steps is moved to abandoned_after_step_N beside it.
  Dropped drop_after(std::int64_t step, std::span<const std::string> units, std::span<const std::string> roles,
                     bool keeps_broadcast = false) const;
  /// The same for a trainer that was started by itself: another role may be writing here, so only whole checkpoints, snapshots and the
  /// trainer's own rows go.
  Dropped drop_own_after(std::int64_t step, std::span<const std::string> units, std::span<const std::string> roles) const;
  /// Whether a step holds the part of this role.
  bool holds_unit(const std::string& unit) const;
  /// Steps of weights/, ascending.
  std::vector<std::int64_t> snapshots() const;
  /// Removes temporary files and folders of ours. No process that writes here may be alive.
  void remove_temporaries() const;

 private:
  void read_marker();
  Dropped drop(std::int64_t step, std::span<const std::string> units, std::span<const std::string> roles, bool is_alone,
               bool keeps_broadcast) const;
  std::filesystem::path root_, saved_;
  std::filesystem::path metrics_file_;
  bool is_marked_ = false, is_bench_ = false;
  std::string id_;
  std::vector<std::string> kinds_;
  std::filesystem::path marked_saved_;
  std::string marked_metrics_;
};

/// "4, 8 and 12"; more than a dozen are cut in the middle.
std::string list_of_steps(std::span<const std::int64_t> steps);

}  // namespace prl::launch
