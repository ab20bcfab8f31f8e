#include "launch/visible_gpus.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/error.hpp"

namespace prl::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// CUDA_VISIBLE_DEVICES for the time of a test.
class VisibleGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const char* set = std::getenv("CUDA_VISIBLE_DEVICES")) before_ = set;
  }
  void TearDown() override { before_ ? ::setenv("CUDA_VISIBLE_DEVICES", before_->c_str(), 1) : ::unsetenv("CUDA_VISIBLE_DEVICES"); }

 private:
  std::optional<std::string> before_;
};

TEST_F(VisibleGpus, NumbersCountInTheListThatIsSet) {
  ::setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a", 1);
  EXPECT_THAT(*listed_gpus(), ElementsAre("4", "GPU-5a"));
  EXPECT_EQ(visible_devices_of(std::vector<int>{0}), "4");
  EXPECT_EQ(visible_devices_of(std::vector<int>{1, 0}), "GPU-5a,4");
  try {
    (void)visible_devices_of(std::vector<int>{0, 2});
    ADD_FAILURE() << "a third GPU of two";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("GPU 2 is asked for, but CUDA_VISIBLE_DEVICES = 4,GPU-5a lists 2"));
  }
}

TEST_F(VisibleGpus, WithoutAListTheyAreThoseOfTheMachine) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_FALSE(listed_gpus().has_value());
  EXPECT_EQ(visible_devices_of(std::vector<int>{3, 7}), "3,7");
}

TEST_F(VisibleGpus, AListMayBeEmptyOrEndEarly) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_THAT(*listed_gpus(), ElementsAre());
  EXPECT_EQ(visible_devices_of(std::vector<int>{0}), "");
  ::setenv("CUDA_VISIBLE_DEVICES", "1,-1,2", 1);
  EXPECT_THAT(*listed_gpus(), ElementsAre("1"));
}

}  // namespace
}  // namespace prl::launch
