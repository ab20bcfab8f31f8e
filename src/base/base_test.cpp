#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/files.hpp"
#include "base/hosts.hpp"
#include "base/queue.hpp"
#include "base/rng.hpp"
#include "base/thread_pool.hpp"

namespace prl {
namespace {

TEST(Philox, MatchesTheReferenceVectors) {
  // Known answers of Random123's philox4x32-10.
  EXPECT_EQ(Rng::philox({0, 0, 0, 0}, {0, 0}), (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Rng::philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Rng, SeekRepeatsADraw) {
  Rng rng(7, 3);
  for (int i = 0; i < 5; ++i) rng.next_u32();
  const auto place = rng.position();
  const auto draw = rng.next_u64();
  rng.seek(place);
  EXPECT_EQ(rng.next_u64(), draw);
}

TEST(ThreadPool, VisitsEachIndexOnce) {
  ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::atomic<int>> hits(97);
    pool.parallel_for(97, [&](std::int64_t i) { hits[static_cast<std::size_t>(i)]++; });
    for (auto& h : hits) ASSERT_EQ(h.load(), 1);
  }
}

TEST(ThreadPool, ManySmallLoopsOfSeveralCallersLoseNoItem) {
  ThreadPool pool(4);
  std::vector<std::int64_t> sums(3, 0);
  {
    std::vector<std::jthread> callers;
    for (std::size_t c = 0; c < sums.size(); ++c) {
      callers.emplace_back([&pool, &sum = sums[c]] {
        for (int loop = 0; loop < 3000; ++loop) {
          std::atomic<std::int64_t> total{0};
          pool.parallel_for(1 + loop % 7, [&](std::int64_t i) { total += i + 1; });
          sum += total;
          if (loop % 1000 == 0) std::this_thread::yield();
        }
      });
    }
  }
  std::int64_t wanted = 0;
  for (int loop = 0; loop < 3000; ++loop) wanted += (1 + loop % 7) * (2 + loop % 7) / 2;
  EXPECT_THAT(sums, ::testing::Each(wanted));
}

TEST(ThreadPool, ReadsAheadOfNothingInParticular) {
  ThreadPool pool(4);
  const std::vector<char> memory(1 << 20);
  std::atomic<int> sum{0};
  for (int i = 0; i < 200; ++i) {
    // Memory that is there, that is not, and none; loops in between that say nothing.
    if (i % 4 == 0) pool.read_ahead({memory.data(), memory.size() / 4, memory.size() / 4});
    if (i % 4 == 1) pool.read_ahead({reinterpret_cast<const char*>(64), 4096, 8192});
    if (i % 4 == 2) pool.read_ahead({});
    pool.parallel_for(5, [&](std::int64_t k) { sum += static_cast<int>(k); });
  }
  EXPECT_EQ(sum, 200 * 10);
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(8,
                                 [](std::int64_t i) {
                                   if (i == 5) fail(ErrorCode::kInternal, "five");
                                 }),
               Error);
  std::atomic<int> sum{0};
  pool.parallel_for(8, [&](std::int64_t i) { sum += static_cast<int>(i); });
  EXPECT_EQ(sum, 28);
}

TEST(BoundedQueue, RefusesWhenFullAndDrainsAfterClose) {
  BoundedQueue<int> queue(2);
  int a = 1, b = 2, c = 3;
  EXPECT_TRUE(queue.try_push(a));
  EXPECT_TRUE(queue.try_push(b));
  EXPECT_FALSE(queue.try_push(c));
  EXPECT_FALSE(queue.push(c, std::chrono::milliseconds(1)));
  queue.close();
  EXPECT_EQ(queue.pop(std::chrono::milliseconds(1)), 1);
  EXPECT_EQ(queue.pop(std::chrono::milliseconds(1)), 2);
  EXPECT_EQ(queue.pop(std::chrono::milliseconds(1)), std::nullopt);
}

TEST(Files, AtomicWriteReplacesAndCleansUp) {
  const auto folder = std::filesystem::temp_directory_path() / "prl_base_test";
  std::filesystem::remove_all(folder);
  write_file_atomic(folder / "a.txt", "one");
  write_file_atomic(folder / "a.txt", "two");
  EXPECT_EQ(read_file(folder / "a.txt"), "two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  EXPECT_THROW(read_file(folder / "none"), Error);
  EXPECT_THROW(read_file(folder / "a.txt", 2), Error);
  std::filesystem::remove_all(folder);
}

TEST(Files, StepFolders) {
  EXPECT_EQ(parse_step_dir("step_12"), 12);
  EXPECT_EQ(parse_step_dir("step_12.tmp"), -1);
  EXPECT_EQ(parse_step_dir("step_"), -1);
}

TEST(Hosts, LoopbackIsThisMachineWhoeverAsks) {
  for (const char* host : {"localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"", "0.0.0.0", "10.0.0.1", "127.example.com", "node-1", "localhost.example.com"})
    EXPECT_FALSE(is_loopback(host)) << host;
}

TEST(Hosts, ASocketThatIsItsOwnPeerIsTold) {
  const auto listening = [](const Fd& socket) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    return address;
  };
  const Fd own(::socket(AF_INET, SOCK_STREAM, 0)), server(::socket(AF_INET, SOCK_STREAM, 0)), client(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_FALSE(is_connected_to_itself(own.get())) << "it has no peer";
  const sockaddr_in at = listening(own), other = listening(server);
  ASSERT_EQ(::connect(own.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  EXPECT_TRUE(is_connected_to_itself(own.get()));
  ASSERT_EQ(::listen(server.get(), 1), 0);
  ASSERT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&other), sizeof other), 0);
  EXPECT_FALSE(is_connected_to_itself(client.get()));
}

}  // namespace
}  // namespace prl
