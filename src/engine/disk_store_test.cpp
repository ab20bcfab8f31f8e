#include "engine/disk_store.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <fstream>
#include <map>
#include <mutex>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "base/testing/temp_folder.hpp"

namespace prl::engine {
namespace {

using namespace std::chrono_literals;
using prl::testing::eventually;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::size_t kDiskBytes = 512;

std::vector<std::byte> block_of(int value) {
  std::vector<std::byte> bytes(kDiskBytes, static_cast<std::byte>(value));
  bytes[7] = static_cast<std::byte>(value + 1);
  return bytes;
}

class DiskStoreTest : public ::testing::Test {
 protected:
  DiskStoreOptions options() const {
    return {.folder = folder_.path() / "blocks", .num_slots = 8, .block_bytes = kDiskBytes, .read_timeout = 60s};
  }
  static void write_all(DiskStore& store, std::initializer_list<int> slots) {
    for (const int slot : slots) ASSERT_TRUE(store.write(slot, block_of(slot)));
    ASSERT_TRUE(eventually([&] { return store.stats().num_writes_queued == 0 && store.stats().num_written >= std::ssize(slots); }));
  }
  struct Reply {
    std::vector<DiskRead> outcomes;
    std::map<std::size_t, std::vector<std::byte>> blocks;
  };
  static Reply read(DiskStore& store, std::vector<std::int64_t> slots) {
    Reply reply;
    reply.outcomes =
        store.read(slots, [&](std::size_t i, std::span<const std::byte> bytes) { reply.blocks[i].assign(bytes.begin(), bytes.end()); });
    return reply;
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path() / "blocks"))
      names.push_back(entry.path().filename().string());
    return names;
  }
  prl::testing::TempFolder folder_;
};

TEST_F(DiskStoreTest, GivesBackWhatItWasGiven) {
  DiskStore store(options());
  write_all(store, {0, 3, 7});
  const Reply reply = read(store, {3, 1, 7, 0});
  EXPECT_THAT(reply.outcomes, ElementsAre(DiskRead::kRead, DiskRead::kGone, DiskRead::kRead, DiskRead::kRead));
  EXPECT_EQ(reply.blocks.at(0), block_of(3));
  EXPECT_EQ(reply.blocks.at(2), block_of(7));
  EXPECT_EQ(reply.blocks.at(3), block_of(0));
  EXPECT_EQ(std::filesystem::status(store.path()).permissions(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  ASSERT_TRUE(store.write(3, block_of(90)));
  EXPECT_EQ(read(store, {3}).blocks.at(0), block_of(90)) << "whether it is written already or not";
  store.forget();
  EXPECT_THAT(read(store, {3, 7}).outcomes, ElementsAre(DiskRead::kGone, DiskRead::kGone));
  EXPECT_EQ(store.stats().num_damaged, 0);
}

TEST_F(DiskStoreTest, WhatWasAlteredIsGone) {
  DiskStore store(options());
  write_all(store, {0, 1, 2});
  {
    std::fstream file(store.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kDiskBytes + 100);
    file.put('!');
  }
  const Reply altered = read(store, {0, 1, 2});
  EXPECT_THAT(altered.outcomes, ElementsAre(DiskRead::kRead, DiskRead::kGone, DiskRead::kRead));
  EXPECT_EQ(store.stats().num_damaged, 1);
  std::filesystem::resize_file(store.path(), 2 * kDiskBytes + kDiskBytes / 2);
  EXPECT_THAT(read(store, {2, 0}).outcomes, ElementsAre(DiskRead::kGone, DiskRead::kRead)) << "torn";
  // A block of the slot's former owner that was never overwritten: the second write is lost.
  std::filesystem::copy_file(store.path(), folder_.path() / "before");
  ASSERT_TRUE(store.write(0, block_of(50)));
  ASSERT_TRUE(eventually([&] { return store.stats().num_writes_queued == 0 && store.stats().num_written == 4; }));
  std::filesystem::copy_file(folder_.path() / "before", store.path(), std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(read(store, {0}).outcomes, ElementsAre(DiskRead::kGone));
}

/// A disk that takes its time.
class DiskGate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    news_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++num_arrived_;
    news_.wait_for(lock, 60s, [&] { return is_open_; });
  }
  int num_arrived() const {
    const std::lock_guard lock(mutex_);
    return num_arrived_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable news_;
  bool is_open_ = false;
  int num_arrived_ = 0;
};

TEST_F(DiskStoreTest, ASlowDiskIsAMissAndLeftAloneForAWhile) {
  DiskGate gate;
  DiskStoreOptions slow = options();
  slow.read_timeout = 200ms;
  slow.read_at = [&gate](int fd, void* bytes, std::size_t count, off_t at) {
    gate.pass();
    return ::pread(fd, bytes, count, at);
  };
  DiskStore store(slow);
  write_all(store, {0, 1});
  EXPECT_THAT(read(store, {0, 1}).outcomes, ElementsAre(DiskRead::kLate, DiskRead::kLate));
  EXPECT_THAT(read(store, {0}).outcomes, ElementsAre(DiskRead::kLate));
  EXPECT_EQ(gate.num_arrived(), 1) << "neither the second of the first call, which was given up, nor that of the second call";
  gate.open();
  ASSERT_TRUE(eventually([&] { return read(store, {0}).outcomes[0] == DiskRead::kRead; }));
  EXPECT_EQ(read(store, {1}).blocks.at(0), block_of(1));
  EXPECT_EQ(store.stats().num_damaged, 0);
  EXPECT_GE(store.stats().num_late, 3);
}

TEST_F(DiskStoreTest, NoMoreWaitsToBeWrittenThanIsAllowed) {
  DiskGate gate;
  DiskStoreOptions slow = options();
  slow.max_queued_bytes = 3 * kDiskBytes;
  slow.write_at = [&gate](int fd, const void* bytes, std::size_t count, off_t at) {
    gate.pass();
    return ::pwrite(fd, bytes, count, at);
  };
  DiskStore store(slow);
  for (int slot = 0; slot < 3; ++slot) EXPECT_TRUE(store.write(slot, block_of(slot)));
  ASSERT_TRUE(eventually([&] { return gate.num_arrived() == 1; }));
  EXPECT_FALSE(store.write(3, block_of(3)));
  EXPECT_EQ(store.stats().num_not_queued, 1);
  EXPECT_THAT(read(store, {0, 2, 3}).outcomes, ElementsAre(DiskRead::kRead, DiskRead::kRead, DiskRead::kGone)) << "what waits is at hand";
  store.forget();
  EXPECT_THAT(read(store, {0, 1, 2}).outcomes, ElementsAre(DiskRead::kGone, DiskRead::kGone, DiskRead::kGone));
  gate.open();
  ASSERT_TRUE(eventually([&] { return store.write(3, block_of(4)); }));
  ASSERT_TRUE(eventually([&] { return store.stats().num_writes_queued == 0 && store.stats().num_written == 2; }));
  EXPECT_THAT(read(store, {0, 1, 3}).outcomes, ElementsAre(DiskRead::kGone, DiskRead::kGone, DiskRead::kRead));
}

TEST_F(DiskStoreTest, AFullDiskEndsItsUse) {
  std::atomic<int> num_writes{0};
  DiskStoreOptions full = options();
  full.write_at = [&num_writes](int fd, const void* bytes, std::size_t count, off_t at) -> ssize_t {
    if (++num_writes <= 2) return ::pwrite(fd, bytes, count, at);
    errno = ENOSPC;
    return -1;
  };
  DiskStore store(full);
  write_all(store, {0, 1});
  (void)store.write(2, block_of(2));
  ASSERT_TRUE(eventually([&] { return store.stats().is_off; }));
  EXPECT_FALSE(store.write(3, block_of(3)));
  EXPECT_THAT(read(store, {0, 1, 2}).outcomes, ElementsAre(DiskRead::kGone, DiskRead::kGone, DiskRead::kGone));
  EXPECT_EQ(num_writes, 3) << "it is not tried again";
  EXPECT_EQ(std::filesystem::file_size(store.path()), 0u) << "others need the room";
  EXPECT_EQ(store.stats().num_damaged, 0);
}

TEST_F(DiskStoreTest, OnlyFilesOfProcessesThatWereKilledAreRemoved) {
  const std::filesystem::path folder = folder_.path() / "blocks";
  std::filesystem::create_directories(folder / "prl-kv-3-0.blocks");
  for (const char* name : {"prl-kv-1-0.blocks", "prl-kv-2-0.blocks", "prl-kv-x-0.blocks", "prl-kv-1.blocks", "notes.blocks"})
    std::ofstream(folder / name) << "bytes";
  std::filesystem::create_symlink(folder / "notes.blocks", folder / "prl-kv-4-0.blocks");
  const int other = ::open((folder / "prl-kv-2-0.blocks").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX | LOCK_NB), 0);
  {
    DiskStore first(options());
    DiskStore second(options());
    EXPECT_NE(first.path(), second.path());
    EXPECT_TRUE(std::filesystem::exists(first.path()));
    EXPECT_FALSE(std::filesystem::exists(folder / "prl-kv-1-0.blocks"));
    EXPECT_THAT(files(), SizeIs(8u));
  }
  EXPECT_THAT(files(), ::testing::UnorderedElementsAre("prl-kv-2-0.blocks", "prl-kv-3-0.blocks", "prl-kv-4-0.blocks", "prl-kv-x-0.blocks",
                                                       "prl-kv-1.blocks", "notes.blocks"));
  ::close(other);
}

TEST_F(DiskStoreTest, AFolderThatCannotBeMadeIsNamed) {
  std::ofstream(folder_.path() / "blocks") << "a file";
  try {
    DiskStore store(options());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), ::testing::HasSubstr((folder_.path() / "blocks").string()));
  }
}

}  // namespace
}  // namespace prl::engine
