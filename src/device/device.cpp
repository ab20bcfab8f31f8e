#include "device/device.hpp"

#include <fmt/core.h>

#include <array>
#include <chrono>

namespace prl {

std::string to_string(Device device) {
  if (device.kind == DeviceKind::kCpu) return "cpu";
  return fmt::format("cuda:{}", device.index);
}

namespace {

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

std::unique_ptr<Stopwatch> DeviceRuntime::make_stopwatch() { return std::make_unique<ClockStopwatch>(); }

std::unique_ptr<RecordedWork> DeviceRuntime::record(const std::function<void()>& /*work*/) { return nullptr; }

}  // namespace prl
