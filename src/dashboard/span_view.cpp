#include "dashboard/span_view.hpp"

#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "dashboard/inside.hpp"
#include "dashboard/line_reader.hpp"
#include "dashboard/query.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::uint64_t kFirstSpanBytes = std::uint64_t{64} << 10, kSpanTailBytes = std::uint64_t{4} << 20;
/// A span may be written so long after it has ended, behind others that ended later.
constexpr double kLateSeconds = 5;
constexpr std::size_t kMaxProcesses = 64;
constexpr std::string_view kOldFile = ".old.jsonl";

struct KeptSpan {
  std::string process, lane;
  double begin = 0, end = 0;
  json::object members;
};

double time_of(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<double>() : 0;
}

/// Adds those of whole lines that are wanted. When the newest of all ended; infinity where there is none.
double add_spans(std::string_view bytes, const std::string& process, const SpanQuery& query, std::vector<KeptSpan>& found) {
  double newest = -std::numeric_limits<double>::infinity();
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t stop = bytes.find('\n', at);
    if (stop == std::string_view::npos) break;  // torn
    json::error_code ec;
    json::value value = json::parse(bytes.substr(at, stop - at), ec);
    at = stop + 1;
    if (ec || !value.is_object()) continue;
    KeptSpan span{.process = process, .lane = {}, .members = std::move(value.get_object())};
    const json::value* lane = span.members.if_contains("lane");
    if (lane == nullptr || !lane->is_string()) continue;
    span.lane = lane->get_string();
    span.begin = time_of(span.members, "begin");
    span.end = time_of(span.members, "end");
    newest = std::max(newest, span.end);
    if (span.end >= query.from && span.begin <= query.to && span.end >= span.begin) found.push_back(std::move(span));
  }
  return std::isinf(newest) ? -newest : newest;
}

/// Reads a file from its end, in blocks of which each is twice as long as the one after it, until a block has ended before what is wanted:
/// spans are written when they end. True if so; `budget` bytes at most.
bool add_newest(const fs::path& path, const std::string& process, const SpanQuery& query, std::uint64_t& budget,
                std::vector<KeptSpan>& found) {
  std::error_code ec;
  std::uint64_t end = fs::is_regular_file(path, ec) ? fs::file_size(path, ec) : 0;
  if (ec) return false;
  for (std::uint64_t block = kFirstSpanBytes; end > 0 && budget > 0; block *= 2) {
    const std::uint64_t wanted = std::min({block, end, budget});
    const std::string bytes = read_range(path, end - wanted, wanted);
    if (bytes.size() < wanted) return false;  // it was begun anew meanwhile
    // The first line of a block is whole only at the file's start.
    const std::size_t first_end = wanted == end ? 0 : bytes.find('\n') + 1;
    const bool has_whole_line = wanted == end || (first_end > 0 && first_end < wanted);
    if (!has_whole_line) {
      if (wanted < block) return false;  // nor would a longer block have one
      continue;
    }
    const double newest = add_spans(std::string_view(bytes).substr(first_end), process, query, found);
    budget -= wanted - first_end;
    end -= wanted - first_end;
    if (newest + kLateSeconds < query.from) return true;
  }
  return false;
}

void keep_longest(std::vector<KeptSpan>& spans, std::size_t count) {
  if (spans.size() <= count) return;
  std::ranges::nth_element(spans, spans.begin() + static_cast<std::ptrdiff_t>(count), std::greater{},
                           [](const KeptSpan& span) { return span.end - span.begin; });
  spans.resize(count);
}

}  // namespace

std::string spans_json(const fs::path& folder, const SpanQuery& query) {
  std::vector<std::string> processes;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end && processes.size() < kMaxProcesses; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (it->path().extension() == ".jsonl" && !name.ends_with(kOldFile)) processes.push_back(it->path().stem().string());
  }
  std::vector<KeptSpan> found;
  for (const std::string& process : processes) {
    try {
      std::uint64_t budget = kSpanTailBytes;
      for (const fs::path& path : {folder / (process + ".jsonl"), folder / (process + std::string(kOldFile))})
        if (is_inside(folder.parent_path(), path) && add_newest(path, process, query, budget, found)) break;
    } catch (const Error&) {
      continue;  // it was begun anew between the two looks
    }
    keep_longest(found, query.max_spans);  // after each, so that no more than one process's are held besides
  }
  std::ranges::sort(found, {}, &KeptSpan::begin);
  std::map<std::pair<std::string, std::string>, std::string> lanes;
  for (KeptSpan& span : found) {
    std::string& list = lanes[{span.lane, span.process}];
    span.members.erase("lane");
    if (!list.empty()) list += ',';
    list += json::serialize(span.members);
  }
  std::string out = "[";
  for (const auto& [key, list] : lanes) {
    if (out.size() > 1) out += ',';
    out += "{\"process\":";
    put(out, std::string_view(key.second));
    out += ",\"lane\":";
    put(out, std::string_view(key.first));
    out += ",\"spans\":[" + list + "]}";
  }
  return out + "]";
}

}  // namespace prl::dashboard
