#pragma once

#include "device/device.hpp"

namespace prl {

/// The device of a test that is compiled once for the CPU and once, with PRL_TEST_CUDA, for a GPU.
inline std::shared_ptr<DeviceRuntime> make_test_runtime() {
#ifdef PRL_TEST_CUDA
  return make_cuda_runtime();
#else
  return make_cpu_runtime();
#endif
}

}  // namespace prl
