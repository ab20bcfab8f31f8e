#include "device/device.hpp"

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstring>

namespace prl {

std::string to_string(Device device) {
  if (device.kind == DeviceKind::kCpu) return "cpu";
  return fmt::format("cuda:{}", device.index);
}

namespace {

class ImmediateCopy final : public HostCopy {
 public:
  void begin(const void* source, std::size_t bytes) override {
    bytes_.resize(bytes);
    if (bytes > 0) std::memcpy(bytes_.data(), source, bytes);
  }
  const std::byte* finish() override { return bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

class ClockStopwatch final : public Stopwatch {
 public:
  std::uint64_t mark() override {
    times_[num_marks_ % kNumKept] = std::chrono::steady_clock::now();
    return num_marks_++;
  }
  double seconds(std::uint64_t from, std::uint64_t to) override {
    return std::chrono::duration<double>(times_[to % kNumKept] - times_[from % kNumKept]).count();
  }

 private:
  std::array<std::chrono::steady_clock::time_point, kNumKept> times_;
  std::uint64_t num_marks_ = 0;
};

}  // namespace

std::unique_ptr<HostCopy> DeviceRuntime::make_host_copy() { return std::make_unique<ImmediateCopy>(); }

std::unique_ptr<Stopwatch> DeviceRuntime::make_stopwatch() { return std::make_unique<ClockStopwatch>(); }

std::unique_ptr<RecordedWork> DeviceRuntime::record(const std::function<void()>& /*work*/) { return nullptr; }

}  // namespace prl
