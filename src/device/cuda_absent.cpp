#include "base/error.hpp"
#include "device/device.hpp"

// What a build without nvcc has in place of device/cuda.

namespace prl {
namespace {

constexpr const char* kMissing = "this build has no CUDA: install the CUDA toolkit and build again with -DPRL_CUDA=on";

}  // namespace

std::shared_ptr<DeviceRuntime> make_cuda_runtime(int index) { fail(ErrorCode::kUnavailable, "[cuda:{}] {}", index, kMissing); }

CudaDevices list_cuda_devices() { return {.devices = {}, .missing = kMissing, .versions = ""}; }

}  // namespace prl
