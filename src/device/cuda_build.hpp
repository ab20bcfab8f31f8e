#pragma once

namespace prl {

/// Whether this build can use GPUs at all; does not touch the driver, which reads CUDA_VISIBLE_DEVICES when it is touched first.
bool has_cuda_build() noexcept;

}  // namespace prl
