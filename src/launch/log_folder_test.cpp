#include "launch/log_folder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace prl::launch {
namespace {

namespace fs = std::filesystem;

/// An output folder, in a process that no launcher has started.
class LogFolder : public ::testing::Test {
 protected:
  LogFolder() : root_(fs::temp_directory_path() / ("prl_log_folder_" + std::to_string(::getpid()))) { another_process(); }
  ~LogFolder() override {
    another_process();
    fs::remove_all(root_);
  }
  static void another_process() { ::unsetenv(kLogFolderVariable); }
  std::string latest() const { return fs::read_symlink(root_ / "logs/latest").string(); }
  void write(const fs::path& file, const char* text = "a line\n") const { std::ofstream(file) << text; }

  const fs::path root_;
};

TEST_F(LogFolder, EveryStartHasItsOwnAndTheLinkFollows) {
  EXPECT_EQ(log_file(root_, "trainer/rank_1.log"), root_ / "logs/attempt_1/trainer/rank_1.log");
  EXPECT_FALSE(fs::exists(root_)) << "a path alone makes nothing";
  EXPECT_EQ(begin_attempt(root_), root_ / "logs/attempt_1");
  EXPECT_EQ(latest(), "attempt_1");
  write(log_file(root_, "rl.log"));
  write(log_file(root_, "trainer/rank_1.log"));
  EXPECT_TRUE(fs::exists(root_ / "logs/rl.log")) << "the name without an attempt is a link";
  EXPECT_TRUE(fs::exists(root_ / "logs/trainer/rank_1.log"));
  another_process();
  EXPECT_EQ(log_folder(root_), root_ / "logs/attempt_1") << "looking begins nothing";
  begin_attempt(root_);
  EXPECT_EQ(latest(), "attempt_2");
  EXPECT_FALSE(fs::exists(root_ / "logs/rl.log"));
  fs::create_directory(root_ / "logs/attempt_9");
  fs::create_directory(root_ / "logs/attempt_x");
  EXPECT_EQ(begin_attempt(root_).filename(), "attempt_10") << "one above the highest, not one more than there are";
}

TEST_F(LogFolder, ChildrenLogWhereTheirLauncherDoes) {
  begin_attempt(root_);
  const std::string given = std::getenv(kLogFolderVariable);
  another_process();
  begin_attempt(root_);
  ::setenv(kLogFolderVariable, given.c_str(), 1);
  EXPECT_EQ(join_attempt(root_, "trainer").filename(), "attempt_1");
  EXPECT_EQ(log_folder(root_).filename(), "attempt_1");
  EXPECT_EQ(log_folder(root_.string() + "/other"), root_ / "other/logs/attempt_1") << "of another run nothing was handed over";
  enter_attempt(root_, "attempt_2");
  EXPECT_EQ(log_file(root_, "trainer.log"), root_ / "logs/attempt_2/trainer.log");
  EXPECT_THROW(enter_attempt(root_, "../else"), Error);
}

TEST_F(LogFolder, RolesThatAreStartedOneByOneShareOne) {
  for (int round = 1; round <= 2; ++round)
    for (const char* role : {"inference", "orchestrator", "trainer"}) {
      another_process();
      EXPECT_EQ(join_attempt(root_, role).filename(), "attempt_" + std::to_string(round)) << role;
      write(log_file(root_, std::string(role) + ".log"));
    }
  EXPECT_EQ(latest(), "attempt_2");
}

TEST_F(LogFolder, StartsAtOnceNeverShareOne) {
  std::vector<std::thread> starts;
  for (int i = 0; i < 8; ++i) starts.emplace_back([this] { EXPECT_TRUE(fs::is_directory(begin_attempt(root_))); });
  for (std::thread& start : starts) start.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "logs"), {}), 9) << "eight attempts and the link";
}

TEST_F(LogFolder, WhatIsNotOursStays) {
  fs::create_directories(root_ / "logs/latest");
  write(root_ / "logs/rl.log", "of an older version");
  begin_attempt(root_);
  EXPECT_TRUE(fs::is_directory(fs::symlink_status(root_ / "logs/latest"))) << "a folder of the user's";
  log_file(root_, "rl.log");
  EXPECT_FALSE(fs::is_symlink(root_ / "logs/rl.log"));
  write(root_ / "logs/notes.txt");
  another_process();
  remove_attempts(root_);
  EXPECT_FALSE(fs::exists(root_ / "logs/attempt_1"));
  EXPECT_TRUE(fs::exists(root_ / "logs/notes.txt"));
  const fs::path elsewhere = root_ / "elsewhere";
  fs::create_directories(elsewhere);
  fs::create_directory_symlink(elsewhere, root_ / "logs/attempt_4");
  EXPECT_EQ(begin_attempt(root_).filename(), "attempt_1") << "a link is no attempt";
  remove_attempts(root_);
  EXPECT_TRUE(fs::exists(root_ / "logs/attempt_1")) << "this process logs there";
  EXPECT_TRUE(fs::exists(elsewhere));
}

TEST_F(LogFolder, AFolderThatCannotBeMadeIsNamed) {
  write(root_);
  try {
    begin_attempt(root_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("logs/attempt_1"));
  }
}

}  // namespace
}  // namespace prl::launch
