#include <gtest/gtest.h>

#include "base/testing/scratch_folder.hpp"
#include "device/testing/test_runtime.hpp"

bool prl::tests_gpu() noexcept { return false; }

// main() of every unit test program.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  prl::ScratchFolder scratch;
  const int status = RUN_ALL_TESTS();
  if (status != 0) scratch.keep();
  return status;
}
