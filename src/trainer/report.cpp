#include "trainer/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <system_error>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "monitor/format.hpp"

namespace prl::trainer {

namespace {

constexpr std::size_t kWindowSteps = 10;

double get(const monitor::Metrics& metrics, std::string_view name, double otherwise = 0) {
  const auto it = metrics.find(name);
  return it == metrics.end() ? otherwise : it->second;
}

/// Adds " | label: value" if the metric is there.
template <typename Format>
void field(std::string& line, const monitor::Metrics& metrics, std::string_view name, Format format) {
  if (const auto it = metrics.find(name); it != metrics.end()) line += " | " + format(it->second);
}

std::string line_start(std::int64_t step, const monitor::Metrics& metrics, std::optional<std::int64_t> max_steps = std::nullopt) {
  return fmt::format("Step {}{} | Time: {:.2f}s | Loss: {:.4f}", step, max_steps ? fmt::format("/{}", *max_steps) : "",
                     get(metrics, "time/step"), get(metrics, "loss/mean"));
}

void optim_fields(std::string& line, const monitor::Metrics& metrics) {
  field(line, metrics, "optim/grad_norm", [](double v) { return fmt::format("Grad. Norm: {:.4f}", v); });
  field(line, metrics, "optim/lr", [](double v) { return fmt::format("LR: {:.2e}", v); });
  field(line, metrics, "perf/throughput", [](double v) { return fmt::format("Throughput: {:.0f} tokens/s", v); });
  if (metrics.contains("perf/throughput") && !metrics.contains("perf/mfu")) line += " | MFU: n/a";
  field(line, metrics, "perf/mfu", [](double v) { return fmt::format("MFU: {:.1f}%", v); });
}

}  // namespace

void put_step_metrics(monitor::Metrics& metrics, const GradientStepResult& result, const DeviceRuntime& runtime) {
  metrics["loss/mean"] = result.loss;
  for (const char* name : {"max_vio", "routing_confidence"})
    if (!result.pool.values(name).empty()) metrics[std::string(name) + "/mean"] = result.pool.mean(name);
  if (result.grad_norm) metrics["optim/grad_norm"] = *result.grad_norm;
  if (result.zero_grad_ratio) metrics["optim/zero_grad_ratio"] = *result.zero_grad_ratio;
  if (result.head && result.head->num_tokens > 0) {
    metrics["mtp/loss"] = result.head->loss;
    metrics["mtp/grad_norm"] = result.head->grad_norm;
  }
  metrics["perf/peak_memory"] = static_cast<double>(runtime.peak_bytes()) / kGiB;
  metrics["time/forward_backward"] = result.forward_backward_s;
  metrics["time/optimizer"] = result.optimizer_s;
}

std::optional<double> PeakFlops::utilization(double flops_per_s) {
  constexpr double kTooLow = 1.1;  // beyond what two measurements of a quiet machine differ by
  if (flops_per_s_ <= 0) return std::nullopt;
  if (flops_per_s > kTooLow * flops_per_s_ && !has_warned_) {
    log::warning(
        "a step reached {:.1f} GFLOP/s, the peak measured at the start was {:.1f}: the machine was busy then; MFU is a share of the best "
        "step from now on",
        flops_per_s / 1e9, flops_per_s_ / 1e9);
    has_warned_ = true;
  }
  flops_per_s_ = std::max(flops_per_s_, flops_per_s);
  return 100 * flops_per_s / flops_per_s_;
}

void put_throughput(monitor::Metrics& metrics, double tokens_per_s, double flops_per_s, PeakFlops& peak, int num_ranks) {
  metrics["perf/throughput"] = tokens_per_s;
  metrics["perf/throughput_per_gpu"] = tokens_per_s / num_ranks;
  if (const auto percent = peak.utilization(flops_per_s)) metrics["perf/mfu"] = *percent;
}

void put_disk_metrics(monitor::Metrics& metrics, const std::filesystem::path& folder) {
  std::error_code ec;
  std::filesystem::path at = std::filesystem::absolute(folder, ec);
  while (!at.empty() && at != at.root_path() && !std::filesystem::exists(at, ec)) at = at.parent_path();
  const auto space = std::filesystem::space(at, ec);
  if (ec || space.capacity == 0) return;
  metrics["system/ckpt_disk_free_gib"] = static_cast<double>(space.available) / kGiB;
  metrics["system/ckpt_disk_used_gib"] = static_cast<double>(space.capacity - space.free) / kGiB;
  metrics["system/ckpt_disk_total_gib"] = static_cast<double>(space.capacity) / kGiB;
  metrics["system/ckpt_disk_free_ratio"] = static_cast<double>(space.available) / static_cast<double>(space.capacity);
}

void write_memory_snapshot(const std::filesystem::path& folder, std::int64_t step, int rank, const DeviceRuntime& runtime) {
  const std::filesystem::path path = folder / fmt::format("step_{}", step) / fmt::format("rank_{}.json", rank);
  try {
    std::filesystem::create_directories(path.parent_path());
    const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    write_file_atomic(path, fmt::format("{{\"step\": {}, \"rank\": {}, \"device\": \"{}\", \"time\": {:.3f}, \"bytes_in_use\": {}, "
                                        "\"peak_bytes\": {}, \"bytes_available\": {}}}\n",
                                        step, rank, to_string(runtime.device()), now, runtime.bytes_in_use(), runtime.peak_bytes(),
                                        runtime.bytes_available()));
  } catch (const std::exception& error) {
    log::warning("memory_profiler_path: {} is not written: {}", path.string(), error.what());
  }
}

std::string rl_step_line(std::int64_t step, const monitor::Metrics& metrics) {
  std::string line = line_start(step, metrics);
  field(line, metrics, "entropy/all/mean", [](double v) { return fmt::format("Entropy: {:.4f}", v); });
  field(line, metrics, "mismatch_kl/all/mean", [](double v) { return fmt::format("Mismatch KL: {:.4f}", v); });
  field(line, metrics, "ref_kl/mean", [](double v) { return fmt::format("Teacher KL: {:.4f}", v); });
  field(line, metrics, "nll/mean", [](double v) { return fmt::format("NLL: {:.4f}", v); });
  optim_fields(line, metrics);
  field(line, metrics, "perf/peak_memory", [](double v) { return "Peak Mem.: " + monitor::format_gib(v); });
  return line;
}

std::string sft_step_line(std::int64_t step, const monitor::Metrics& metrics, double device_gib, const StepEstimate& estimate) {
  std::string line = line_start(step, metrics, estimate.max_steps());
  optim_fields(line, metrics);
  field(line, metrics, "perf/peak_memory", [&](double v) {
    return device_gib > 0 ? fmt::format("Peak Mem.: {:.1f}/{:.1f} GiB ({:.1f}%)", v, device_gib, 100 * v / device_gib)
                          : "Peak Mem.: " + monitor::format_gib(v);
  });
  if (const auto seconds = estimate.seconds_left(step)) line += " | ETA " + monitor::format_duration(*seconds);
  return line;
}

void ThroughputWindow::add(std::int64_t num_tokens, double seconds, double flops) {
  if (!is_warm_ && !entries_.empty()) {
    entries_.clear();
    is_warm_ = true;
  }
  entries_.push_back({num_tokens, seconds, flops});
  if (entries_.size() > kWindowSteps) entries_.pop_front();
}

void BenchTable::add(std::int64_t step, const monitor::Metrics& m) {
  rows_.push_back({step, get(m, "perf/mfu", std::numeric_limits<double>::quiet_NaN()), get(m, "perf/throughput"), get(m, "time/step"),
                   get(m, "perf/peak_memory", std::numeric_limits<double>::quiet_NaN())});
}

std::vector<BenchTable::Row> BenchTable::measured() const {
  return rows_.size() < 2 ? rows_ : std::vector<Row>(rows_.begin() + 1, rows_.end());
}

namespace {

template <typename Rows, typename Member>
monitor::Stats stats_of(const Rows& rows, Member member) {
  std::vector<double> values;
  for (const auto& row : rows) values.push_back(row.*member);
  return values.empty() ? monitor::Stats{} : monitor::summarize(values);
}

/// Terminal width of ASCII text with the one wide-looking sign this table uses.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string BenchTable::render() const {
  const std::vector<Row> rows = measured();
  std::vector<std::vector<std::string>> cells{{"Step", "MFU", "Throughput", "Step Time", "Peak Memory"}};
  const auto percent = [](double v) { return std::isnan(v) ? std::string("n/a") : fmt::format("{:.2f}%", v); };
  const auto number = [](double v) { return monitor::format_num(v); };
  const auto seconds = [](double v) { return fmt::format("{:.2f}s", v); };
  for (std::size_t i = 0; i < rows.size(); ++i)
    cells.push_back({std::to_string(i + 1), percent(rows[i].mfu), number(rows[i].throughput), seconds(rows[i].step_time),
                     monitor::format_gib(rows[i].peak_memory)});
  cells.push_back({"", "", "", "", ""});
  const auto overall = [](const monitor::Stats& s, auto format) {
    if (std::isnan(s.mean)) return std::string("n/a");
    return fmt::format("{} ± {} [{}, {}]", format(s.mean), format(s.std), format(s.min), format(s.max));
  };
  const double memory = stats_of(rows, &Row::peak_memory).mean;
  cells.push_back({"Overall", overall(stats_of(rows, &Row::mfu), percent), overall(stats_of(rows, &Row::throughput), number),
                   overall(stats_of(rows, &Row::step_time), seconds),
                   device_gib_ > 0 ? fmt::format("{} ({:.1f}%)", monitor::format_gib(memory), 100 * memory / device_gib_)
                                   : monitor::format_gib(memory)});
  std::vector<std::size_t> widths(cells[0].size());
  for (const auto& row : cells)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0}) + 3 * (widths.size() - 1);
  std::string out = std::string((total > 9 ? total - 9 : 0) / 2, ' ') + "Benchmark\n";
  for (std::size_t r = 0; r < cells.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < cells[r].size(); ++c)
      line += (c > 0 ? " | " : "") + cells[r][c] + std::string(widths[c] - width_of(cells[r][c]), ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (r == 0) out += std::string(total, '-') + "\n";
  }
  return out;
}

std::string BenchTable::to_json() const {
  const std::vector<Row> rows = measured();
  const auto number = [](double v) { return std::isnan(v) ? std::string("null") : fmt::format("{}", v); };
  std::string out = "{\"steps\": [";
  for (std::size_t i = 0; i < rows.size(); ++i)
    out += fmt::format("{}{{\"step\": {}, \"mfu\": {}, \"throughput\": {}, \"step_time\": {}, \"peak_memory\": {}}}", i > 0 ? ", " : "",
                       i + 1, number(rows[i].mfu), rows[i].throughput, rows[i].step_time, number(rows[i].peak_memory));
  const auto stats = [&](const monitor::Stats& s) {
    return fmt::format("{{\"mean\": {}, \"std\": {}, \"min\": {}, \"max\": {}}}", number(s.mean), number(s.std), number(s.min),
                       number(s.max));
  };
  const double memory = stats_of(rows, &Row::peak_memory).mean;
  out += fmt::format(
      "], \"overall\": {{\"mfu\": {}, \"throughput\": {}, \"step_time\": {}, \"peak_memory\": {{\"gib\": {}, \"pct\": {}}}}}}}\n",
      stats(stats_of(rows, &Row::mfu)), stats(stats_of(rows, &Row::throughput)), stats(stats_of(rows, &Row::step_time)), number(memory),
      number(std::isnan(memory) || device_gib_ > 0 ? 100 * memory / device_gib_ : 0));
  return out;
}

double device_memory_gib(const DeviceRuntime& runtime) {
  if (runtime.device().kind != DeviceKind::kCpu) return static_cast<double>(runtime.bytes_available() + runtime.bytes_in_use()) / kGiB;
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  double kib = 0;
  meminfo >> key >> kib;
  return key == "MemTotal:" ? kib * 1024 / kGiB : 0;
}

}  // namespace prl::trainer
