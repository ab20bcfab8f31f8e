#include "device/device.hpp"

#include <fmt/core.h>

namespace prl {

std::string to_string(Device device) {
  if (device.kind == DeviceKind::kCpu) return "cpu";
  return fmt::format("cuda:{}", device.index);
}

std::unique_ptr<RecordedWork> DeviceRuntime::record(const std::function<void()>& /*work*/) { return nullptr; }

}  // namespace prl
