#include "dashboard/span_view.hpp"

#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <functional>
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

constexpr std::uint64_t kSpanTailBytes = std::uint64_t{4} << 20;
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

/// The last `num_bytes` of a file and, where it was begun anew, of the one before it.
std::string tail_of(const fs::path& folder, const std::string& process) {
  std::string bytes;
  for (const fs::path& path : {folder / (process + ".jsonl"), folder / (process + std::string(kOldFile))}) {
    std::error_code ec;
    const std::uint64_t size = fs::is_regular_file(path, ec) && is_inside(folder.parent_path(), path) ? fs::file_size(path, ec) : 0;
    if (ec || size == 0 || bytes.size() >= kSpanTailBytes) continue;
    const std::uint64_t wanted = std::min(size, kSpanTailBytes - bytes.size());
    std::string part = read_range(path, size - wanted, wanted);
    if (wanted < size) part.erase(0, std::min(part.find('\n'), part.size() - 1) + 1);
    bytes.insert(0, part);
  }
  return bytes;
}

void add_spans(const std::string& bytes, const std::string& process, const SpanQuery& query, std::vector<KeptSpan>& found) {
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t stop = bytes.find('\n', at);
    if (stop == std::string::npos) return;  // torn
    json::error_code ec;
    json::value value = json::parse(std::string_view(bytes).substr(at, stop - at), ec);
    at = stop + 1;
    if (ec || !value.is_object()) continue;
    KeptSpan span{.process = process, .lane = {}, .members = std::move(value.get_object())};
    const json::value* lane = span.members.if_contains("lane");
    if (lane == nullptr || !lane->is_string()) continue;
    span.lane = lane->get_string();
    span.begin = time_of(span.members, "begin");
    span.end = time_of(span.members, "end");
    if (span.end >= query.from && span.begin <= query.to && span.end >= span.begin) found.push_back(std::move(span));
  }
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
      add_spans(tail_of(folder, process), process, query, found);
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
