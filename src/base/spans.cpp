#include "base/spans.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::spans {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// A file of coarse spans; beyond it the one before is dropped, so twice this is kept.
constexpr std::uint64_t kMaxRunBytes = std::uint64_t{8} << 20;
/// A trace that people can still open.
constexpr std::uint64_t kMaxTraceBytes = std::uint64_t{256} << 20;
constexpr std::size_t kBufferBytes = std::size_t{64} << 10;

struct FileCloser {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

struct State {
  std::mutex mutex;
  Options options;
  File run, trace;
  fs::path run_path;
  std::uint64_t run_bytes = 0, trace_bytes = 0;
  std::int64_t num_dropped = 0;
  std::string buffer;  ///< of the trace
  double unix_minus_steady = 0;
};
State& state() {
  static State instance;
  return instance;
}
std::atomic<int> level{0};  ///< 0 nothing, 1 coarse, 2 all

double steady_seconds(Clock::time_point at) { return std::chrono::duration<double>(at.time_since_epoch()).count(); }

double clock_offset() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - steady_seconds(Clock::now());
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

std::string json_text(std::string_view text) { return json::serialize(json::string(text)); }

File open_file(const fs::path& path, const char* mode) {
  std::error_code ignored;
  fs::create_directories(path.parent_path(), ignored);
  File file(std::fopen(path.c_str(), mode));
  if (!file) log::warning("spans of time are not kept: {} cannot be opened: {}", path.string(), std::strerror(errno));
  return file;
}

void flush_trace(State& s) {
  if (s.trace && !s.buffer.empty()) {
    std::fwrite(s.buffer.data(), 1, s.buffer.size(), s.trace.get());
    std::fflush(s.trace.get());
  }
  s.buffer.clear();
}

void write_run(State& s, const Span& span) {
  const auto seconds = [&](Clock::time_point at) { return steady_seconds(at) + s.unix_minus_steady; };
  std::string line = fmt::format("{{\"lane\":{},\"name\":{},\"begin\":{:.6f},\"end\":{:.6f}", json_text(span.lane), json_text(span.name),
                                 seconds(span.begin), seconds(span.end));
  if (span.step >= 0) line += fmt::format(",\"step\":{}", span.step);
  if (!span.note.empty()) line.append(",").append(span.note);
  line += "}\n";
  if (s.run_bytes + line.size() > kMaxRunBytes) {
    s.run.reset();
    std::error_code ignored;
    fs::path before = s.run_path;
    fs::rename(s.run_path, before.replace_extension(".old.jsonl"), ignored);
    s.run = open_file(s.run_path, "we");
    s.run_bytes = 0;
    if (!s.run) return;
  }
  s.run_bytes += line.size();
  std::fwrite(line.data(), 1, line.size(), s.run.get());
  std::fflush(s.run.get());
}

void write_trace(State& s, const Span& span) {
  if (s.trace_bytes > kMaxTraceBytes) {
    ++s.num_dropped;
    return;
  }
  std::string line = fmt::format("{{\"lane\":{},\"name\":{},\"begin\":{:.9f},\"end\":{:.9f}", json_text(span.lane), json_text(span.name),
                                 steady_seconds(span.begin), steady_seconds(span.end));
  if (span.step >= 0) line += fmt::format(",\"step\":{}", span.step);
  if (span.may_overlap) line += ",\"overlaps\":true";
  if (!span.note.empty()) line += fmt::format(",\"note\":{{{}}}", span.note);
  line += "}\n";
  s.trace_bytes += line.size();
  s.buffer += line;
  if (s.buffer.size() >= kBufferBytes) flush_trace(s);
}

fs::path parts_folder(const fs::path& trace_folder) { return trace_folder / "parts"; }

// How files of a trace begin: a folder that the user names may hold others of the same names.
constexpr std::string_view kPartHead = "{\"process\":";
constexpr std::string_view kTraceHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";

bool begins_with(const fs::path& file, std::string_view head) {
  std::ifstream in(file, std::ios::binary);
  std::string found(head.size(), '\0');
  in.read(found.data(), static_cast<std::streamsize>(found.size()));
  return in.gcount() == static_cast<std::streamsize>(head.size()) && found == head;
}

}  // namespace

void setup(const Options& options) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  flush_trace(s);
  s.run.reset();
  s.trace.reset();
  s.options = options;
  s.unix_minus_steady = clock_offset();
  s.trace_bytes = 0;
  s.num_dropped = 0;
  if (!options.run_folder.empty()) {
    s.run_path = options.run_folder / "spans" / (options.process + ".jsonl");
    std::error_code ec;
    s.run_bytes = fs::file_size(s.run_path, ec);
    if (ec) s.run_bytes = 0;
    s.run = open_file(s.run_path, "ae");
  }
  if (!options.trace_folder.empty()) {
    s.trace = open_file(parts_folder(options.trace_folder) / fmt::format("{}.{}.jsonl", options.process, ::getpid()), "we");
    s.buffer = fmt::format("{}{},\"pid\":{},\"boot_id\":{},\"unix_minus_steady\":{:.9f}}}\n", kPartHead, json_text(options.process),
                           ::getpid(), json_text(boot_id()), s.unix_minus_steady);
  }
  level.store(s.trace ? 2 : s.run ? 1 : 0);
}

void finish() {
  State& s = state();
  fs::path folder;
  {
    std::lock_guard lock(s.mutex);
    level.store(0);
    flush_trace(s);
    if (s.num_dropped > 0) log::warning("the trace is full: {} spans are left out", s.num_dropped);
    s.run.reset();
    if (s.trace) folder = s.options.trace_folder;
    s.trace.reset();
  }
  if (folder.empty()) return;
  try {
    merge_trace(folder);
  } catch (const Error& error) {
    log::warning("the trace is not merged: {}", error.what());
  }
}

bool is_on(Detail detail) noexcept { return level.load(std::memory_order_relaxed) > (detail == Detail::kFine ? 1 : 0); }

void add(Detail detail, const Span& span) {
  if (!is_on(detail)) return;
  State& s = state();
  std::lock_guard lock(s.mutex);
  if (s.run && detail == Detail::kCoarse) write_run(s, span);
  if (s.trace) write_trace(s, span);
}

namespace {

/// One trace is merged by one process at a time.
class MergeLock {
 public:
  explicit MergeLock(const fs::path& path) : fd_(::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    if (fd_ < 0 || ::flock(fd_, LOCK_EX) != 0) fail(ErrorCode::kIo, "{} cannot be locked: {}", path.string(), std::strerror(errno));
  }
  MergeLock(const MergeLock&) = delete;
  MergeLock& operator=(const MergeLock&) = delete;
  ~MergeLock() { ::close(fd_); }

 private:
  int fd_;
};

double number(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<double>() : 0;
}
std::string text(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->get_string()) : std::string();
}

/// Writes events in the form that Chrome's trace viewer defined: {"traceEvents": [...]}, moments in microseconds.
class TraceWriter {
 public:
  explicit TraceWriter(const fs::path& path) : path_(path), file_(std::fopen(path.c_str(), "we")) {
    if (!file_) fail(ErrorCode::kIo, "{} cannot be opened: {}", path.string(), std::strerror(errno));
    put(kTraceHead);
  }
  /// `offset` takes a moment of its steady clock to the trace's.
  void begin_process(const json::object& head, double offset) {
    ++pid_;  // numbers of processes may meet on several machines
    lanes_.clear();
    offset_ = offset;
    event(fmt::format("\"ph\":\"M\",\"name\":\"process_name\",\"tid\":0,\"args\":{{\"name\":{}}}",
                      json_text(fmt::format("{} ({})", text(head, "process"), number(head, "pid")))));
  }
  void add(const json::object& span) {
    const std::string lane = text(span, "lane");
    const auto [place, is_new] = lanes_.try_emplace(lane, static_cast<int>(lanes_.size()) + 1);
    const int tid = place->second;
    if (is_new) event(fmt::format("\"ph\":\"M\",\"name\":\"thread_name\",\"tid\":{},\"args\":{{\"name\":{}}}", tid, json_text(lane)));
    json::object args;
    if (const json::value* note = span.if_contains("note"); note != nullptr && note->is_object()) args = note->get_object();
    if (const json::value* step = span.if_contains("step")) args["step"] = *step;
    // The sum that made offset_ was rounded to parts of a microsecond, all alike: the first span must not begin before zero for it.
    const double begin = std::max(0.0, (number(span, "begin") + offset_) * 1e6);
    const double end = std::max(begin, (number(span, "end") + offset_) * 1e6);
    const std::string common = fmt::format("\"cat\":{},\"name\":{},\"tid\":{}", json_text(lane), json_text(text(span, "name")), tid);
    if (!span.contains("overlaps")) {
      event(fmt::format("\"ph\":\"X\",{},\"ts\":{:.3f},\"dur\":{:.3f},\"args\":{}", common, begin, end - begin, json::serialize(args)));
      return;
    }
    ++num_async_;
    // Of the process: a plain id is one of the whole trace, whose spans viewers show beside the processes.
    event(fmt::format("\"ph\":\"b\",\"id2\":{{\"local\":\"{:#x}\"}},{},\"ts\":{:.3f},\"args\":{}", num_async_, common, begin,
                      json::serialize(args)));
    event(fmt::format("\"ph\":\"e\",\"id2\":{{\"local\":\"{:#x}\"}},{},\"ts\":{:.3f}", num_async_, common, end));
  }
  void finish() {
    put("\n]}\n");
    const bool is_whole = !has_failed_ && std::fflush(file_.get()) == 0;
    file_.reset();
    if (!is_whole) fail(ErrorCode::kIo, "{} cannot be written: is the disk full?", path_.string());
  }

 private:
  void event(const std::string& members) {
    if (!std::exchange(is_first_, false)) put(",\n");
    put(fmt::format("{{\"pid\":{},{}}}", pid_, members));
  }
  void put(std::string_view bytes) { has_failed_ = has_failed_ || std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size(); }

  fs::path path_;
  File file_;
  int pid_ = 0;
  double offset_ = 0;
  std::map<std::string, int> lanes_;
  std::int64_t num_async_ = 0;
  bool is_first_ = true, has_failed_ = false;
};

json::object parse_line(const std::string& line) {
  json::error_code ec;
  json::value value = json::parse(line, ec);
  return !ec && value.is_object() ? std::move(value.get_object()) : json::object{};  // torn by a kill
}

}  // namespace

namespace {

std::vector<fs::path> list_parts(const fs::path& trace_folder) {
  std::vector<fs::path> parts;
  std::error_code ec;
  for (fs::directory_iterator it(parts_folder(trace_folder), ec), end; !ec && it != end; it.increment(ec))
    if (it->path().extension() == ".jsonl" && begins_with(it->path(), kPartHead)) parts.push_back(it->path());
  std::sort(parts.begin(), parts.end());
  return parts;
}

/// Calls on_head for the first line of each part, and on_span for each further one.
template <typename OnHead, typename OnSpan>
void read_parts(const std::vector<fs::path>& parts, OnHead on_head, OnSpan on_span) {
  for (const fs::path& part : parts) {
    std::ifstream file(part);
    std::string line;
    if (!std::getline(file, line)) continue;
    on_head(parse_line(line));
    while (std::getline(file, line))
      if (const json::object span = parse_line(line); !span.empty()) on_span(span);
  }
}

}  // namespace

void clear_trace(const fs::path& trace_folder) {
  const fs::path merged = trace_folder / "trace.json";
  std::error_code ignored;
  if (fs::exists(merged, ignored) && !begins_with(merged, kTraceHead))
    fail(ErrorCode::kAlreadyExists, "{} is no trace that an earlier run left; choose another trace_path", merged.string());
  for (const fs::path& part : list_parts(trace_folder)) fs::remove(part, ignored);
  fs::remove(parts_folder(trace_folder), ignored);  // if nothing else is in it
  fs::remove(merged, ignored);
}

void merge_trace(const fs::path& trace_folder) {
  const MergeLock lock(trace_folder / ".lock");
  const std::vector<fs::path> parts = list_parts(trace_folder);
  // The first span begins at zero: microseconds since 1970 leave a double no room for parts of one.
  double origin = std::numeric_limits<double>::infinity(), offset = 0;
  std::map<std::string, double> offsets;  // one per machine, whose processes share a steady clock
  const auto offset_of = [&](const json::object& head) {
    return offsets.try_emplace(text(head, "boot_id"), number(head, "unix_minus_steady")).first->second;
  };
  read_parts(
      parts, [&](const json::object& head) { offset = offset_of(head); },
      [&](const json::object& span) { origin = std::min(origin, number(span, "begin") + offset); });
  const fs::path made = trace_folder / ".trace.json.tmp";
  TraceWriter writer(made);
  read_parts(
      parts, [&](const json::object& head) { writer.begin_process(head, offset_of(head) - origin); },
      [&](const json::object& span) { writer.add(span); });
  writer.finish();
  fs::rename(made, trace_folder / "trace.json");
}

}  // namespace prl::spans
