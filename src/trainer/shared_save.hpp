#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint_dir.hpp"
#include "io/tensor_file.hpp"
#include "nn/layered_weights.hpp"
#include "nn/weights.hpp"
#include "trainer/checkpoint.hpp"
#include "trainer/state_files.hpp"

namespace prl::trainer {

/// One checkpoint and snapshot that several ranks write together, each its own part, into folders that rank 0 makes under temporary names
/// and gives their final ones once every part is there: what is not whole is never seen.
class SharedSave {
 public:
  /// All ranks call it. With `copies`, what is to be written is copied to host memory, so that training may go on. PeerLost, Error{kIo}.
  SharedSave(const CheckpointOptions& options, const TrainProgress& progress, Policy& policy, const GradientStep& gradient_step,
             bool copies);
  /// At rank 0: removes what was not committed.
  ~SharedSave();
  SharedSave(const SharedSave&) = delete;
  SharedSave& operator=(const SharedSave&) = delete;

  /// Writes this rank's part. What came of it, for rank 0; an error too. May run on another thread.
  std::string write() noexcept;
  /// At rank 0: with what write() returned at every rank. Error{kIo} with the error of a rank.
  void commit(std::span<const std::string> notes, const std::function<void()>& before_commit);
  /// The same for threads whose ranks do not talk: write(), and commit() at rank 0 once the others have left word in the folder. Error
  /// {kDeadline} names who has not.
  void write_and_commit();
  /// From any thread: write_and_commit() waits no more and throws Error{kCancelled}.
  void cancel() noexcept { is_cancelled_ = true; }
  /// From any thread: those ranks have died, so that no part of theirs is waited for that is not there yet. Parts of the others are.
  void give_up_on(std::span<const int> ranks);

 private:
  std::filesystem::path meeting_folder() const { return unit_folder_.empty() ? weights_folder_ : unit_folder_; }
  std::filesystem::path note_file(int rank) const;
  std::vector<std::string> wait_for_notes(std::string mine) const;
  /// Whoever of the others was lost before its part was there: no use to wait for any then.
  std::optional<int> lost_without_a_part() const;
  std::string wait_for_note(int rank, std::chrono::steady_clock::time_point end) const;
  void copy_parts(Policy& policy, const Optimizer& optimizer, bool copies);
  void make_folders();
  /// Of weights that all ranks have a part in: what this rank writes, in host memory.
  std::vector<nn::WeightSource> copy_layers(nn::LayeredWeights& layered) const;
  nn::WeightFileOptions file_options() const;

  CheckpointOptions options_;
  TrainProgress progress_;
  int rank_ = 0, size_ = 1;
  bool writes_state_ = true;  ///< false if another rank holds the same
  std::chrono::milliseconds timeout_{};
  StateLayout layout_;
  nn::WeightsPtr weights_;                 ///< of the snapshot
  std::vector<nn::WeightSource> sources_;  ///< what is written of it
  nn::TensorTablePtr table_;               ///< of what is trained
  std::vector<io::NamedTensor> parts_;     ///< what this rank owns, as vectors
  std::filesystem::path unit_folder_, weights_folder_;
  std::unique_ptr<io::CheckpointWriter> writer_;  ///< rank 0
  bool has_weights_ = false;                      ///< rank 0: the snapshot has its final name
  std::atomic<bool> is_cancelled_{false};
  std::unique_ptr<std::atomic<bool>[]> is_lost_;  ///< of each rank
};

}  // namespace prl::trainer
