#include "io/checkpoint_dir.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/background_saver.hpp"

namespace prl::io {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CheckpointDirTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() /
            ("prl-checkpoint-" + std::to_string(::getpid()) + "-" + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void save(std::int64_t step, const std::string& unit = {}) {
    CheckpointWriter writer(root_, step, unit);
    fs::create_directories(writer.folder() / "weights");
    write_file_atomic(writer.folder() / "state.bin", "state of " + std::to_string(step));
    write_file_atomic(writer.folder() / "weights" / "w.bin", "weights");
    writer.commit();
  }
  ErrorCode verify_code(std::int64_t step, const std::string& part) {
    try {
      verify_checkpoint(root_, step);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(part));
      return error.code();
    }
    ADD_FAILURE() << "verified; wanted " << part;
    return ErrorCode::kInternal;
  }
  fs::path root_;
};

TEST_F(CheckpointDirTest, CompleteStepsAreListedAndVerified) {
  EXPECT_THAT(list_checkpoints(root_), IsEmpty());
  EXPECT_EQ(latest_checkpoint(root_), std::nullopt);
  for (const std::int64_t step : {10, 2, 30}) save(step);
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(2, 10, 30));
  EXPECT_NO_THROW(verify_checkpoint(root_, 10));
  EXPECT_EQ(latest_checkpoint(root_), 30);
  EXPECT_EQ(read_file(checkpoint_folder(root_, 10) / "state.bin"), "state of 10");
  EXPECT_THROW(CheckpointWriter(root_, 10), Error);
}

TEST_F(CheckpointDirTest, HalfWrittenIsNeverPicked) {
  save(1);
  {
    CheckpointWriter abandoned(root_, 2);
    write_file_atomic(abandoned.folder() / "state.bin", "half");
    EXPECT_THAT(list_checkpoints(root_), ElementsAre(1));
  }
  EXPECT_FALSE(fs::exists(checkpoint_folder(root_, 2)));
  // A process that dies in the middle of writing leaves its temporary folder.
  const pid_t child = ::fork();
  if (child == 0) {
    CheckpointWriter killed(root_, 3);
    write_file_atomic(killed.folder() / "state.bin", "half");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(1));
  EXPECT_EQ(latest_checkpoint(root_), 1);
  // A folder under its final name without a manifest is not complete either, and is replaced.
  fs::create_directories(checkpoint_folder(root_, 4));
  std::ofstream(checkpoint_folder(root_, 4) / "junk") << "x";
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(1));
  EXPECT_EQ(verify_code(4, "incomplete"), ErrorCode::kNotFound);
  save(4);
  EXPECT_EQ(latest_checkpoint(root_), 4);
  EXPECT_EQ(remove_stale_checkpoints(root_), 1);
  for (const auto& entry : fs::directory_iterator(root_)) EXPECT_EQ(entry.path().filename().string().find(".tmp-"), std::string::npos);
}

TEST_F(CheckpointDirTest, DamageIsFoundAndNamed) {
  save(1);
  save(2);
  const fs::path folder = checkpoint_folder(root_, 2);
  const std::string manifest = read_file(folder / kManifestName);

  write_file_atomic(folder / "weights" / "w.bin", "weighty");
  EXPECT_EQ(verify_code(2, "weights/w.bin' does not match"), ErrorCode::kCorrupt);
  EXPECT_EQ(latest_checkpoint(root_), 1);
  write_file_atomic(folder / "weights" / "w.bin", "weight");
  EXPECT_EQ(verify_code(2, "has 6 bytes"), ErrorCode::kCorrupt);
  fs::remove(folder / "weights" / "w.bin");
  EXPECT_EQ(verify_code(2, "w.bin' is missing"), ErrorCode::kCorrupt);
  write_file_atomic(folder / "weights" / "w.bin", "weights");
  EXPECT_NO_THROW(verify_checkpoint(root_, 2));
  write_file_atomic(folder / "more.bin", "x");
  EXPECT_EQ(verify_code(2, "more.bin' is not in the manifest"), ErrorCode::kCorrupt);
  fs::remove(folder / "more.bin");

  for (std::size_t size = 0; size + 2 < manifest.size(); size += 7) {
    std::ofstream(folder / kManifestName, std::ios::trunc) << manifest.substr(0, size);
    EXPECT_EQ(verify_code(2, "manifest.json"), ErrorCode::kCorrupt) << size;
  }
  std::ofstream(folder / kManifestName, std::ios::trunc)
      << R"({"format":"prl-checkpoint","version":1,"step":2,"files":[{"path":"../x","bytes":1,"xxh3":"0"}]})";
  EXPECT_EQ(verify_code(2, "outside"), ErrorCode::kCorrupt);
  fs::copy_file(checkpoint_folder(root_, 1) / kManifestName, folder / kManifestName, fs::copy_options::overwrite_existing);
  EXPECT_EQ(verify_code(2, "another step"), ErrorCode::kCorrupt);
}

TEST_F(CheckpointDirTest, AStepCountsWhenAllItsUnitsAreThere) {
  const std::vector<std::string> units{"trainer", "orchestrator"};
  save(1, "trainer");
  save(1, "orchestrator");
  save(2, "trainer");
  EXPECT_THAT(list_checkpoints(root_, units), ElementsAre(1));
  EXPECT_EQ(latest_checkpoint(root_, units), 1);
  save(2, "orchestrator");
  EXPECT_EQ(latest_checkpoint(root_, units), 2);
  write_file_atomic(checkpoint_folder(root_, 2, "orchestrator") / "state.bin", "changed!");
  EXPECT_EQ(latest_checkpoint(root_, units), 1);
}

TEST_F(CheckpointDirTest, CleaningKeepsTheNewestAndTheMilestones) {
  for (std::int64_t step = 5; step <= 30; step += 5) save(step);
  EXPECT_THAT(clean_checkpoints(root_, {}, {}), IsEmpty());
  EXPECT_THAT(clean_checkpoints(root_, {}, {2, 10}), ElementsAre(5, 15));
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(10, 20, 25, 30));
  EXPECT_THAT(clean_checkpoints(root_, {}, {1, std::nullopt}), ElementsAre(10, 20, 25));
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(30));
}

TEST_F(CheckpointDirTest, TheNewestStaysWhateverTheRulesSay) {
  for (const std::int64_t step : {10, 15}) save(step);
  EXPECT_THAT(clean_checkpoints(root_, {}, {std::nullopt, 100}), ElementsAre(10));
  EXPECT_THAT(list_checkpoints(root_), ElementsAre(15)) << "step 15 is no multiple of 100, but it is all there is to resume from";
}

TEST_F(CheckpointDirTest, HalfStepsDoNotCountForRetention) {
  const std::vector<std::string> units{"trainer", "orchestrator"};
  for (const std::string& unit : units) save(8, unit);
  save(10, "trainer");  // the orchestrator died
  EXPECT_THAT(clean_checkpoints(root_, units, {1, std::nullopt}), IsEmpty());
  EXPECT_EQ(latest_checkpoint(root_, units), 8);
  save(10, "orchestrator");
  EXPECT_THAT(clean_checkpoints(root_, units, {1, std::nullopt}), ElementsAre(8));
  EXPECT_EQ(latest_checkpoint(root_, units), 10);
}

TEST_F(CheckpointDirTest, LinksAreLeftAlone) {
  for (const std::int64_t step : {1, 2, 3}) save(step);
  const fs::path elsewhere = root_.string() + "-elsewhere";
  fs::rename(checkpoint_folder(root_, 1), elsewhere);
  fs::create_directory_symlink(elsewhere, checkpoint_folder(root_, 1));
  EXPECT_THAT(clean_checkpoints(root_, {}, {1, std::nullopt}), ElementsAre(2));
  EXPECT_TRUE(fs::exists(elsewhere / kManifestName));
  fs::remove_all(elsewhere);
}

TEST(BackgroundSaver, RunsOneJobAtATimeAndHandsErrorsBack) {
  BackgroundSaver saver;
  std::promise<void> gate;
  std::atomic<int> done{0};
  saver.submit("first", [&] {
    gate.get_future().wait();
    ++done;
  });
  EXPECT_TRUE(saver.is_busy());
  try {
    saver.wait(std::chrono::milliseconds(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_THAT(error.what(), HasSubstr("first"));
  }
  gate.set_value();
  saver.submit("second", [&] {
    EXPECT_EQ(done, 1);
    fail(ErrorCode::kIo, "disk full");
  });
  EXPECT_THROW(saver.wait(), Error);
  EXPECT_NO_THROW(saver.wait()) << "an error is handed back once";
  saver.submit("third", [&] { ++done; });
  saver.wait();
  EXPECT_EQ(done, 2);
  EXPECT_FALSE(saver.is_busy());
}

}  // namespace
}  // namespace prl::io
