#pragma once

#include "device/host_link.hpp"

namespace prl {

/// The link of a runtime that make_cuda_runtime() made.
std::shared_ptr<HostLink> make_cuda_host_link(const std::shared_ptr<DeviceRuntime>& runtime, bool page_locked);

}  // namespace prl
