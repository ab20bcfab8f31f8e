#pragma once

#include <filesystem>
#include <string>

namespace prl::dashboard {

/// A run as one HTML file without scripts and without anything from elsewhere: charts, its last step in numbers, evaluations, rollouts of
/// the last step (the best and the worst, up to `num_rollouts`), warnings of the log, the configuration. Everything is escaped.
std::string make_report(const std::filesystem::path& run, int num_rollouts);

}  // namespace prl::dashboard
