#include "tools/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>

#include "base/error.hpp"
#include "base/units.hpp"

namespace prl::tools {
namespace {

using ::testing::HasSubstr;

boost::json::value planned(config::PlanConfig config) {
  config.json = true;
  return boost::json::parse(plan_report(config, card_of(config)));
}
double seconds(const boost::json::value& plan, const char* part) { return plan.at("seconds").at(part).to_number<double>(); }
/// What is waited for and what travels beside compute.
double travels(const boost::json::value& plan, const char* part) {
  return seconds(plan, part) + plan.at("beside_compute").at(part).to_number<double>();
}

/// A card of round numbers: 1 TFLOP/s, 1 GB/s to neighbours, nothing else counts for much.
config::PlanConfig round_numbers() {
  config::PlanConfig config;
  config.model = "qwen3-0.6b";
  config.seq_len = 1024;
  config.assume_flops = 1;
  config.assume_efficiency = 1;
  config.assume_bandwidth = 1;
  config.assume_memory_bandwidth = 1e6;
  config.assume_latency = 0;
  return config;
}

TEST(Plan, OneDeviceComputesAndExchangesNothing) {
  config::PlanConfig config = round_numbers();
  config.num_rows = 3;
  const boost::json::value plan = planned(config);
  // 6 a weight and token, and 12 * layers * hidden * length a token.
  const double row = 1024 * (6.0 * 596e6 + 12.0 * 28 * 1024 * 1024);
  EXPECT_NEAR(seconds(plan, "compute"), 3 * row / 1e12, 0.01 * 3 * row / 1e12);
  EXPECT_LT(seconds(plan, "exchange"), 1e-3);
  EXPECT_EQ(seconds(plan, "gather"), 0);
  EXPECT_EQ(plan.at("bytes_sent").at("exchange").to_number<double>(), 0);
  EXPECT_EQ(plan.at("least_devices").to_number<int>(), 1);
}

TEST(Plan, DevicesShareRowsAndSendWhatOthersOwn) {
  config::PlanConfig config = round_numbers();
  config.num_rows = 8;
  config.num_devices = 4;
  const boost::json::value plan = planned(config);
  const double parameters = plan.at("parameters").to_number<double>();
  EXPECT_EQ(plan.at("rounds").to_number<int>(), 2);
  // Of a layer's gradient that one rank owns the others send all of it, which three times as much must reach. Where the owners change
  // within a layer it is less, and no less than three quarters, what a balanced exchange would take.
  const double once = 2 * 4 * parameters / 1e9;
  EXPECT_GT(travels(plan, "exchange"), 0.75 * once);
  EXPECT_LT(travels(plan, "exchange"), 3 * once);
  // Of the new bf16 weights a quarter goes to each of three.
  EXPECT_NEAR(travels(plan, "gather"), 2 * parameters * 3 / 4 / 1e9, 0.01);
  config.reduce = config::GradientReduce::kFast;
  EXPECT_NEAR(seconds(planned(config), "exchange"), 4 * parameters * 3 / 4 / 1e9, 0.01) << "once a step, not once a round";
  config.gpus_per_node = 2;
  config.assume_node_bandwidth = 0.1;
  EXPECT_NEAR(seconds(planned(config), "exchange"), 4 * parameters * 2 / 4 / 1e8, 0.05) << "two of the three others are far";
}

TEST(Plan, WhatTravelsBesideTheBackwardPassIsNotWaitedFor) {
  config::PlanConfig config = round_numbers();
  config.num_rows = 8;
  config.num_devices = 4;
  const double all = travels(planned(config), "exchange");
  // A pass of no length hides nothing; one that takes long all but what follows it, which is the embedding, and what of head and embedding
  // does not go at once.
  config.assume_flops = 1e6;
  EXPECT_NEAR(seconds(planned(config), "exchange"), all, 0.01 * all);
  config.assume_flops = 1e-3;
  const boost::json::value slow = planned(config);
  EXPECT_NEAR(travels(slow, "exchange"), all, 0.01 * all);
  EXPECT_LT(seconds(slow, "exchange"), 0.5 * all);
  const double embedding = 2 * 4 * 151936.0 * 1024 * 3 / 4 / 1e9;  // in two rounds, evenly owned
  EXPECT_GT(seconds(slow, "exchange"), 0.9 * embedding);
  config.assume_flops = 1;
  const boost::json::value plan = planned(config);
  EXPECT_LE(plan.at("beside_compute").at("exchange").to_number<double>(), seconds(plan, "compute"));
  EXPECT_LT(seconds(slow, "exchange"), seconds(plan, "exchange") + 1e-9);
  EXPECT_NEAR(seconds(plan, "step"),
              seconds(plan, "compute") + seconds(plan, "exchange") + seconds(plan, "optimizer") + seconds(plan, "gather"), 1e-6);
}

TEST(Plan, NewWeightsThatTravelUnderTheForwardPassAreNotWaitedFor) {
  config::PlanConfig config = round_numbers();
  config.num_rows = 8;
  config.num_devices = 4;
  config.assume_flops = 1e6;
  const double all = travels(planned(config), "gather");
  EXPECT_NEAR(seconds(planned(config), "gather"), all, 0.01 * all) << "a pass of no length hides nothing";
  // One that takes long hides all but what it begins with: embedding, vectors and two layers.
  config.assume_flops = 1e-3;
  const boost::json::value slow = planned(config);
  EXPECT_NEAR(travels(slow, "gather"), all, 0.01 * all);
  const double parameters = slow.at("parameters").to_number<double>(), embedding = 151936.0 * 1024;
  const double first = 2 * (embedding + (parameters - embedding) * 2 / 28) * 3 / 4 / 1e9;
  EXPECT_NEAR(seconds(slow, "gather"), first, 0.05 * first);
  // The weights of an RL step are published first.
  config.work = config::PlanWork::kRl;
  config.seq_len = 4096;
  EXPECT_EQ(planned(config).at("beside_compute").at("gather").to_number<double>(), 0);
}

TEST(Plan, LayersThatAreGatheredTakeLessMemoryAndMoreTraffic) {
  config::PlanConfig config = round_numbers();
  config.model = "8b";
  config.num_devices = 8;
  config.num_rows = 16;
  const auto weights = [](const boost::json::value& plan) {
    for (const boost::json::value& part : plan.at("memory").at(0).at("parts").as_array())
      if (part.at("name").as_string() == "weights") return part.at("bytes").to_number<double>();
    return 0.0;
  };
  const boost::json::value whole = planned(config);
  config.reshard_after_forward = true;
  const boost::json::value divided = planned(config);
  const double parameters = whole.at("parameters").to_number<double>(), outside = 2.0 * 151936 * 4096;
  EXPECT_NEAR(weights(whole), 2 * parameters, 1e6);
  EXPECT_NEAR(weights(divided), 2 * (outside + (parameters - outside) * (1.0 / 8 + 2.0 / 36)), 0.02 * weights(divided));
  // Of two rounds each takes the layers twice, but for the two that are there when a pass turns.
  const double layers = 2 * (parameters - outside) * 7 / 8, once = 2 * parameters * 7 / 8;
  EXPECT_NEAR(whole.at("bytes_sent").at("gather").to_number<double>(), once, 0.02 * once);
  EXPECT_NEAR(divided.at("bytes_sent").at("gather").to_number<double>(), 2 * outside * 7 / 8 + layers * (2 * (2 * 36 - 4) + 2) / 36.0,
              0.05 * 4 * layers);
  config.assume_flops = 1e-3;
  EXPECT_LT(seconds(planned(config), "gather"), 0.2 * travels(planned(config), "gather"));
}

TEST(Plan, SaysWhatFits) {
  config::PlanConfig config;
  config.model = "8b";
  config.card = "h200";
  config.seq_len = 4096;
  const boost::json::value alone = planned(config);
  EXPECT_FALSE(alone.at("fits").as_bool()) << "8.2 B parameters of 18 bytes";
  EXPECT_THAT(std::string(alone.at("missing").as_string()), HasSubstr("GiB"));
  config.num_devices = static_cast<int>(alone.at("least_devices").as_int64());
  ASSERT_GT(config.num_devices, 1);
  EXPECT_TRUE(planned(config).at("fits").as_bool());
  EXPECT_GE(planned(config).at("longest_row").as_int64(), 4096);
  config.num_devices /= 2;
  EXPECT_FALSE(planned(config).at("fits").as_bool()) << "the least number is the least";
  config.num_devices = 1;
  config.optim_cpu_offload = true;
  EXPECT_LT(planned(config).at("memory").at(0).at("total").to_number<double>(), alone.at("memory").at(0).at("total").to_number<double>());
}

TEST(Plan, SamplesOnDevicesOfTheirOwnOrOnThoseThatTrain) {
  config::PlanConfig config;
  config.work = config::PlanWork::kRl;
  config.card = "h200";
  config.seq_len = 4096;
  const boost::json::value shared = planned(config);
  EXPECT_NEAR(seconds(shared, "step"),
              seconds(shared, "compute") + seconds(shared, "exchange") + seconds(shared, "optimizer") + seconds(shared, "sampling") +
                  seconds(shared, "weight_sync"),
              1e-9);
  config.num_infer_devices = 1;
  const boost::json::value apart = planned(config);
  EXPECT_EQ(apart.at("memory").as_array().size(), 2u);
  EXPECT_LT(seconds(apart, "step"), seconds(shared, "step"));
  EXPECT_GT(seconds(apart, "weight_sync"), seconds(shared, "weight_sync"));
  config.num_infer_devices = 4;
  EXPECT_LT(seconds(planned(config), "sampling"), seconds(apart, "sampling"));
  config.json = false;
  const std::string text = plan_report(config, card_of(config));
  for (const char* wanted : {"it fits", "sampling", "weight_sync", "assumed", "989 TFLOP/s at 50% in training", "the first rank sends"})
    EXPECT_THAT(text, HasSubstr(wanted));
  config.num_infer_devices = 8;
  EXPECT_THAT(plan_report(config, card_of(config)), HasSubstr("the first rank sends"));
  config.json = true;
  const double from_one = seconds(planned(config), "weight_sync");
  config.num_devices = 4;
  EXPECT_NEAR(seconds(planned(config), "weight_sync"), from_one / 4, 0.03 * from_one) << "each rank sends a quarter to each engine";
  config.json = false;
  EXPECT_THAT(plan_report(config, card_of(config)), HasSubstr("each rank sends its part"));
}

TEST(Plan, NamesWhatIsNotKnown) {
  config::PlanConfig config;
  config.card = "h1000";
  try {
    (void)card_of(config);
    FAIL() << "a card that does not exist";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a100, h100, h200, b200, l40s, local"));
  }
  config.card = "h100";
  config.seq_len = 1 << 20;
  EXPECT_THROW(plan_report(config, card_of(config)), Error) << "longer than the model's positions";
}

}  // namespace
}  // namespace prl::tools
