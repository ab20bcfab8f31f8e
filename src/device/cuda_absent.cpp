#include "base/error.hpp"
#include "device/cuda_build.hpp"
#include "device/cuda_host_link.hpp"
#include "device/device.hpp"

// What a build without nvcc has in place of device/cuda.

namespace prl {
namespace {

constexpr const char* kMissing = "this build has no CUDA: install the CUDA toolkit and build again with -DPRL_CUDA=on";

}  // namespace

std::shared_ptr<DeviceRuntime> make_cuda_stream(int index) { return make_cuda_runtime(index); }
std::shared_ptr<DeviceRuntime> make_cuda_runtime(int index) { fail(ErrorCode::kUnavailable, "[cuda:{}] {}", index, kMissing); }

std::shared_ptr<HostLink> make_cuda_host_link(const std::shared_ptr<DeviceRuntime>& /*runtime*/, bool /*page_locked*/) {
  fail(ErrorCode::kUnavailable, "[cuda] {}", kMissing);
}

bool has_cuda_build() noexcept { return false; }

CudaDevices list_cuda_devices() { return {.devices = {}, .missing = kMissing, .versions = ""}; }

}  // namespace prl
