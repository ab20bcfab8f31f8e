#include <gtest/gtest.h>

#include <cstdio>

#include "base/testing/scratch_folder.hpp"
#include "device/testing/test_runtime.hpp"

bool prl::tests_gpu() noexcept { return true; }

// main() of the tests that need a GPU: without one they are skipped (exit code 77, which CTest knows), not passed.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const prl::CudaDevices found = prl::list_cuda_devices(); found.devices.empty()) {
    std::printf("[ SKIPPED  ] no GPU: %s\n", found.missing.c_str());
    return 77;
  }
  prl::ScratchFolder scratch;
  const int status = RUN_ALL_TESTS();
  if (status != 0) scratch.keep();
  return status;
}
