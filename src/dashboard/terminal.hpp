#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "dashboard/run_view.hpp"

namespace prl::dashboard {

struct TerminalOptions {
  std::size_t columns = 100;
  std::size_t rows = 40;
  bool has_color = false;
  bool has_unicode = true;                ///< sparklines of block characters; otherwise of ASCII ones
  std::vector<std::string> metrics = {};  ///< shown first, as find_metric() reads them
  double now = 0;                         ///< Unix time, for "updated N s ago"; 0: not shown
};

/// One picture of a run for a terminal: progress, the important metrics with their newest value, range and curve, warnings. Lines end in
/// '\n' and are at most `columns` wide (colour codes not counted); at most `rows` lines. Text of files cannot hold control characters.
std::string draw_run(const RunView& run, const TerminalOptions& options);

/// `values` as at most `width` characters, low to high; means of neighbours where there are more values. '!' marks what is not finite.
std::string sparkline(std::span<const double> values, std::size_t width, bool has_unicode);

}  // namespace prl::dashboard
