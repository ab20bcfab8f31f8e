#pragma once

#include "device/device.hpp"

namespace prl {

/// Whether this is the program of a module's tests that needs a GPU. Tests that CUDA_TESTS names (cmake/prl.cmake) are compiled once and
/// are part of both programs: of <module>_test, where they test the CPU, and of <module>_cuda_test.
bool tests_gpu() noexcept;

/// The device of such a test.
inline std::shared_ptr<DeviceRuntime> make_test_runtime() { return tests_gpu() ? make_cuda_runtime() : make_cpu_runtime(); }
/// One of several: a GPU of its own each, or streams of the same.
inline std::shared_ptr<DeviceRuntime> make_test_device(std::size_t rank) {
  return tests_gpu() ? make_cuda_runtime(static_cast<int>(rank % list_cuda_devices().devices.size())) : make_cpu_runtime();
}

}  // namespace prl
