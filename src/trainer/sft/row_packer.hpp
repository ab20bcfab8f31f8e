#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/sft/sample_stream.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// Packs a stream into rows of at most `capacity` tokens, in order. A sample that does not fit opens the next row, so nothing is
/// cut that could have been whole, and the state is one position. Rows train by cross entropy: ce weight 1 on targets. env_names holds the
/// part of the stream that each sample is of.
class RowPacker {
 public:
  /// `stream` is borrowed. `capacity` = micro_batch_size * seq_len.
  RowPacker(SampleStream& stream, std::int64_t capacity, std::int64_t position = 0);
  /// The next row. Error{kInvalidArgument} if a whole epoch holds no trainable sample.
  wire::MicroBatch next();
  /// The next row that ends before `end` of the stream; nullopt when nothing is left (one validation pass).
  std::optional<wire::MicroBatch> next_until(std::int64_t end);
  /// Samples of the stream taken so far, skipped ones included.
  std::int64_t position() const noexcept { return position_; }
  void seek(std::int64_t position) { position_ = position; }

 private:
  SampleStream& stream_;
  std::vector<std::string> part_names_;
  std::int64_t capacity_;
  std::int64_t position_;
};

}  // namespace prl::trainer
