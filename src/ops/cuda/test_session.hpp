#pragma once

#include <memory>

#include "device/device.hpp"
#include "ops/op_table.hpp"

// For tests: the GPU's bodies on memory that both sides see.

namespace prl::ops::testing {

/// A CUDA runtime whose memory is pinned host memory at one address for host and device. Its copies are waited for.
std::shared_ptr<DeviceRuntime> make_visible_cuda_runtime();

/// The CUDA bodies, each followed by a wait for the stream, so that the host may read results and an error belongs to its op.
const OpTable& waiting_cuda_table();

}  // namespace prl::ops::testing
