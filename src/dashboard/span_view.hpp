#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace prl::dashboard {

struct SpanQuery {
  double from = 0, to = 0;       ///< seconds since 1970: spans that touch this stretch
  std::size_t max_spans = 8000;  ///< beyond it the shortest are left out
};

/// What the processes of a run did, from the files in `folder` (base/spans.hpp): a list of {process, lane, spans: [{name, begin, end,
/// ...}]} in the order of names. Looks at the last 4 MB of each process, of 64 processes at most, and no further back than it must. Damaged
/// lines are left out.
std::string spans_json(const std::filesystem::path& folder, const SpanQuery& query);

}  // namespace prl::dashboard
