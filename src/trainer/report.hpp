#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "monitor/metric_set.hpp"
#include "trainer/gradient_step.hpp"

namespace prl::trainer {

/// Steps of `--bench`: one to warm up, three that are measured.
inline constexpr std::int64_t kBenchSteps = 4;

/// loss, optim, peak memory and times of a gradient step, under the metric names of trainer/metrics.hpp.
void put_step_metrics(monitor::Metrics& metrics, const GradientStepResult& result, const DeviceRuntime& runtime);
/// Peak FLOP/s of the device, the denominator of perf/mfu. A measurement on a busy machine is too low;
/// a step that exceeds it raises the peak for itself and all later steps.
class PeakFlops {
 public:
  /// `measured` <= 0: not known.
  explicit PeakFlops(double measured) : flops_per_s_(measured) {}
  /// Percent of the peak, at most 100; nullopt where the peak is not known. Warns once when a measurement proves far too low.
  std::optional<double> utilization(double flops_per_s);

 private:
  double flops_per_s_;
  bool has_warned_ = false;
};
/// perf/throughput, perf/throughput_per_gpu and, with a known peak, perf/mfu.
/// The rates are those of all `num_ranks` together.
void put_throughput(monitor::Metrics& metrics, double tokens_per_s, double flops_per_s, PeakFlops& peak, int num_ranks);
/// system/ckpt_disk_* of the file system that holds `folder` (or its nearest existing parent).
void put_disk_metrics(monitor::Metrics& metrics, const std::filesystem::path& folder);

/// <folder>/step_N/rank_R.json: {"step", "rank", "device", "time", "bytes_in_use", "peak_bytes", "bytes_available"} of the device that the
/// rank trains on. A folder that cannot be written is a warning.
void write_memory_snapshot(const std::filesystem::path& folder, std::int64_t step, int rank, const DeviceRuntime& runtime);

/// "Step N | Time: 1.23s | Loss: 0.0000 | Entropy: ... | Throughput: 1234 tokens/s | MFU: 1.2% | Peak Mem.: 1.2 GiB". Fields
/// whose metric is absent are left out; MFU is n/a where there is a throughput and no known peak. `Step` with a capital S appears in no
/// other line at INFO or above.
std::string rl_step_line(std::int64_t step, const monitor::Metrics& metrics);
/// Estimated end of a run, from a moving average over about ten steps, so that a single validation does not distort it.
class StepEstimate {
 public:
  explicit StepEstimate(std::optional<std::int64_t> max_steps) : max_steps_(max_steps) {}
  void add(double step_seconds) noexcept { seconds_ = seconds_ == 0 ? step_seconds : seconds_ + 0.1 * (step_seconds - seconds_); }
  std::optional<std::int64_t> max_steps() const noexcept { return max_steps_; }
  /// After `step`; nullopt of a run without an end.
  std::optional<double> seconds_left(std::int64_t step) const noexcept {
    if (!max_steps_) return std::nullopt;
    return seconds_ * static_cast<double>(*max_steps_ - step);
  }

 private:
  std::optional<std::int64_t> max_steps_;
  double seconds_ = 0;
};
/// "Step 3/120 | Time: 1.23s | Loss: 0.0000 | Grad. Norm: ... | Peak Mem.: a/b GiB (p%) | ETA 1m20s"; "Step 3" and no ETA without an end.
std::string sft_step_line(std::int64_t step, const monitor::Metrics& metrics, double device_gib, const StepEstimate& estimate);
/// Rates over the last ten steps, which evens out steps of different length. The first step of all, which warms up, counts
/// only as long as it is the only one.
class ThroughputWindow {
 public:
  void add(std::int64_t num_tokens, double seconds, double flops = 0);
  double tokens_per_s() const noexcept {
    return rate_of([](const Entry& e) { return static_cast<double>(e.num_tokens); });
  }
  double flops_per_s() const noexcept {
    return rate_of([](const Entry& e) { return e.flops; });
  }

 private:
  struct Entry {
    std::int64_t num_tokens;
    double seconds;
    double flops;
  };
  template <typename Value>
  double rate_of(Value value_of) const noexcept {
    double sum = 0, seconds = 0;
    for (const Entry& e : entries_) sum += value_of(e), seconds += e.seconds;
    return seconds > 0 ? sum / seconds : 0;
  }
  std::deque<Entry> entries_;
  bool is_warm_ = false;
};

/// The table that `--bench` prints: the first step warms up and is left out.
class BenchTable {
 public:
  explicit BenchTable(double device_gib) : device_gib_(device_gib) {}
  void add(std::int64_t step, const monitor::Metrics& metrics);
  /// Columns Step, MFU, Throughput, Step Time, Peak Memory; an Overall row "mean ± std [min, max]" at the end.
  std::string render() const;
  /// {"steps": [...], "overall": {mfu, throughput, step_time: {mean, std, min, max}, peak_memory: {gib, pct}}}.
  std::string to_json() const;

 private:
  struct Row {
    std::int64_t step = 0;
    double mfu = 0;  ///< NaN where the peak is not known: "n/a", null in JSON
    double throughput = 0, step_time = 0;
    double peak_memory = 0;  ///< NaN where nobody measures it: null in JSON
  };
  std::vector<Row> measured() const;
  double device_gib_;
  std::vector<Row> rows_;
};

/// Memory of the device in GiB: the machine's RAM for CPUs.
double device_memory_gib(const DeviceRuntime& runtime);

}  // namespace prl::trainer
