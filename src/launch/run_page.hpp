#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "config/shared_config.hpp"
#include "dashboard/page_server.hpp"

namespace prl::launch {

/// What the page of a run may do where dashboard.control is on, in the process that the run's user started.
struct RunPageControl {
  bool has_checkpoints = false;
  std::function<void()> stop;
};

/// Serves the page of the run in `output_dir` until the result is destroyed, and logs its address; null without the section. A port that is
/// taken, or none that is free, never fails the run: the log says where the page is, or why there is none. With
/// dashboard.control the run's roles look for orders from then on (base/run_orders.hpp): call it before they start.
std::unique_ptr<dashboard::PageServer> serve_run_page(const std::optional<config::DashboardConfig>& config,
                                                      const std::filesystem::path& output_dir, const RunPageControl& control);

}  // namespace prl::launch
