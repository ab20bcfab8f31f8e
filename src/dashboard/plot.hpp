#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "dashboard/series_store.hpp"

namespace prl::dashboard {

/// What people look at first, in this order, as find_metric() reads it.
inline constexpr const char* kFirstMetrics[] = {"reward",
                                                "val_reward",
                                                "entropy",
                                                "mismatch_kl",
                                                "loss",
                                                "optim/grad_norm",
                                                "decode_len",
                                                "is_truncated",
                                                "solve_all",
                                                "solve_none",
                                                "off_policy_level",
                                                "trainer:perf/throughput",
                                                "sft:perf/throughput",
                                                "trainer:time/step"};

struct PlotOptions {
  std::vector<std::string> metrics;
  double smoothing = 0;
  bool has_log_scale = false;
  std::optional<std::int64_t> from_step, to_step;
  int width = 960, height = 420;
  bool is_png = false;  ///< else SVG
};

/// One chart per metric with a line per run (and role, where roles share a key), as a picture file. Error{kNotFound} naming a metric that
/// no run has, with the nearest ones that there are.
std::string plot_runs(const std::vector<std::filesystem::path>& runs, const PlotOptions& options);

/// The series that `name` means: ROLE:KEY, a key of any role, or short for one: "reward" is reward/all/mean, "loss" loss/mean.
std::vector<SeriesStore::Key> find_metric(const SeriesStore& store, const std::string& name);

}  // namespace prl::dashboard
