#include "rollouts/step_record.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include <fmt/core.h>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::rollouts {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class StepRecordTest : public ::testing::Test {
 protected:
  StepRecordTest() : run_(fs::temp_directory_path() / fmt::format("prl-step-record-{}", ::getpid())) { fs::remove_all(run_); }
  ~StepRecordTest() override { fs::remove_all(run_); }

  /// One whose weights go from 100 + step - 1 to 100 + step.
  static StepRecord record_of(std::int64_t step) {
    wire::MicroBatch row;
    row.input_ids = {static_cast<std::int32_t>(step), 7, 8};
    row.loss_mask = {0, 1, 1};
    row.advantages = {0.0f, 0.5f, -0.25f};
    row.inference_logprobs = {0.0f, -0.1f, -1.75f};
    row.position_ids = {0, 1, 2};
    row.sequence_lengths = {3};
    row.temperatures = {1, 1, 1};
    row.env_names = {"reverse-text"};
    const auto number = static_cast<std::uint64_t>(100 + step);
    return {.weights_before = number - 1, .weights_after = number, .machine = "a machine, of words", .batch = {step, {row, row}}};
  }
  void write(std::int64_t from, std::int64_t to) const {
    for (std::int64_t step = from; step <= to; ++step) write_step_record(run_, record_of(step));
  }
  std::string error_of_step(std::int64_t step) const {
    try {
      (void)read_step_record(run_, step);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      return error.what();
    }
    return "";
  }

  fs::path run_;
};

TEST_F(StepRecordTest, IsReadAsItWasWritten) {
  write(3, 3);
  const auto read = read_step_record(run_, 3);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->weights_before, 102u);
  EXPECT_EQ(read->weights_after, 103u);
  EXPECT_EQ(read->machine, "a machine, of words");
  EXPECT_EQ(read->batch.step, 3);
  ASSERT_EQ(read->batch.micro_batches.size(), 2u);
  EXPECT_EQ(read->batch.micro_batches[1].inference_logprobs, (std::vector<float>{0.0f, -0.1f, -1.75f}));
  EXPECT_FALSE(read_step_record(run_, 4).has_value());
}

TEST_F(StepRecordTest, DamageAndOtherFilesAreRefusedByName) {
  write(1, 2);
  const fs::path file = step_record_file(run_, 1);
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] ^= 1;
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_THAT(error_of_step(1), HasSubstr(file.string()));
  EXPECT_THAT(error_of_step(1), HasSubstr("damaged"));
  std::ofstream(file, std::ios::binary) << "something else";
  EXPECT_THAT(error_of_step(1), HasSubstr("is not a record of a step"));
  fs::copy_file(step_record_file(run_, 2), file, fs::copy_options::overwrite_existing);
  EXPECT_THAT(error_of_step(1), HasSubstr("holds step 2"));
}

TEST_F(StepRecordTest, StepsComeInOrderUpToTheLast) {
  write(1, 4);
  RecordedSteps all(run_, 2, std::nullopt), some(run_, 1, 2);
  for (const std::int64_t step : {2, 3, 4}) {
    EXPECT_FALSE(all.is_closed());
    EXPECT_EQ(all.pop(0ms)->step, step);
  }
  EXPECT_TRUE(all.is_closed());
  EXPECT_FALSE(all.pop(0ms).has_value());
  EXPECT_EQ(some.pop(0ms)->step, 1);
  EXPECT_EQ(some.pop(0ms)->step, 2);
  EXPECT_TRUE(some.is_closed());
}

TEST_F(StepRecordTest, WhatAResumeLeftBehindEndsThem) {
  write(1, 4);
  StepRecord other = record_of(2);
  other.weights_after = 999;  // the resumed run went another way and ended with step 2
  write_step_record(run_, other);
  RecordedSteps steps(run_, 1, std::nullopt);
  EXPECT_EQ(steps.pop(0ms)->step, 1);
  EXPECT_EQ(steps.pop(0ms)->step, 2);
  EXPECT_TRUE(steps.is_closed());
}

TEST_F(StepRecordTest, ARunWithoutRecordsSaysHowTheyAreMade) {
  try {
    RecordedSteps steps(run_, 1, std::nullopt);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_THAT(error.what(), HasSubstr("trainer.record"));
    EXPECT_THAT(error.what(), HasSubstr((run_ / "rollouts").string()));
  }
}

}  // namespace
}  // namespace prl::rollouts
