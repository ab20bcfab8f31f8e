#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "config/shared_config.hpp"
#include "dashboard/page_server.hpp"

namespace prl::launch {

/// Serves the page of the run in `output_dir` until the result is destroyed, and logs its address; null without the section. A port that is
/// taken, or none that is free, never fails the run: the log says where the page is, or why there is none.
std::unique_ptr<dashboard::PageServer> serve_run_page(const std::optional<config::DashboardConfig>& config,
                                                      const std::filesystem::path& output_dir);

}  // namespace prl::launch
