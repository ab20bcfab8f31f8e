#include "rollouts/step_record.hpp"

#include <fmt/core.h>

#include <array>
#include <charconv>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "rollouts/sealed.hpp"

namespace prl::rollouts {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRecordMark = "PRLRECRD";
constexpr std::uint64_t kMaxRecordBytes = std::uint64_t{16} << 30;
constexpr std::size_t kHexDigits = 16;

/// What follows the mark: both checksums in hex digits, the machine in one line, then the encoded batch.
std::string encode(const StepRecord& record) {
  wire::TrainingBatch batch;
  batch.step = record.batch.step;
  batch.ranks.push_back(record.batch.micro_batches);
  PRL_CHECK(record.machine.find('\n') == std::string::npos, "the machine in one line");
  return fmt::format("{:016x}{:016x}{}\n", record.weights_before, record.weights_after, record.machine) + wire::encode(batch);
}

std::uint64_t take_hex(std::string_view& bytes, const char* what) {
  std::uint64_t value = 0;
  const std::string_view digits = bytes.substr(0, kHexDigits);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (digits.size() < kHexDigits || error != std::errc() || end != digits.data() + digits.size())
    fail(ErrorCode::kCorrupt, "the checksum of the weights {} is no number", what);
  bytes.remove_prefix(kHexDigits);
  return value;
}

StepRecord decode(std::string_view bytes, std::int64_t step) {
  StepRecord record;
  record.weights_before = take_hex(bytes, "before");
  record.weights_after = take_hex(bytes, "after");
  const std::size_t end = bytes.find('\n');
  if (end == std::string_view::npos) fail(ErrorCode::kCorrupt, "ends before its samples");
  record.machine = bytes.substr(0, end);
  wire::TrainingBatch batch = wire::decode_training_batch(bytes.substr(end + 1));
  if (batch.step != step || batch.ranks.size() != 1)
    fail(ErrorCode::kCorrupt, "holds step {} for {} ranks, wanted step {} for all together", batch.step, batch.ranks.size(), step);
  record.batch = {batch.step, std::move(batch.ranks.front())};
  return record;
}

}  // namespace

fs::path step_record_file(const fs::path& run, std::int64_t step) {
  return run / "rollouts" / fmt::format("step_{}", step) / "recorded_batch.bin";
}

void write_step_record(const fs::path& run, const StepRecord& record) {
  const fs::path file = step_record_file(run, record.batch.step);
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  if (error) fail(ErrorCode::kIo, "record of a step: {}: {}", file.parent_path().string(), error.message());
  write_file_atomic(file, sealed(kRecordMark, encode(record)));
}

std::optional<StepRecord> read_step_record(const fs::path& run, std::int64_t step) {
  const fs::path file = step_record_file(run, step);
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return std::nullopt;
  try {
    return decode(unsealed(kRecordMark, read_file(file, kMaxRecordBytes), "a record of a step"), step);
  } catch (const Error& error) {
    throw error.with_context(file.string());
  }
}

RecordedSteps::RecordedSteps(fs::path run, std::int64_t first, std::optional<std::int64_t> last) : run_(std::move(run)), last_(last) {
  read(first);
  if (!next_)
    fail(ErrorCode::kNotFound, "{} is not there: step {} was not recorded. A run records its steps with trainer.record",
         step_record_file(run_, first).string(), first);
}

void RecordedSteps::read(std::int64_t step) {
  step_ = step;
  const std::optional<StepRecord> before = std::exchange(next_, std::nullopt);
  if (last_ && step > *last_) return;
  next_ = read_step_record(run_, step);
  if (!next_ || !before || next_->weights_before == before->weights_after) return;
  log::warning("the record of step {} begins with other weights than step {} made: a resume left it behind, and it is left out", step,
               step - 1);
  next_.reset();
}

std::optional<RankBatch> RecordedSteps::pop(std::chrono::milliseconds) {
  if (!next_) return std::nullopt;
  RankBatch batch = std::move(next_->batch);
  read(batch.step + 1);
  return batch;
}

std::string RecordedSteps::describe() const {
  return fmt::format("the steps recorded in {}, {} {}", run_.string(), next_ ? "next" : "which end before step", step_);
}

}  // namespace prl::rollouts
