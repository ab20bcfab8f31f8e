#include "rollouts/sample_queue.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>
#include <tuple>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/eventually.hpp"
#include "rollouts/file_queue.hpp"
#include "rollouts/local_queue.hpp"
#include "rollouts/zmq_queue.hpp"

namespace prl::rollouts {
namespace {

using namespace std::chrono_literals;

wire::TrainingBatch make_batch(std::int64_t step, std::int64_t num_ranks) {
  wire::TrainingBatch batch;
  batch.step = step;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    wire::MicroBatch micro;
    micro.input_ids = {static_cast<std::int32_t>(step), static_cast<std::int32_t>(rank), 7};
    micro.loss_mask = {0, 1, 1};
    micro.advantages = {0.0f, 0.5f, -0.25f};
    micro.inference_logprobs = {0.0f, -0.1f, -1.75f};
    micro.position_ids = {0, 1, 2};
    micro.sequence_lengths = {3};
    micro.temperatures = {1, 1, 1};
    micro.env_names = {"reverse-text"};
    auto pixels = std::make_shared<wire::ImagePixels>(wire::ImagePixels{
        .rgb = std::vector<std::uint8_t>(12, static_cast<std::uint8_t>(step)), .height = 2, .width = 2, .deviation = {1, 1, 1}});
    pixels->hash = wire::hash_of(*pixels);
    micro.images = {{.pixels = pixels, .first = 1, .rows = 1, .cols = 1}};
    batch.ranks.push_back({micro});
  }
  return batch;
}

void expect_batch(const std::optional<RankBatch>& batch, std::int64_t step, std::int64_t rank) {
  ASSERT_TRUE(batch.has_value()) << "step " << step << " rank " << rank;
  EXPECT_EQ(batch->step, step);
  ASSERT_EQ(batch->micro_batches.size(), 1u);
  EXPECT_EQ(batch->micro_batches[0].input_ids,
            (std::vector<std::int32_t>{static_cast<std::int32_t>(step), static_cast<std::int32_t>(rank), 7}));
  EXPECT_EQ(batch->micro_batches[0].inference_logprobs[2], -1.75f);
  ASSERT_EQ(batch->micro_batches[0].images.size(), 1u);
  EXPECT_EQ(batch->micro_batches[0].images[0].first, 1);
  EXPECT_EQ(batch->micro_batches[0].images[0].pixels->rgb[11], static_cast<std::uint8_t>(step));
}

/// One implementation under test: how to make both ends over the same transport.
struct Ends {
  std::function<std::unique_ptr<SampleSender>(std::int64_t num_ranks, std::int64_t first_step)> sender;
  std::function<std::unique_ptr<SampleReceiver>(std::int64_t rank, std::int64_t first_step)> receiver;
  std::shared_ptr<void> keep;  ///< what both ends share
};

Ends local_ends(std::int64_t num_ranks) {
  auto queue = std::make_shared<LocalSampleQueue>(num_ranks, 2);
  return {[queue](std::int64_t, std::int64_t) { return queue->make_sender(); },
          [queue](std::int64_t rank, std::int64_t) { return queue->make_receiver(rank); }, queue};
}

std::filesystem::path fresh_folder() {
  static std::atomic<int> counter{0};
  const auto path = std::filesystem::temp_directory_path() / fmt::format("prl_rollouts_{}_{}", ::getpid(), counter++);
  std::filesystem::remove_all(path);
  return path;
}

Ends file_ends(std::int64_t) {
  const std::filesystem::path folder = fresh_folder();
  auto cleaner = std::shared_ptr<void>(nullptr, [folder](void*) { std::filesystem::remove_all(folder); });
  return {[folder](std::int64_t num_ranks, std::int64_t first_step) {
            return make_file_sender({.folder = folder, .num_ranks = num_ranks, .first_step = first_step, .capacity = 2});
          },
          [folder](std::int64_t rank, std::int64_t first_step) {
            return make_file_receiver({.folder = folder, .rank = rank, .first_step = first_step});
          },
          cleaner};
}

int free_port() {
  static std::atomic<int> next{21000 + (::getpid() % 2000) * 4};
  return next.fetch_add(4);
}

Ends zmq_ends(std::int64_t) {
  const int port = free_port();
  return {[port](std::int64_t num_ranks, std::int64_t first_step) {
            return make_zmq_sender({.port = port, .num_ranks = num_ranks, .first_step = first_step, .capacity = 2});
          },
          [port](std::int64_t rank, std::int64_t first_step) {
            return make_zmq_receiver({.port = port, .rank = rank, .first_step = first_step});
          },
          nullptr};
}

struct Implementation {
  const char* name;
  Ends (*make)(std::int64_t num_ranks);
};

class SampleQueueConformance : public ::testing::TestWithParam<Implementation> {};

TEST_P(SampleQueueConformance, StepsArriveOnceAndInOrderOnEveryRank) {
  const Ends ends = GetParam().make(2);
  auto receiver_0 = ends.receiver(0, 1);
  auto receiver_1 = ends.receiver(1, 1);
  auto sender = ends.sender(2, 1);
  std::jthread pushing([&] {
    for (std::int64_t step = 1; step <= 6; ++step) {
      bool is_sent = false;
      for (int tries = 0; tries < 100 && !is_sent; ++tries) is_sent = sender->push(make_batch(step, 2), 100ms);
      ASSERT_TRUE(is_sent) << step;
    }
    sender->close();
  });
  std::jthread other([&] {
    for (std::int64_t step = 1; step <= 6; ++step) expect_batch(receiver_1->pop(30s), step, 1);
    EXPECT_FALSE(receiver_1->pop(30s).has_value());
    EXPECT_TRUE(receiver_1->is_closed());
  });
  for (std::int64_t step = 1; step <= 6; ++step) expect_batch(receiver_0->pop(30s), step, 0);
  EXPECT_FALSE(receiver_0->pop(30s).has_value());
  EXPECT_TRUE(receiver_0->is_closed());
}

TEST_P(SampleQueueConformance, AFullQueueRefusesAndTakesTheBatchLater) {
  const Ends ends = GetParam().make(1);
  auto receiver = ends.receiver(0, 1);
  EXPECT_FALSE(receiver->pop(20ms).has_value());
  auto sender = ends.sender(1, 1);
  std::jthread announcing([&] { static_cast<void>(receiver->pop(1ms)); });
  announcing.join();
  bool first = false;
  for (int tries = 0; tries < 50 && !first; ++tries) {
    first = sender->push(make_batch(1, 1), 100ms);
    if (!first) {
      EXPECT_FALSE(receiver->pop(1ms).has_value());
    }
  }
  ASSERT_TRUE(first);
  ASSERT_TRUE(sender->push(make_batch(2, 1), 30s));
  EXPECT_FALSE(sender->push(make_batch(3, 1), 30ms)) << "two steps wait: the third must not fit";
  expect_batch(receiver->pop(30s), 1, 0);
  ASSERT_TRUE(sender->push(make_batch(3, 1), 30s));
  expect_batch(receiver->pop(30s), 2, 0);
  expect_batch(receiver->pop(30s), 3, 0);
  EXPECT_FALSE(receiver->is_closed());
  EXPECT_FALSE(receiver->pop(10ms).has_value());
  sender->close();
  EXPECT_THROW(static_cast<void>(sender->push(make_batch(4, 1), 10ms)), Error);
  EXPECT_FALSE(receiver->pop(30s).has_value());
  EXPECT_TRUE(receiver->is_closed());
}

TEST_P(SampleQueueConformance, AWrongNumberOfRanksIsRefused) {
  const Ends ends = GetParam().make(2);
  auto sender = ends.sender(2, 1);
  try {
    static_cast<void>(sender->push(make_batch(1, 3), 10ms));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("3 ranks"), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, SampleQueueConformance,
                         ::testing::Values(Implementation{"local", &local_ends}, Implementation{"file", &file_ends},
                                           Implementation{"zmq", &zmq_ends}),
                         [](const auto& param_info) { return param_info.param.name; });

/// Pushes until there is room.
void push_step(SampleSender& sender, std::int64_t step) {
  bool is_sent = false;
  for (int tries = 0; tries < 200 && !is_sent; ++tries) is_sent = sender.push(make_batch(step, sender.num_ranks()), 100ms);
  ASSERT_TRUE(is_sent) << step << ": " << sender.describe();
}

std::optional<RankBatch> pop_step(SampleReceiver& receiver) {
  std::optional<RankBatch> batch;
  for (int tries = 0; tries < 200 && !batch; ++tries) batch = receiver.pop(100ms);
  return batch;
}

class SampleQueueOfProcesses : public ::testing::TestWithParam<Implementation> {};

TEST_P(SampleQueueOfProcesses, ASenderInTheOthersPlaceRepeatsItsLastStepAndNobodyTakesItTwice) {
  const Ends ends = GetParam().make(1);
  auto receiver = ends.receiver(0, 1);
  auto sender = ends.sender(1, 1);
  std::optional<RankBatch> batch;
  std::jthread taking([&] { batch = pop_step(*receiver); });
  push_step(*sender, 1);
  taking.join();
  expect_batch(batch, 1, 0);
  sender.reset();  // killed before it could note that step 1 was sent
  sender = ends.sender(1, 1);
  std::vector<std::int64_t> steps;
  std::jthread rest([&] {
    while (steps.size() < 4) {
      const std::optional<RankBatch> next = pop_step(*receiver);
      if (!next) return;
      steps.push_back(next->step);
    }
  });
  for (std::int64_t step = 1; step <= 5; ++step) push_step(*sender, step);
  rest.join();
  EXPECT_EQ(steps, (std::vector<std::int64_t>{2, 3, 4, 5}));
}

TEST_P(SampleQueueOfProcesses, AStepThatALostRankTookIsThereForTheNextOne) {
  const Ends ends = GetParam().make(1);
  auto sender = ends.sender(1, 1);
  auto lost = ends.receiver(0, 1);
  std::optional<RankBatch> batch;
  std::jthread taking([&] {
    for (int step = 1; step <= 2; ++step) batch = pop_step(*lost);
  });
  for (std::int64_t step = 1; step <= 2; ++step) push_step(*sender, step);
  taking.join();
  expect_batch(batch, 2, 0);
  lost.reset();
  auto next = ends.receiver(0, 2);
  expect_batch(pop_step(*next), 2, 0);
  push_step(*sender, 3);
  expect_batch(pop_step(*next), 3, 0);
}

INSTANTIATE_TEST_SUITE_P(Processes, SampleQueueOfProcesses,
                         ::testing::Values(Implementation{"files", file_ends}, Implementation{"zmq", zmq_ends}),
                         [](const auto& test) { return test.param.name; });

TEST(FileQueue, ARestartedReceiverReadsTakenStepsAgain) {
  const Ends ends = file_ends(1);
  auto sender = ends.sender(1, 1);
  ASSERT_TRUE(sender->push(make_batch(1, 1), 30s));
  ASSERT_TRUE(sender->push(make_batch(2, 1), 30s));
  {
    auto receiver = ends.receiver(0, 1);
    expect_batch(receiver->pop(30s), 1, 0);
    expect_batch(receiver->pop(30s), 2, 0);
  }
  auto restarted = ends.receiver(0, 2);
  expect_batch(restarted->pop(30s), 2, 0);
}

TEST(FileQueue, AStepTakenAsSoonAsItIsThereStaysForARestart) {
  const Ends ends = file_ends(1);
  auto sender = ends.sender(1, 1);
  for (std::int64_t step = 1; step <= 100; ++step) {
    std::jthread taking([&] {
      // Without a pause between looks, so that the step is taken while the sender is still at work on it.
      const auto receiver = ends.receiver(0, step);
      const auto until = std::chrono::steady_clock::now() + 60s;
      while (std::chrono::steady_clock::now() < until && !receiver->pop(0ms)) {
      }
    });
    push_step(*sender, step);
    taking.join();
    const auto restarted = ends.receiver(0, step);
    expect_batch(restarted->pop(0ms), step, 0);
  }
}

TEST(FileQueue, AnEndOfAnEarlierRunIsIgnored) {
  const std::filesystem::path folder = fresh_folder();
  {
    auto sender = make_file_sender({.folder = folder});
    ASSERT_TRUE(sender->push(make_batch(1, 1), 30s));
    sender->close();
  }
  auto restarted = make_file_receiver({.folder = folder, .first_step = 1});
  expect_batch(restarted->pop(30s), 1, 0);
  EXPECT_TRUE(restarted->is_closed()) << "of this run: its last step was ours to take";
  auto resumed = make_file_receiver({.folder = folder, .first_step = 2});
  EXPECT_FALSE(resumed->is_closed());
  EXPECT_TRUE(resumed->was_closed_before());
  EXPECT_FALSE(resumed->pop(5ms).has_value());
  auto sender = make_file_sender({.folder = folder, .first_step = 2});
  EXPECT_FALSE(resumed->was_closed_before());
  ASSERT_TRUE(sender->push(make_batch(2, 1), 30s));
  expect_batch(resumed->pop(30s), 2, 0);
  sender->close();
  EXPECT_TRUE(resumed->is_closed());
  std::filesystem::remove_all(folder);
}

TEST(FileQueue, AStepWhoseFileWasRemovedIsAnErrorAndNoWait) {
  const auto folder = fresh_folder();
  const auto sender = make_file_sender({.folder = folder});
  const auto receiver = make_file_receiver({.folder = folder});
  ASSERT_TRUE(sender->push(make_batch(1, 1), 1s));
  expect_batch(receiver->pop(5s), 1, 0);
  EXPECT_FALSE(receiver->pop(1ms)) << "nothing was sent, nothing is missing";
  ASSERT_TRUE(sender->push(make_batch(2, 1), 1s));
  std::filesystem::remove(folder / "step_2/rank_0.bin");
  try {
    receiver->pop(60s);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_NE(std::string(error.what()).find("step 2 was sent, but "), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("step_2/rank_0.bin"), std::string::npos) << error.what();
  }
  // What an earlier run said it had sent is not missing in this one.
  const auto resumed = make_file_receiver({.folder = folder, .first_step = 2});
  EXPECT_FALSE(resumed->pop(1ms));
  const auto anew = make_file_sender({.folder = folder, .first_step = 2});
  ASSERT_TRUE(anew->push(make_batch(2, 1), 1s));
  expect_batch(resumed->pop(5s), 2, 0);
  std::filesystem::remove_all(folder);
}

TEST(ZmqQueue, RolesOfTwoRunsOnOnePortDoNotHearEachOther) {
  const int port = free_port();
  const auto sender = make_zmq_sender({.port = port, .run_id = "first"});
  const auto stranger = make_zmq_receiver({.port = port, .run_id = "second"});
  EXPECT_FALSE(stranger->pop(300ms));
  EXPECT_FALSE(sender->push(make_batch(1, 1), 100ms)) << "the stranger counts as the trainer";
  const auto receiver = make_zmq_receiver({.port = port, .run_id = "first"});
  EXPECT_FALSE(receiver->pop(100ms));
  ASSERT_TRUE(sender->push(make_batch(1, 1), 30s));
  expect_batch(receiver->pop(30s), 1, 0);
  EXPECT_FALSE(stranger->pop(100ms));
}

TEST(FileQueue, ADamagedFileIsNamed) {
  const std::filesystem::path folder = fresh_folder();
  std::filesystem::create_directories(folder / "step_1");
  std::ofstream(folder / "step_1" / "rank_0.bin") << "\x93nonsense";
  auto receiver = make_file_receiver({.folder = folder});
  try {
    static_cast<void>(receiver->pop(100ms));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_NE(std::string(error.what()).find("rank_0.bin"), std::string::npos) << error.what();
  }
  clean_file_queue(folder, 1);
  EXPECT_FALSE(std::filesystem::exists(folder / "step_1" / "rank_0.bin"));
  std::filesystem::remove_all(folder);
}

TEST(FileQueue, EveryFlippedBitIsFound) {
  const std::filesystem::path folder = fresh_folder(), file = folder / "step_1" / "rank_0.bin";
  auto sender = make_file_sender({.folder = folder});
  ASSERT_TRUE(sender->push(make_batch(1, 1), 1s));
  const std::string whole = read_file(file);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    std::ofstream(file, std::ios::binary | std::ios::trunc) << damaged;
    auto receiver = make_file_receiver({.folder = folder});
    try {
      static_cast<void>(receiver->pop(1s));
      FAIL() << "byte " << at << " of " << whole.size() << " was changed and the batch taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
    }
  }
  std::ofstream(file, std::ios::binary | std::ios::trunc) << whole;
  expect_batch(make_file_receiver({.folder = folder})->pop(1s), 1, 0);
  std::filesystem::remove_all(folder);
}

TEST(ZmqQueue, ATakenPortIsAClearError) {
  const Ends ends = zmq_ends(1);
  auto sender = ends.sender(1, 1);
  try {
    ends.sender(1, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_NE(std::string(error.what()).find("rollout_transport.port"), std::string::npos) << error.what();
  }
}

TEST(ZmqQueue, ARestartedReceiverGetsTheStepItLacks) {
  const Ends ends = zmq_ends(1);
  auto sender = ends.sender(1, 1);
  {
    auto receiver = ends.receiver(0, 1);
    std::jthread pushing([&] { EXPECT_TRUE(sender->push(make_batch(1, 1), 30s)); });
    expect_batch(receiver->pop(30s), 1, 0);
  }
  auto restarted = ends.receiver(0, 2);
  std::jthread pushing([&] { EXPECT_TRUE(sender->push(make_batch(2, 1), 30s)); });
  expect_batch(restarted->pop(30s), 2, 0);
  pushing.join();
  sender->close();
  EXPECT_FALSE(restarted->pop(30s).has_value());
  EXPECT_TRUE(restarted->is_closed());
}

TEST(ZmqQueue, DrainWaitsForTheLastStepAndForNothingElse) {
  const Ends ends = zmq_ends(1);
  auto sender = ends.sender(1, 1);
  std::optional<std::unique_ptr<SampleReceiver>> receiver = ends.receiver(0, 1);
  // The rank announces itself before anything is pushed, so that none of these pops can take the batch.
  ASSERT_TRUE(prl::testing::eventually([&] {
    std::ignore = (*receiver)->pop(0s);
    return sender->describe().find("rank 0 wants step 1") != std::string::npos;
  })) << sender->describe();
  ASSERT_TRUE(sender->push(make_batch(1, 1), 30s));
  sender->close();
  EXPECT_FALSE(sender->drain(0s));
  expect_batch((*receiver)->pop(30s), 1, 0);
  receiver.reset();  // a trainer that is done after its last step asks for no more
  EXPECT_TRUE(sender->drain(10s));
}

}  // namespace
}  // namespace prl::rollouts
