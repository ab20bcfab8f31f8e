#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
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
/// perf/throughput, perf/throughput_per_gpu and, with a known peak (> 0 FLOP/s), perf/mfu.
void put_throughput(monitor::Metrics& metrics, double tokens_per_s, double flops_per_token, double peak_flops);
/// system/ckpt_disk_* of the file system that holds `folder` (or its nearest existing parent).
void put_disk_metrics(monitor::Metrics& metrics, const std::filesystem::path& folder);

/// "Step N | Time: 1.23s | Loss: 0.0000 | Entropy: ... | Throughput: 1234 tokens/s | MFU: 1.2% | Peak Mem.: 1.2 GiB". Fields
/// whose metric is absent are left out. `Step` with a capital S appears in no other line at INFO or above.
std::string rl_step_line(std::int64_t step, const monitor::Metrics& metrics);
/// "Step N | Time: 1.23s | Loss: 0.0000 | Grad. Norm: ... | Peak Mem.: a/b GiB (p%)".
std::string sft_step_line(std::int64_t step, const monitor::Metrics& metrics, double device_gib);
/// Tokens per second over the last ten steps, which evens out steps of different length. The first step of all, which warms up, counts
/// only as long as it is the only one.
class ThroughputWindow {
 public:
  void add(std::int64_t num_tokens, double seconds);
  double tokens_per_s() const noexcept;

 private:
  struct Entry {
    std::int64_t num_tokens;
    double seconds;
  };
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
    double mfu = 0, throughput = 0, step_time = 0, peak_memory = 0;
  };
  std::vector<Row> measured() const;
  double device_gib_;
  std::vector<Row> rows_;
};

/// Memory of the device in GiB: the machine's RAM for CPUs.
double device_memory_gib(const DeviceRuntime& runtime);

}  // namespace prl::trainer
