#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/sft_config.hpp"
#include "trainer/sft/sample_stream.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// Where a packer is in its stream: what a resume needs.
struct PackerState {
  std::int64_t position = 0;            ///< samples of the stream taken so far, skipped ones included
  std::vector<std::int64_t> pending{};  ///< positions of those that are in no row yet, ascending
};

/// Makes rows of the samples of a stream. Rows train by cross entropy: ce weight 1 on targets. env_names holds the part of the stream that
/// each sample is of, and nothing for a sequence that only fills a row up.
class Packer {
 public:
  virtual ~Packer() = default;
  /// The next row. Error{kInvalidArgument} if a whole epoch holds no trainable sample.
  wire::MicroBatch next();
  /// The next row of samples before `end` of the stream; nullopt when nothing is left (one validation pass).
  virtual std::optional<wire::MicroBatch> next_until(std::int64_t end) = 0;
  virtual PackerState state() const = 0;
  /// Goes on from a state, also one that another kind of packer left.
  virtual void seek(PackerState state) = 0;
};

/// As data.pack_function says. `stream` is borrowed. `capacity` = micro_batch_size * seq_len. Error{kInvalidArgument} naming the key.
std::unique_ptr<Packer> make_packer(config::PackFunction function, SampleStream& stream, std::int64_t capacity);

/// Packs a stream into rows of at most `capacity` tokens, in order ("cat"). A sample that does not fit opens the next row, so nothing is
/// cut that could have been whole, and the state is one position.
class RowPacker final : public Packer {
 public:
  RowPacker(SampleStream& stream, std::int64_t capacity, std::int64_t position = 0);
  std::optional<wire::MicroBatch> next_until(std::int64_t end) override;
  PackerState state() const override { return {.position = position_}; }
  /// Pending samples of another packer are trained on once more together with what followed them.
  void seek(PackerState state) override { position_ = state.pending.empty() ? state.position : state.pending.front(); }

 private:
  SampleStream& stream_;
  std::vector<std::string> part_names_;
  std::int64_t capacity_;
  std::int64_t position_;
};

/// Fills samples up to one of a few lengths and stacks those of one length ("stack"): each row is capacity / length samples of at most
/// `length` tokens, so all rows have `capacity` tokens, with more or less filling.
///
///   1. The lengths, called buckets, are capacity, capacity / 2, capacity / 4, ..., as far as they are multiples of config::kStackUnit. A
///   sample goes to the
///      shortest bucket that holds it.
///   2. A bucket whose samples fill a row makes one.
///   3. A bucket whose first sample has waited for 10 samples of the stream makes a row as it is. It takes the samples of longer buckets
///      along as far as all of them fit in one row of that length; what is missing is filled up.
///
/// Each sample is a sequence of its own, and so is the filling behind it: no token sees filling, so losses are those of "cat".
class StackPacker final : public Packer {
 public:
  StackPacker(SampleStream& stream, std::int64_t capacity);
  std::optional<wire::MicroBatch> next_until(std::int64_t end) override;
  PackerState state() const override;
  void seek(PackerState state) override;

  /// Samples of the stream for which a bucket waits to be full.
  static constexpr std::int64_t kPatience = 10;

 private:
  struct Waiting {
    std::int64_t position;
    SftSample sample;
  };
  struct Bucket {
    std::int64_t length = 0;
    std::vector<Waiting> samples{};
  };
  Bucket& bucket_of(const SftSample& sample);
  /// The one with the sample that has waited longest; nullptr if none waits.
  Bucket* oldest();
  /// A row of the bucket's samples, by rule 3 where they do not fill one.
  wire::MicroBatch flush(Bucket& bucket);

  SampleStream& stream_;
  std::vector<std::string> part_names_;
  std::int64_t capacity_;
  std::int64_t position_ = 0;
  std::vector<Bucket> buckets_;  ///< shortest first
};

}  // namespace prl::trainer
