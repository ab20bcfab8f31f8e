#include "launch/eval_child.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.hpp"

namespace prl::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// CUDA_VISIBLE_DEVICES for the time of a test.
class EvalDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* set = std::getenv("CUDA_VISIBLE_DEVICES")) before_ = set;
    ::setenv("CUDA_VISIBLE_DEVICES", "5,6,7", 1);
    config_.eval.emplace();
    config_.inference.emplace();
  }
  void TearDown() override { before_ ? ::setenv("CUDA_VISIBLE_DEVICES", before_->c_str(), 1) : ::unsetenv("CUDA_VISIBLE_DEVICES"); }

  config::SftSingleNode& node() { return std::get<config::SftSingleNode>(config_.deployment); }

  config::SftConfig config_;

 private:
  std::optional<std::string> before_;
};

TEST_F(EvalDevices, TheGpuAfterThoseOfTheRanks) {
  EXPECT_EQ(eval_devices(config_, true, 3), "6");
  node().num_gpus = 2;
  EXPECT_EQ(eval_devices(config_, true, 3), "7");
  EXPECT_EQ(eval_devices(config_, false, 3), "5") << "ranks on CPUs take no GPU";
}

TEST_F(EvalDevices, TheCpuWhereItIsAskedForOrThereIsNothingElse) {
  EXPECT_EQ(eval_devices(config_, false, 0), std::nullopt);
  node().num_infer_gpus = 0;
  EXPECT_EQ(eval_devices(config_, true, 3), "");
  node().num_infer_gpus = 1;
  config_.inference->compute.device = config::DeviceKind::kCpu;
  EXPECT_EQ(eval_devices(config_, true, 3), "");
}

TEST_F(EvalDevices, TooFewGpusAreRefusedByTheKey) {
  const auto refusal = [&](int num_gpus, bool trains_on_gpus) -> std::string {
    try {
      (void)eval_devices(config_, trains_on_gpus, num_gpus);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  node().num_gpus = 3;
  EXPECT_THAT(refusal(3, true), AllOf(HasSubstr("deployment.num_infer_gpus: "), HasSubstr("the 3 of the ranks, and there are 3 in all"),
                                      HasSubstr("deployment.num_infer_gpus = 0")));
  config_.inference->compute.device = config::DeviceKind::kCuda;
  EXPECT_THAT(refusal(0, false), HasSubstr("there are 0 in all"));
}

}  // namespace
}  // namespace prl::launch
