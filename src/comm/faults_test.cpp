// Ranks that die, fall silent, give up or never come: who is named, how soon, and how the others go on.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "base/testing/eventually.hpp"
#include "base/testing/temp_folder.hpp"
#include "comm/admission.hpp"
#include "comm/loss_watch.hpp"
#include "comm/meeting.hpp"
#include "comm/testing/ranks.hpp"

namespace prl::comm {
namespace {

using std::chrono::milliseconds;
using testing::Processes;

using prl::testing::TempFolder;

CommOptions options_of(int rank, int size, std::shared_ptr<Store> store, milliseconds timeout) {
  CommOptions options;
  options.rank = rank;
  options.size = size;
  options.store = std::move(store);
  options.timeout = timeout;
  return options;
}

std::vector<float> ones(std::int64_t n, int rank) { return std::vector<float>(static_cast<std::size_t>(n), static_cast<float>(rank + 1)); }
TensorView view_of(std::vector<float>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  return {values.data(), {n}, DType::kF32, {}, n};
}

/// Steps of a group that a fault interrupts; the survivors name the lost rank, regroup and finish.
struct FaultCase {
  int size, victim, fault_step, signal;
  std::int64_t elements;
  milliseconds timeout;
};

/// 0 if the rank saw what it had to.
int survive(const FaultCase& c, const std::string& store_folder, int rank) {
  constexpr int kNumSteps = 8;
  const auto store = make_file_store(store_folder);
  auto group = make_gloo_communicator(options_of(rank, c.size, store, c.timeout));
  for (int step = 0; step < kNumSteps; ++step) {
    std::vector<float> values = ones(c.elements, rank);
    if (rank == c.victim && step == c.fault_step && group->generation() == 0) {
      (void)::raise(c.signal);
      return 50;  // a stopped rank never wakes up in this test
    }
    try {
      group->all_reduce(view_of(values), ReduceOp::kSum, {.what = "values of a step"});
    } catch (const PeerLost& lost) {
      const std::string message = lost.what();
      if (lost.code() != ErrorCode::kPeerLost || lost.ranks() != std::vector<int>{c.victim}) {
        std::fprintf(stderr, "rank %d blames another: %s\n", rank, message.c_str());
        return 10;
      }
      for (const std::string& part :
           {fmt::format("rank {} of {}", c.victim, c.size), std::string("all_reduce"), std::string("values of a step")})
        if (message.find(part) == std::string::npos) {
          std::fprintf(stderr, "'%s' is not in: %s\n", part.c_str(), message.c_str());
          return 11;
        }
      // The group is over; each operation says so again at once.
      try {
        group->barrier();
        return 12;
      } catch (const PeerLost&) {
      }
      const std::vector<int> survivors = find_survivors(*group, 1, c.timeout * 4);
      if (static_cast<int>(survivors.size()) != c.size - 1) return 13;
      group = group->subgroup(survivors, group->options().group, 1);
      if (store->generation() != 1) return 14;
      --step;  // the interrupted step once more
      continue;
    }
    float wanted = 0;
    for (int r = 0; r < c.size; ++r)
      if (r != c.victim || group->generation() == 0) wanted += static_cast<float>(r + 1);
    for (const float x : values)
      if (x != wanted) return 15;
  }
  return group->generation() == 1 ? 0 : 16;
}

void expect_survival(const FaultCase& c) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  const TempFolder folder;
  const auto started = std::chrono::steady_clock::now();
  Processes ranks(c.size, [&](int rank) { return survive(c, folder.path() / "store", rank); });
  for (int rank = 0; rank < c.size; ++rank) {
    if (rank == c.victim) continue;
    const auto status = ranks.wait(rank, prl::testing::kPatience);
    ASSERT_TRUE(status.has_value()) << "rank " << rank << " hangs";
    EXPECT_EQ(*status, 0) << "rank " << rank;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::printf("%d ranks, rank %d got signal %d in step %d: done after %.2f s\n", c.size, c.victim, c.signal, c.fault_step, seconds);
}

TEST(Faults, KilledRankIsNamedAndTheOthersGoOn) {
  for (const int victim : {0, 1, 2}) expect_survival({3, victim, 3, SIGKILL, 10'000, milliseconds(20'000)});
}
TEST(Faults, KilledRankOfLargeMessages) { expect_survival({4, 2, 2, SIGKILL, 3'000'001, milliseconds(20'000)}); }
TEST(Faults, SilentRankIsNamedAfterTheDeadline) {
  for (const int victim : {0, 2}) expect_survival({3, victim, 2, SIGSTOP, 1'000, milliseconds(1'500)});
}
TEST(Faults, OneOfTwoIsLeft) { expect_survival({2, 1, 1, SIGKILL, 100, milliseconds(20'000)}); }

/// Rank 1 is killed while a message of 128 MB between it and rank 0 is on its way. What rank 0 returns: 0 if it names rank 1, 1 if all of
/// the message had come, else an error.
int wait_in_the_middle(const std::string& store_folder, int rank, bool is_receiver) {
  const auto store = make_file_store(store_folder);
  const auto group = make_gloo_communicator(options_of(rank, 2, store, 10 * prl::testing::kPatience));
  std::vector<float> values = rank == 0 && is_receiver ? std::vector<float>(1 << 25) : ones(1 << 25, rank);
  if (rank == 1) {
    store->set("pid", std::to_string(::getpid()));
    if (is_receiver)
      group->send(view_of(values), 0, {});
    else {
      std::jthread stops([] {
        std::this_thread::sleep_for(milliseconds(20));
        (void)::raise(SIGSTOP);
      });
      group->recv(view_of(values), 0, {});
    }
    return 50;
  }
  const int victim = std::stoi(store->wait("pid", prl::testing::kPatience, "rank 1"));
  const volatile float& early = values[1000];
  std::jthread kills([&](const std::stop_token& stop) {
    while (is_receiver && early == 0 && !stop.stop_requested()) {
    }
    if (!is_receiver) std::this_thread::sleep_for(milliseconds(100));
    (void)::kill(victim, SIGKILL);
  });
  try {
    if (is_receiver)
      group->recv(view_of(values), 1, {.what = "half a message"});
    else
      group->send(view_of(values), 1, {.what = "half a message"});
    return 1;
  } catch (const PeerLost& lost) {
    return lost.ranks() == std::vector<int>{1} ? 0 : 60;
  }
}

TEST(Faults, ARankThatDiesInTheMiddleOfAMessageIsNoticed) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  for (const bool is_receiver : {true, false}) {
    int num_halves = 0;
    for (int tries = 0; tries < 20 && num_halves < 3; ++tries) {
      const TempFolder folder;
      Processes ranks(2, [&](int rank) { return wait_in_the_middle(folder.path() / "store", rank, is_receiver); });
      const auto status = ranks.wait(0, prl::testing::kPatience);
      ASSERT_TRUE(status.has_value()) << "rank 0 hangs, receiver: " << is_receiver;
      ASSERT_TRUE(*status == 0 || *status == 1) << *status;
      num_halves += *status == 0;
    }
    EXPECT_GT(num_halves, 0) << "every message had come before its sender was killed, receiver: " << is_receiver;
  }
}

/// Of `size` ranks rank 1 dies when it `has_connected`, or before; process `size` is started in its place.
int meet_after_a_death(const char* backend, int size, const std::string& store_folder, int process, bool has_connected) {
  const auto store = make_file_store(store_folder);
  const bool is_in_place = process == size;
  CommOptions options = options_of(is_in_place ? 1 : process, size, store, 2 * prl::testing::kPatience);
  options.connect_timeout = milliseconds(300);
  if (std::string_view(backend) == "nccl") {
    options.runtime = make_cuda_runtime(options.rank);
    options.connect_timeout = milliseconds(5000);
  }
  if (process == 1) {
    CommOptions first = options;
    first.connect_timeout = prl::testing::kPatience;
    std::unique_ptr<Communicator> group;
    if (has_connected) group = make_communicator(first);
    store->set("world/g0/here/1", "1");
    store->set("died", "1");
    (void)::raise(SIGKILL);
  }
  // In its place: while the others still hold the dead one for alive, or when they have given it up.
  if (is_in_place) (void)store->wait(has_connected ? "died" : "world/g0/met", prl::testing::kPatience, "the first rank 1, or another");
  Mesh mesh = meet(options, {{1, size, 1}});
  std::vector<float> values = ones(10, mesh.world().rank());
  mesh.world().all_reduce(view_of(values));
  mesh.world().barrier();
  return has_met(*store) && mesh.world().generation() > 0 && values.front() == static_cast<float>(size * (size + 1) / 2) ? 0 : 10;
}

void expect_to_meet(const char* backend, int size) {
  for (const bool has_connected : {false, true}) {
    const TempFolder folder;
    Processes ranks(size + 1,
                    [&](int process) { return meet_after_a_death(backend, size, folder.path() / "store", process, has_connected); });
    for (int process = 0; process <= size; ++process) {
      if (process == 1) continue;
      const auto status = ranks.wait(process, prl::testing::kPatience);
      ASSERT_TRUE(status.has_value()) << "process " << process << " hangs, the dead one had connected: " << has_connected;
      EXPECT_EQ(*status, 0) << "process " << process << ", the dead one had connected: " << has_connected;
    }
  }
}

TEST(Faults, RanksThatMeetWaitForTheOneThatIsStartedInPlaceOfADeadOne) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  expect_to_meet("gloo", 3);
}

/// Asked in a process of its own: one that has used CUDA must not fork.
bool has_two_gpus() {
  Processes look(1, [](int) { return testing::reason_to_skip("nccl", 2).empty() && has_gloo() ? 0 : 1; });
  return look.wait(0, prl::testing::kPatience) == 0;
}

TEST(Faults, RanksThatMeetOverNcclWaitForTheOneThatIsStartedInPlaceOfADeadOne) {
  if (!has_two_gpus()) GTEST_SKIP() << "two GPUs, NCCL and Gloo are needed";
  expect_to_meet("nccl", 2);
}

TEST(Faults, WhoComesWhenTheOthersHaveMetIsToldSo) {
  const auto store = make_memory_store();
  std::vector<std::jthread> ranks;
  for (const int rank : {0, 1})
    ranks.emplace_back([&, rank] {
      CommOptions options = options_of(rank, 2, store, prl::testing::kPatience);
      EXPECT_NO_THROW((void)meet(options, {{2, 1, 1}}));
    });
  ranks.clear();
  EXPECT_THROW((void)meet(options_of(1, 2, store, prl::testing::kPatience), {{2, 1, 1}}), PeerLost);
}

TEST(Faults, RankThatNeverComesIsNamed) {
  for (const bool uses_gloo : {false, true}) {
    if (uses_gloo && !has_gloo()) continue;
    const auto store = make_memory_store();
    std::vector<std::string> messages(2);
    std::vector<std::thread> threads;
    for (const int rank : {0, 2})
      threads.emplace_back([&, rank] {
        CommOptions options = options_of(rank, 3, store, milliseconds(200));
        try {
          (void)(uses_gloo ? make_gloo_communicator(options) : make_threads_communicator(options));
        } catch (const PeerLost& lost) {
          EXPECT_EQ(lost.ranks(), std::vector<int>{1});
          messages[static_cast<std::size_t>(rank / 2)] = lost.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& message : messages) EXPECT_NE(message.find("rank 1 first"), std::string::npos) << message;
  }
}

// What nobody comes to: each of these waits longer than the ten seconds after which a wait is reported.
TEST(Faults, WaitsSayAfterTenSecondsWhoWaitsForWhom) {
  constexpr milliseconds kLimit{11'500};
  ::testing::internal::CaptureStderr();
  std::vector<std::jthread> waits;
  waits.emplace_back([&] { EXPECT_THROW((void)make_memory_store()->wait("some/key", kLimit, "rank 7"), Error); });
  waits.emplace_back([&] { EXPECT_THROW((void)make_tcp_store("127.0.0.1", 1, kLimit), Error); });
  waits.emplace_back([&] { EXPECT_THROW((void)make_threads_communicator(options_of(1, 2, make_memory_store(), kLimit)), PeerLost); });
  waits.emplace_back([&] { EXPECT_THROW((void)join(options_of(0, 2, make_memory_store(), kLimit), "newcomer", kLimit, {}), Error); });
  const auto store = make_memory_store();
  for (const int rank : {0, 1})
    waits.emplace_back([&, rank] {
      const auto group = make_threads_communicator(options_of(rank, 2, store, milliseconds(30'000)));
      if (rank == 1) std::this_thread::sleep_for(kLimit);  // the others wait for it in the barrier
      group->barrier({.what = "end of the epoch"});
    });
  waits.clear();
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* part :
       {"waiting for rank 7 to set 'some/key'", "waiting for the store at 127.0.0.1:1", "Connection refused", "rank 1 of 2",
        "missing are the ranks 0", "'newcomer.1' has been waiting for the group to let it in", "rank 0 of 2 (group", "end of the epoch"})
    EXPECT_NE(said.find(part), std::string::npos) << part << " is not in\n" << said;
}

/// Rank 1 is killed when both are there. 0 if the others are told of it alone, and of nobody before.
int watch_the_others(const std::string& store_folder, int rank, const char* backend) {
  constexpr int kSize = 3;
  const auto store = make_file_store(store_folder);
  CommOptions options = options_of(rank, std::string_view(backend) == "nccl" ? 2 : kSize, store, 10 * prl::testing::kPatience);
  if (std::string_view(backend) == "nccl") options.runtime = make_cuda_runtime(rank);
  const auto group = options.runtime != nullptr ? make_nccl_communicator(options) : make_gloo_communicator(options);
  const auto watch = options.runtime != nullptr ? nullptr : make_loss_watch(options);
  group->barrier();
  if (watch != nullptr && !watch->gone().empty()) return 10;
  group->barrier();
  if (rank == 1) (void)::raise(SIGKILL);
  if (watch == nullptr) {
    const auto started = std::chrono::steady_clock::now();
    try {
      group->barrier({.what = "end of step 5"});
      return 11;
    } catch (const PeerLost& lost) {
      std::printf("noticed after %.2f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
      return lost.ranks() == std::vector<int>{1} ? 0 : 12;
    }
  }
  std::vector<int> gone;
  if (!prl::testing::eventually([&] { return !(gone = watch->gone()).empty(); })) return 13;
  if (gone != std::vector<int>{1}) return 14;
  store->set(fmt::format("told/{}", rank), "yes");
  for (const int other : {0, 2}) (void)store->wait(fmt::format("told/{}", other), prl::testing::kPatience, "the other survivor");
  return 0;
}

void expect_told(const char* backend, std::initializer_list<int> survivors) {
  const TempFolder folder;
  const int size = static_cast<int>(survivors.size()) + 1;
  Processes ranks(size, [&](int rank) { return watch_the_others(folder.path() / "store", rank, backend); });
  for (const int rank : survivors) {
    const auto status = ranks.wait(rank, 2 * prl::testing::kPatience);
    ASSERT_TRUE(status.has_value()) << "rank " << rank << " hangs";
    EXPECT_EQ(*status, 0) << "rank " << rank;
  }
}

TEST(Faults, AWatchTellsWhoDied) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  expect_told("gloo", {0, 2});
}

// NCCL itself notices a rank that died at the deadline alone, here ten times what the test waits for.
TEST(Faults, AKilledRankOfAGroupOverNcclIsNoticed) {
  if (!has_two_gpus()) GTEST_SKIP() << "two GPUs, NCCL and Gloo are needed";
  expect_told("nccl", {0});
}

/// The last rank is killed before it comes to a group that the others form beside the one that they have. 0 if they do not wait for it,
/// though the time that they would have has not passed.
int form_a_group_without(const std::string& store_folder, int rank, int size, const char* backend) {
  CommOptions options = options_of(rank, size, make_file_store(store_folder), 10 * prl::testing::kPatience);
  if (std::string_view(backend) == "nccl") options.runtime = make_cuda_runtime(rank);
  const auto group = options.runtime != nullptr ? make_nccl_communicator(options) : make_gloo_communicator(options);
  group->barrier();
  std::vector<int> members;
  for (int r = size - 1; r >= 0; --r) members.push_back(r);  // so that the dead one has another number in it
  if (rank == size - 1) (void)::raise(SIGKILL);
  try {
    (void)group->subgroup(members, "weights", 0);
    return 10;
  } catch (const PeerLost& lost) {
    std::printf("%s\n", lost.what());
    if (lost.ranks() != std::vector<int>{size - 1} || group->lost_ranks() != lost.ranks()) return 11;
    EXPECT_THROW(group->barrier(), PeerLost) << "it ends with the group that it has a part in";
    return ::testing::Test::HasFailure() ? 12 : 0;
  }
}

void expect_no_wait_for_the_dead(const char* backend, int size) {
  const TempFolder folder;
  Processes ranks(size, [&](int rank) { return form_a_group_without(folder.path() / "store", rank, size, backend); });
  for (int rank = 0; rank + 1 < size; ++rank) {
    const auto status = ranks.wait(rank, 2 * prl::testing::kPatience);
    ASSERT_TRUE(status.has_value()) << "rank " << rank << " waits";
    EXPECT_EQ(*status, 0) << "rank " << rank;
  }
}

TEST(Faults, AGroupBesideAnotherDoesNotWaitForTheDead) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  expect_no_wait_for_the_dead("gloo", 3);
}

/// Rank 2 dies when the others have its address and it may not have connected. 0 if they are told of it alone; prints how long that took.
int form_a_group_with_one_that_dies(const std::string& store_folder, int rank) {
  const auto store = make_file_store(store_folder);
  const auto group = make_gloo_communicator(options_of(rank, 3, store, 10 * prl::testing::kPatience));
  group->barrier();
  const auto started = std::chrono::steady_clock::now();
  std::jthread dies;
  if (rank == 2)
    dies = std::jthread([&store] {
      while (!store->get("weights/g0/gloo/2") && !store->get("weights/g0/gloo/rank_2")) std::this_thread::yield();
      (void)::raise(SIGKILL);
    });
  try {
    (void)group->subgroup(std::vector<int>{0, 1, 2}, "weights", 0);
    return 10;  // it was connected before it died
  } catch (const PeerLost& lost) {
    std::printf("rank %d after %.1f s: %s\n", rank, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count(),
                lost.what());
    return lost.ranks() == std::vector<int>{2} ? 0 : 11;
  }
}

TEST(Faults, OneThatDiesAsAGroupBesideAnotherConnectsIsNamed) {
  if (!has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  int num_early = 0;
  for (int tries = 0; tries < 10 && num_early < 2; ++tries) {
    const TempFolder folder;
    Processes ranks(3, [&](int rank) { return form_a_group_with_one_that_dies(folder.path() / "store", rank); });
    for (const int rank : {0, 1}) {
      const auto status = ranks.wait(rank, 2 * prl::testing::kPatience);
      ASSERT_TRUE(status.has_value()) << "rank " << rank << " waits";
      ASSERT_TRUE(*status == 0 || *status == 10) << "rank " << rank << ": " << *status;
      num_early += *status == 0;
    }
  }
  EXPECT_GT(num_early, 0) << "it was connected each time";
}

TEST(NcclFaults, AGroupBesideAnotherDoesNotWaitForTheDead) {
  if (!has_two_gpus()) GTEST_SKIP() << "two GPUs, NCCL and Gloo are needed";
  expect_no_wait_for_the_dead("nccl", 2);
}

class GroupFaults : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string reason = testing::reason_to_skip(GetParam(), 3);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  /// Calls `body` at three ranks that have completed barrier 1, all of them: who closes its connections right after it may take along what
  /// another has not read.
  static void run_three(const std::function<void(Communicator&)>& body) {
    std::atomic<int> num_here{0};
    testing::run_threads(GetParam(), 3, [&](Communicator& group) {
      group.barrier();
      ++num_here;
      ASSERT_TRUE(prl::testing::eventually([&] { return num_here == 3; }));
      body(group);
    });
  }
};

TEST_P(GroupFaults, RankThatGivesUpIsQuoted) {
  run_three([](Communicator& group) {
    if (group.rank() == 1) return group.abort("row 7 of environment 'math' is not finite");
    try {
      float x = 1;
      group.all_reduce(TensorView{&x, {1}, DType::kF32, {}, 1}, ReduceOp::kSum, {.what = "loss"});
      ADD_FAILURE() << "rank " << group.rank() << " goes on";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{1});
      EXPECT_NE(std::string(lost.what()).find("row 7"), std::string::npos) << lost.what();
    }
  });
}

TEST_P(GroupFaults, SilenceEndsWithTheDeadlineOfTheCall) {
  constexpr milliseconds kLimit{2'000};  // within which ranks 0 and 1 hear each other, whatever else the machine does
  std::atomic<int> num_done{0};
  run_three([&](Communicator& group) {
    if (group.rank() == 2) {  // comes to the barrier when nobody waits any more
      EXPECT_TRUE(prl::testing::eventually([&] { return num_done == 2; }));
      // Over NCCL what the others had sent for it may be there still, and it learns of their end in the next.
      const int num_barriers = std::string_view(GetParam()) == "nccl" ? 2 : 1;
      EXPECT_THROW(for (int i = 0; i < num_barriers; ++i) group.barrier(), PeerLost);
      return;
    }
    const auto started = std::chrono::steady_clock::now();
    try {
      group.barrier({.what = "end of step 5", .timeout = kLimit});
      ADD_FAILURE() << "nobody was missing";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{2}) << lost.what();
      const std::string message = lost.what();
      EXPECT_NE(message.find("end of step 5"), std::string::npos) << message;
      EXPECT_NE(message.find("barrier 1"), std::string::npos) << "what was last completed: " << message;
      EXPECT_GE(std::chrono::steady_clock::now() - started, kLimit - milliseconds(10));
    }
    ++num_done;
  });
}

// Rank 0 has noticed that rank 2 is lost; rank 1 learns it from what rank 0 said, long before its own deadline.
TEST_P(GroupFaults, WhoWaitsLearnsOfALossThatAnotherNoticed) {
  if (std::string_view(GetParam()) == "nccl") GTEST_SKIP() << "who waits in NCCL learns of ranks that died, not of silent ones";
  std::atomic<int> num_done{0};
  run_three([&](Communicator& group) {
    if (group.rank() == 2) {
      EXPECT_TRUE(prl::testing::eventually([&] { return num_done == 2; }));
      EXPECT_THROW(group.barrier(), PeerLost);
      return;
    }
    float x = 0;
    const milliseconds limit = group.rank() == 0 ? milliseconds(200) : milliseconds(2 * prl::testing::kPatience);
    try {
      group.recv(TensorView{&x, {1}, DType::kF32, {}, 1}, 2, {.what = "a gradient", .timeout = limit});
      ADD_FAILURE() << "nothing was sent";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{2}) << lost.what();
    }
    ++num_done;
  });
}

// A rank that is done waits for the others no longer than a farewell lasts. What these still wait for from each other goes on.
TEST_P(GroupFaults, WhoIsDoneEarlyEndsNothing) {
  const Call patient{.what = "a late message", .timeout = prl::testing::kPatience};
  const auto body = [&](Communicator& group) {
    float x = 7;
    const TensorView view{&x, {1}, DType::kF32, {}, 1};
    if (group.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(3500));  // rank 2's farewell, and what the watch of rank 0 needs to notice it
      group.send(view, 0, patient);
    } else if (group.rank() == 0) {
      x = 0;
      group.recv(view, 1, patient);
      EXPECT_EQ(x, 7);
    }
  };
  testing::run_threads(GetParam(), 3, body, milliseconds(1500));
}

TEST_P(GroupFaults, AbortFromAnotherThreadEndsAWait) {
  run_three([&](Communicator& group) {
    std::jthread other;
    if (group.rank() == 0) other = std::jthread([&] { group.abort("told to stop"); });
    std::vector<float> values = ones(10, group.rank());
    if (group.rank() == 2) return;  // its destructor must not hang either
    EXPECT_THROW(for (int i = 0; i < 100'000; ++i) group.all_reduce(view_of(values)), PeerLost);
  });
}

// Of two groups that share ranks: who learns in one that a rank is lost says so in the other, where others wait for it.
TEST_P(GroupFaults, ALossNoticedElsewhereIsToldToWhoWaits) {
  const bool quotes = std::string_view(GetParam()) != "nccl";  // there the rank that is silent is found by roll call
  std::atomic<int> num_done{0};
  run_three([&](Communicator& group) {
    if (group.rank() == 2) {
      EXPECT_TRUE(prl::testing::eventually([&] { return num_done == 2; }));
      EXPECT_THROW(group.barrier(), PeerLost);
      return;
    }
    if (group.rank() == 0) group.give_up_on(PeerLost({2}, "it fell silent in another group"));
    float x = 0;
    try {
      group.recv(TensorView{&x, {1}, DType::kF32, {}, 1}, group.rank() == 0 ? 1 : 0, {.timeout = 2 * prl::testing::kPatience});
      ADD_FAILURE() << "nothing was sent";
    } catch (const PeerLost& lost) {
      EXPECT_EQ(lost.ranks(), std::vector<int>{2}) << lost.what();
      EXPECT_TRUE(!quotes || std::string_view(lost.what()).find("in another group") != std::string_view::npos) << lost.what();
    }
    EXPECT_EQ(group.lost_ranks(), std::vector<int>{2});
    ++num_done;
  });
}

TEST_P(GroupFaults, ALossInAnotherGroupEndsThisOneAndNamesNobodyInIt) {
  run_three([&](Communicator& group) {
    if (group.rank() == 0) group.give_up_on(PeerLost({}, "rank 7 of another group is silent"));
    try {
      group.barrier({.timeout = 2 * prl::testing::kPatience});
      ADD_FAILURE() << "rank 0 has left";
    } catch (const PeerLost& lost) {
      EXPECT_TRUE(lost.ranks().empty()) << lost.what();
      EXPECT_FALSE(lost.gave_up());
      EXPECT_TRUE(std::string_view(GetParam()) == "nccl" || std::string_view(lost.what()).find("rank 7") != std::string_view::npos)
          << lost.what();
    }
  });
}

TEST_P(GroupFaults, AStartedOperationEndsWithItsDeadline) {
  std::atomic<int> num_done{0};
  run_three([&](Communicator& group) {
    if (group.rank() == 2) {
      EXPECT_TRUE(prl::testing::eventually([&] { return num_done == 2; }));
      return;
    }
    std::vector<float> in = ones(10, group.rank()), out(10);
    const std::vector<TensorView> outs(3, view_of(out));
    const std::vector<ConstTensorView> ins(3, view_of(in));
    const Call call{.what = "gradients", .timeout = milliseconds(300)};
    // One that is joined says who is missing; one that is given up ends all the same.
    if (group.rank() == 0) {
      const auto started = group.start_all_to_all(outs, ins, call);
      try {
        started->join();
        ADD_FAILURE() << "nobody was missing";
      } catch (const PeerLost& lost) {
        EXPECT_NE(std::string(lost.what()).find("gradients"), std::string::npos) << lost.what();
      }
    } else {
      (void)group.start_all_to_all(outs, ins, call);
    }
    EXPECT_THROW(group.barrier(), PeerLost);
    ++num_done;
  });
}

// Whoever waits for the GPU alone, and not for the group, is let go when an operation of the group cannot end.
TEST(NcclFaults, ALostRankKeepsNobodyWhoWaitsForTheDevice) {
  const std::string reason = testing::reason_to_skip("nccl", 2);
  if (!reason.empty()) GTEST_SKIP() << reason;
  for (const bool gives_up : {false, true}) {
    std::atomic<bool> is_done{false};
    testing::run_threads("nccl", 2, [&](Communicator& group) {
      const std::shared_ptr<DeviceRuntime>& runtime = group.options().runtime;
      const Tensor in = Tensor::zeros(runtime, {1 << 20}, DType::kF32), out = Tensor::zeros(runtime, {2 << 20}, DType::kF32);
      const std::vector<TensorView> outs{out.slice(0, 1 << 20).view(), out.slice(1 << 20, 1 << 20).view()};
      const std::vector<ConstTensorView> ins(2, in.view());
      const auto start = [&](milliseconds timeout) {
        return group.start_all_to_all(outs, ins, {.what = "gradients of round 1", .timeout = timeout});
      };
      start(prl::testing::kPatience)->join();  // the ranks are connected from here on
      group.barrier();
      if (group.rank() == 1) {
        EXPECT_TRUE(prl::testing::eventually([&] { return is_done.load(); }));
        return;
      }
      const auto started = start(gives_up ? prl::testing::kPatience : milliseconds(500));
      started->join();
      if (gives_up) group.abort("row 7 is not finite");
      runtime->synchronize();
      try {
        group.barrier();
        ADD_FAILURE() << "the group goes on";
      } catch (const PeerLost& lost) {
        EXPECT_EQ(lost.ranks(), std::vector<int>{gives_up ? 0 : 1}) << lost.what();
        EXPECT_TRUE(gives_up || std::string_view(lost.what()).find("gradients of round 1") != std::string_view::npos) << lost.what();
      }
      is_done = true;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupFaults, ::testing::Values("threads", "gloo", "nccl"), [](const auto& param) { return param.param; });

}  // namespace
}  // namespace prl::comm
