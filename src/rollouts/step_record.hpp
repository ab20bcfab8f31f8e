#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "rollouts/sample_queue.hpp"

namespace prl::rollouts {

/// What one optimizer step was, so that it can be taken again: with the same weights before, the same samples and the same settings a
/// trainer makes the same weights, whatever order and mix of versions they were sampled in.
struct StepRecord {
  std::uint64_t weights_before = 0;  ///< checksums of all tensors in compute dtype (weights::WeightManifest)
  std::uint64_t weights_after = 0;
  std::string machine;  ///< that trained it, in words: other kernels round in other ways
  RankBatch batch;      ///< of all ranks
};

/// <run>/rollouts/step_N/recorded_batch.bin.
std::filesystem::path step_record_file(const std::filesystem::path& run, std::int64_t step);
/// Writes the record whole or not at all, with a checksum. Error{kIo}.
void write_step_record(const std::filesystem::path& run, const StepRecord& record);
/// nullopt if the step has none. Error{kCorrupt} naming the file.
std::optional<StepRecord> read_step_record(const std::filesystem::path& run, std::int64_t step);

/// The recorded steps from `first` to `last`, or as long as there are any, as the queue that a trainer takes its samples from. Each begins
/// with the weights that the one before made; one that does not, which a resume left behind, ends them.
class RecordedSteps final : public SampleReceiver {
 public:
  /// Error{kNotFound} if `first` has no record.
  RecordedSteps(std::filesystem::path run, std::int64_t first, std::optional<std::int64_t> last);
  std::optional<RankBatch> pop(std::chrono::milliseconds timeout) override;
  bool is_closed() const override { return !next_.has_value(); }
  std::string describe() const override;

 private:
  void read(std::int64_t step);
  std::filesystem::path run_;
  std::optional<std::int64_t> last_;
  std::optional<StepRecord> next_;  ///< none: at the end
  std::int64_t step_ = 0;           ///< of the last one read
};

}  // namespace prl::rollouts
