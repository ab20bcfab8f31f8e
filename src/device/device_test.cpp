#include "device/device.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "device/cgroup_memory.hpp"
#include "device/medium_blocks.hpp"

namespace prl {
namespace {

TEST(CpuRuntime, CountsWhatIsHandedOut) {
  auto runtime = make_cpu_runtime();
  void* a = runtime->allocate(100);
  void* b = runtime->allocate(5 << 20);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 64, 0u);
  EXPECT_EQ(runtime->bytes_in_use(), 100u + (5u << 20));
  runtime->deallocate(b, 5 << 20);
  EXPECT_EQ(runtime->bytes_in_use(), 100u);
  EXPECT_EQ(runtime->peak_bytes(), 100u + (5u << 20));
  runtime->deallocate(a, 100);
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

TEST(CpuRuntime, CopiesAndZeroes) {
  auto runtime = make_cpu_runtime();
  std::vector<int> source = {1, 2, 3}, back(3, 7);
  void* p = runtime->allocate(12);
  runtime->copy_from_host(p, source.data(), 12);
  runtime->copy_to_host(back.data(), p, 12);
  EXPECT_EQ(back, source);
  runtime->zero(p, 12);
  runtime->copy_to_host(back.data(), p, 12);
  EXPECT_EQ(back, std::vector<int>(3, 0));
  runtime->deallocate(p, 12);
}

TEST(CpuRuntime, SaysWhatWasWantedWhenMemoryEnds) {
  auto runtime = make_cpu_runtime();
  try {
    runtime->allocate(std::numeric_limits<std::size_t>::max() / 4 * 3);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::strstr(e.what(), "wanted"), nullptr);
  }
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

TEST(CpuRuntime, LargeBlocksAreHandedOutAgain) {
  auto runtime = make_cpu_runtime();
  constexpr std::size_t kSize = 10 << 20;
  void* a = runtime->allocate(kSize);
  std::memset(a, 1, kSize);
  runtime->deallocate(a, kSize);
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
  void* b = runtime->allocate(kSize - 1000);  // of the same class
  EXPECT_EQ(a, b);
  void* c = runtime->allocate(kSize);
  EXPECT_NE(b, c);
  runtime->deallocate(b, kSize - 1000);
  runtime->deallocate(c, kSize);
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

// Blocks of a slab lie side by side: one that is too short, or handed out twice, shows as another's bytes.
TEST(CpuRuntime, MediumBlocksShareNothing) {
  const auto runtime = make_cpu_runtime();
  std::vector<std::pair<unsigned char*, std::size_t>> blocks;
  const auto byte_of = [](std::size_t i) { return static_cast<int>(i * 7 % 251 + 1); };
  const auto take = [&](std::size_t i) {
    const std::size_t bytes = (std::size_t{64} << 10) + i * 9973 % (std::size_t{1900} << 10);
    auto* p = static_cast<unsigned char*>(runtime->allocate(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 64, 0u);
    std::memset(p, byte_of(i), bytes);
    return std::pair{p, bytes};
  };
  for (std::size_t i = 0; i < 120; ++i) blocks.push_back(take(i));
  for (std::size_t i = 0; i < blocks.size(); i += 3) {
    runtime->deallocate(blocks[i].first, blocks[i].second);
    blocks[i] = take(i);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto [p, bytes] = blocks[i];
    EXPECT_TRUE(std::all_of(p, p + bytes, [&](unsigned char b) { return b == byte_of(i); })) << "block " << i;
    runtime->deallocate(p, bytes);
  }
  EXPECT_EQ(runtime->bytes_in_use(), 0u);
}

TEST(CpuRuntime, FreedMediumBlocksAreHandedOutAgain) {
  const auto runtime = make_cpu_runtime();
  constexpr std::size_t kBytes = std::size_t{600} << 10;
  if (!MediumBlocks::takes(kBytes)) GTEST_SKIP() << "this build checks addresses";
  void* first = runtime->allocate(kBytes);
  runtime->deallocate(first, kBytes);
  void* other = runtime->allocate(2 * kBytes);
  void* again = runtime->allocate(kBytes - 1000);
  EXPECT_EQ(again, first);
  EXPECT_NE(other, first);
  runtime->deallocate(again, kBytes - 1000);
  runtime->deallocate(other, 2 * kBytes);
}

TEST(CpuRuntime, ReportsAvailableMemory) {
  auto runtime = make_cpu_runtime();
  EXPECT_GT(runtime->bytes_available(), std::size_t{1} << 20);
  EXPECT_LT(runtime->bytes_available(), std::size_t{1} << 46);
}

TEST(CgroupMemory, CountsPagesOfFilesAsFree) {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / ("prl-cgroup-" + std::to_string(::getpid()));
  const auto put = [&](const char* name, const char* text) {
    std::filesystem::create_directories((root / name).parent_path());
    std::ofstream(root / name) << text;
  };
  EXPECT_EQ(available_in_cgroup(root), std::numeric_limits<std::size_t>::max()) << "no cgroup";
  put("memory/memory.limit_in_bytes", "1000\n");
  put("memory/memory.usage_in_bytes", "900\n");
  EXPECT_EQ(available_in_cgroup(root), 100u);
  put("memory/memory.stat", "cache 700\ninactive_file 1\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n");
  EXPECT_EQ(available_in_cgroup(root), 600u);
  put("memory.max", "max\n");
  put("memory.current", "5000\n");
  EXPECT_EQ(available_in_cgroup(root), 600u) << "v2 without a limit";
  put("memory.max", "6000\n");
  EXPECT_EQ(available_in_cgroup(root), 1000u);
  put("memory.stat", "anon 1500\nfile 3500\ninactive_file 2000\nactive_file 1000\nshmem 500\n");
  EXPECT_EQ(available_in_cgroup(root), 4000u);
  put("memory.stat", "inactive_file 9000\n");  // read after memory.current, it may say more
  EXPECT_EQ(available_in_cgroup(root), 6000u);
  put("memory.current", "7000\n");
  put("memory.stat", "");
  EXPECT_EQ(available_in_cgroup(root), 0u);
  std::filesystem::remove_all(root);
}

TEST(CpuRuntime, MeasuresTheTimeBetweenMarks) {
  const auto runtime = make_cpu_runtime();
  const auto watch = runtime->make_stopwatch();
  EXPECT_EQ(watch->mark(), 0u);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  for (std::uint64_t i = 1; i < Stopwatch::kNumKept; ++i) EXPECT_EQ(watch->mark(), i);
  EXPECT_GE(watch->seconds(0, 1), 0.002);
  EXPECT_GE(watch->seconds(0, Stopwatch::kNumKept - 1), watch->seconds(0, 1));
}

TEST(CpuFeatures, ImplyEachOther) {
  const CpuFeatures& f = cpu_features();
  EXPECT_FALSE(f.name.empty());
  EXPECT_TRUE(!f.amx_bf16 || f.avx512_bf16);
  EXPECT_TRUE(!f.avx512_bf16 || f.avx512);
  EXPECT_TRUE(!f.avx512 || f.avx2);
}

TEST(Device, HasAName) {
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceKind::kCuda, 3}), "cuda:3");
}

/// Whether a large block of this size is one that was freed before, whose content the kernel has not cleared.
bool is_used_again(DeviceRuntime& runtime, std::size_t bytes) {
  auto* block = static_cast<char*>(runtime.allocate(bytes));
  const bool is_marked = block[0] == 'x';
  block[0] = 'x';
  runtime.deallocate(block, bytes);
  return is_marked;
}
constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(CpuRuntime, BlocksOfSeveralSizesAreKeptSideBySide) {
  const auto runtime = make_cpu_runtime();
  EXPECT_FALSE(is_used_again(*runtime, 256 * kMiB));
  EXPECT_FALSE(is_used_again(*runtime, 96 * kMiB));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(is_used_again(*runtime, 256 * kMiB));
    EXPECT_TRUE(is_used_again(*runtime, 96 * kMiB)) << "together more than was ever in use";
  }
}

TEST(CpuRuntime, TheOldestBlocksMakeRoomForOtherSizes) {
  const auto runtime = make_cpu_runtime();
  for (const std::size_t size : {128, 144, 160, 176}) EXPECT_FALSE(is_used_again(*runtime, size * kMiB)) << size;
  EXPECT_TRUE(is_used_again(*runtime, 176 * kMiB));
  EXPECT_FALSE(is_used_again(*runtime, 128 * kMiB)) << "memory that nobody uses grows without an end";
}

}  // namespace
}  // namespace prl
