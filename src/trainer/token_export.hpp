#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "trainer/loss/token_streams.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// One packed sequence after its loss was formed, as losses see it.
struct SequenceValues {
  const wire::MicroBatch& row;
  std::size_t sequence = 0;  ///< within the row
  std::size_t first = 0;     ///< its first token in the row
  const TokenStreams& streams;
  const TokenMarks& marks;
  std::span<const float> entropy;  ///< of the distribution that drew token i, at i; [n]
};

/// Per-token values of a step as the trainer computed them: <folder>/step_N/rank_R.jsonl with one JSON object per packed sequence that
/// has tokens in a loss, and an empty file STABLE beside it once every rank has written its own. Values that are not finite or not computed
/// (tokens without a loss) are null. One thread.
class TokenExporter {
 public:
  TokenExporter(std::filesystem::path folder, std::int64_t step, int rank);
  /// What follows is of row number `micro_step` of the step.
  void begin_row(std::int64_t micro_step) noexcept { micro_step_ = micro_step; }
  void add(const SequenceValues& values);
  /// All of this rank is in the file. Error{kIo}.
  void finish();
  /// By one rank, when all have finished. Error{kIo}.
  void mark_stable() const;

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path folder_;  ///< of the step
  std::filesystem::path path_;
  std::int64_t step_;
  int rank_;
  std::unique_ptr<std::FILE, Closer> file_;
  std::int64_t micro_step_ = 0, num_sequences_ = 0;
};

}  // namespace prl::trainer
