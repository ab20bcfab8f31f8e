#include "orchestrator/batch_shipper.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "net/io_runtime.hpp"
#include "rollouts/local_queue.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;

std::vector<wire::TrainingSample> two_samples() {
  wire::TrainingSample sample;
  sample.env_name = "tiny";
  sample.token_ids = {1, 2, 3, 4, 5};
  sample.mask = {0, 0, 1, 1, 1};
  sample.logprobs = {0, 0, -1, -1, -1};
  sample.temperatures.assign(5, 1.0f);
  sample.advantages.assign(5, 1.0f);
  return {sample, sample};
}

BatchShipper::Options options(std::chrono::milliseconds timeout = 20s) {
  BatchShipper::Options out;
  out.pack.seq_len = 16;
  out.timeout = timeout;
  return out;
}

asio::awaitable<std::vector<bool>> ship_steps(BatchShipper* shipper, int num_steps) {
  std::vector<bool> sent;
  for (int step = 1; step <= num_steps; ++step) {
    auto shipping = shipper->ship(step, two_samples());
    const BatchShipper::Shipment shipment = co_await std::move(shipping);
    sent.push_back(shipment.is_sent);
  }
  co_return sent;
}

TEST(BatchShipper, PacksBatchesAndWaitsForRoom) {
  rollouts::LocalSampleQueue queue(1, 1);
  RunControl control;
  BatchShipper shipper(queue.make_sender(), options(), control);
  net::IoRuntime io(1);
  const auto receiver = queue.make_receiver(0);
  std::vector<rollouts::RankBatch> taken;
  std::jthread trainer([&](std::stop_token stop) {
    while (!receiver->is_closed() && !stop.stop_requested())
      if (auto batch = receiver->pop(20ms)) taken.push_back(std::move(*batch));
  });
  EXPECT_EQ(io.run_blocking(ship_steps(&shipper, 3), 60s), (std::vector<bool>{true, true, true}));
  shipper.close();
  io.run_blocking(shipper.drain(3), 60s);
  trainer.join();
  ASSERT_EQ(taken.size(), 3u);
  for (std::size_t i = 0; i < taken.size(); ++i) {
    EXPECT_EQ(taken[i].step, static_cast<std::int64_t>(i) + 1);
    ASSERT_EQ(taken[i].micro_batches.size(), 1u) << "both samples fit one row";
    EXPECT_EQ(taken[i].micro_batches[0].sequence_lengths, (std::vector<std::int32_t>{5, 5}));
  }
}

TEST(BatchShipper, AFullQueueEndsByItsDeadlineOrByAStop) {
  rollouts::LocalSampleQueue queue(1, 1);
  RunControl control;
  BatchShipper shipper(queue.make_sender(), options(100ms), control);
  net::IoRuntime io(1);
  try {
    io.run_blocking(ship_steps(&shipper, 2), 60s);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_NE(std::string(error.what()).find("so that batch 2 can be sent"), std::string::npos) << error.what();
  }
  rollouts::LocalSampleQueue other(1, 1);
  BatchShipper stopped(other.make_sender(), options(), control);
  std::stop_source stop;
  stop.request_stop();
  control.begin(stop.get_token());
  EXPECT_EQ(io.run_blocking(ship_steps(&stopped, 2), 60s), (std::vector<bool>{true, false}));
}

TEST(BatchShipper, ABatchThatWasTrainedOnIsNotWaitedFor) {
  rollouts::LocalSampleQueue queue(1, 1);
  RunControl control;
  BatchShipper::Options known = options();
  std::int64_t num_asked = 0;
  known.newest_policy = [&] { return PolicyVersion{++num_asked < 2 ? 1 : 2}; };
  BatchShipper shipper(queue.make_sender(), known, control);
  net::IoRuntime io(1);
  EXPECT_EQ(io.run_blocking(ship_steps(&shipper, 2), 60s), (std::vector<bool>{true, true}));
  EXPECT_EQ(num_asked, 2) << "while there is room nobody asks; then until the policy is that of batch 2";
  const auto receiver = queue.make_receiver(0);
  EXPECT_EQ(receiver->pop(1s)->step, 1);
  EXPECT_FALSE(receiver->pop(1ms));
}

TEST(BatchShipper, TheQueueHasTheRanksOfThePacking) {
  rollouts::LocalSampleQueue queue(2, 1);
  RunControl control;
  EXPECT_THROW(BatchShipper(queue.make_sender(), options(), control), Error);
}

}  // namespace
}  // namespace prl::orchestrator
