#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

namespace prl {

/// What whoever watches a run wants of it, as files in a folder that all of its roles look at: to pause, to make a checkpoint now. Reading
/// takes a microsecond, so loops may ask in each round. Any thread.
class RunOrders {
 public:
  /// Of a run without such a folder: there are never any orders.
  RunOrders() = default;
  /// The orders of the run in `run_folder`, if it takes any.
  static RunOrders of(const std::filesystem::path& run_folder);
  /// Makes the folder, empty: the run takes orders from now on. Error{kIo}.
  static RunOrders open(const std::filesystem::path& run_folder);
  /// Removes it: the run takes none.
  static void close(const std::filesystem::path& run_folder);

  bool is_taken() const noexcept { return !folder_.empty(); }

  /// Error{kIo}.
  void set_paused(bool is_paused) const;
  bool is_paused() const noexcept;

  /// Asks for a checkpoint. Error{kIo}.
  void ask_for_checkpoint() const;
  bool wants_checkpoint() const noexcept;
  /// The role that chooses the step: each role saves its part of the checkpoint after `step`, which none of them has reached. The wish is
  /// fulfilled. Error{kIo}.
  void set_checkpoint_step(std::int64_t step) const;
  std::optional<std::int64_t> checkpoint_step() const noexcept;

 private:
  explicit RunOrders(std::filesystem::path folder) : folder_(std::move(folder)) {}
  std::filesystem::path folder_;  ///< empty: none
};

}  // namespace prl
