#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "rollouts/step_record.hpp"

namespace prl::trainer {

/// Writes what each step trained on and made into the folder of the run (rollouts/step_record.hpp). One thread.
class StepRecorder {
 public:
  StepRecorder(std::filesystem::path run, std::string machine) : run_(std::move(run)), machine_(std::move(machine)) {}
  /// The weights after `step` have this checksum; `batch` is what that step trained on, or null where the run begins. A step is left out
  /// if the weights before it were not told.
  void record(std::int64_t step, const rollouts::RankBatch* batch, std::uint64_t weights);

 private:
  std::filesystem::path run_;
  std::string machine_;
  std::optional<std::int64_t> step_;  ///< whose weights are known
  std::uint64_t weights_ = 0;
};

/// Holds the weights of a run that trains on another's records against those that the other one made. One thread.
class Replay {
 public:
  /// `run` has the records; `machine` is this one. `must_agree`: other weights end the run.
  Replay(std::filesystem::path run, std::string machine, bool must_agree)
      : run_(std::move(run)), machine_(std::move(machine)), must_agree_(must_agree) {}
  /// The weights after `step` have this checksum; first called for the step that the run goes on from. The first that differ are logged, or
  /// Error{kOutOfSync} if all must agree; what it says names both machines.
  void check(std::int64_t step, std::uint64_t weights);
  std::int64_t num_same() const noexcept { return num_same_; }
  /// The first step whose weights are others; nullopt: all are those recorded.
  std::optional<std::int64_t> first_other() const noexcept { return first_other_; }

 private:
  std::filesystem::path run_;
  std::string machine_;
  bool must_agree_;
  bool has_begun_ = false;
  std::int64_t num_same_ = 0;  ///< steps taken to the same weights
  std::optional<std::int64_t> first_other_;
};

}  // namespace prl::trainer
