#include "launch/run_lock.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.hpp"

namespace prl::launch {
namespace {

using namespace std::chrono_literals;

TEST(RunLock, OneHolderAtATimeAndNothingLeftBehind) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl_run_lock_{}", ::getpid());
  {
    const RunLock first(folder);
    try {
      const RunLock second(folder, 0ms);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists);
      EXPECT_NE(std::string(error.what()).find(fmt::format("process {}", ::getpid())), std::string::npos) << error.what();
    }
  }
  const RunLock third(folder, 0ms);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace prl::launch
