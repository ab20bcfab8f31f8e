#include "dashboard/run_view.hpp"

#include <fmt/core.h>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <limits>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/regular_file.hpp"
#include "dashboard/inside.hpp"
#include "dashboard/log_view.hpp"
#include "dashboard/span_view.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Of one file, and of all together.
constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{4} << 20, kMaxConfigsBytes = std::uint64_t{16} << 20;
/// One round of refresh(): long enough for throughput, short enough that requests do not wait for it.
constexpr std::uint64_t kRoundBytes = std::uint64_t{16} << 20, kPieceBytes = std::uint64_t{8} << 20;
constexpr std::int64_t kMaxStep = std::numeric_limits<std::int64_t>::max();

/// Commands that keep a run, in the order in which their files name it.
constexpr const char* kCommands[] = {"rl", "sft", "trainer", "orchestrator", "eval", "synthesize"};

std::optional<json::value> read_json(const fs::path& path) {
  json::error_code ec;
  try {
    json::value value = json::parse(read_regular_file(path, kMaxConfigBytes), ec);
    if (!ec) return value;
  } catch (const Error&) {
    return std::nullopt;
  }
  return std::nullopt;
}

bool is_run(const fs::path& folder) {
  std::error_code ec;
  return fs::is_regular_file(folder / "metrics.jsonl", ec) || fs::is_regular_file(folder / "run.json", ec) ||
         fs::is_directory(folder / "rollouts", ec);
}

/// run.json says where in the run the metrics are.
fs::path metrics_file(const fs::path& folder) {
  if (const auto run = read_json(folder / "run.json"); run && run->is_object())
    if (const json::value* name = run->get_object().if_contains("metrics"); name && name->is_string()) {
      const fs::path file(std::string(name->get_string()));
      if (file.is_relative() && std::ranges::find(file, fs::path("..")) == file.end()) return folder / file;
      log::warning("{}: metrics: wanted the name of a file in the run's folder, found {}; metrics.jsonl is read",
                   (folder / "run.json").string(), json::serialize(*name).substr(0, 200));
    }
  return folder / "metrics.jsonl";
}

bool leads_out(const fs::path& folder, const fs::path& path) {
  std::error_code ec;
  return fs::exists(path, ec) && !is_inside(folder, path);
}

/// Names in a run's folder that lead out of it are not followed, which is said once.
void warn_of_links(const fs::path& folder) {
  std::error_code ec;
  for (const char* const name : {"metrics.jsonl", "rollouts", "logs", "configs", "spans", "memory", "evals", "run.json", "token_exports"})
    if (fs::is_symlink(folder / name, ec) && leads_out(folder, folder / name))
      log::warning("{} is a link out of the run's folder, which the page does not follow; name the folder with the files itself",
                   (folder / name).string());
}

void add_runs_below(const fs::path& folder, int depth, std::size_t max_runs, std::vector<fs::path>& found) {
  if (found.size() >= max_runs) return;
  if (is_run(folder)) {
    found.push_back(folder);
    return;
  }
  if (depth == 0) return;
  std::vector<fs::path> below;
  std::error_code ec;
  for (fs::directory_iterator it(folder, fs::directory_options::skip_permission_denied, ec), end; !ec && it != end; it.increment(ec))
    if (it->is_directory(ec)) below.push_back(it->path());
  std::sort(below.begin(), below.end());
  for (const fs::path& one : below) add_runs_below(one, depth - 1, max_runs, found);
}

}  // namespace

std::vector<fs::path> find_runs(const std::vector<fs::path>& paths, std::size_t max_runs) {
  constexpr int kDepth = 2;
  std::vector<fs::path> found;
  for (const fs::path& path : paths) {
    const std::size_t before = found.size();
    std::error_code ec;
    if (fs::is_directory(path, ec)) add_runs_below(path, kDepth, max_runs, found);
    if (found.size() == before && found.size() < max_runs)
      fail(ErrorCode::kNotFound, "{}: wanted the output folder of a run (with metrics.jsonl or run.json) or one above such, found {}",
           path.string(), fs::exists(path, ec) ? "none there" : "nothing of that name");
  }
  return found;
}

RunView::RunView(fs::path folder, std::string name)
    : folder_(std::move(folder)), name_(std::move(name)), series_(metrics_file(folder_)), rollouts_(folder_ / "rollouts") {
  warn_of_links(folder_);
  head_ = read_head();
}

RunView::Head RunView::read_head() {
  Head head;
  for (const char* const command : kCommands) {
    const fs::path path = folder_ / "configs" / (std::string(command) + ".json");
    std::error_code ec;
    const fs::file_time_type time = fs::last_write_time(path, ec);
    if (ec) continue;
    if (path == head_path_ && time == head_time_) return head_of_file_;
    const auto config = is_inside(folder_, path) ? read_json(path) : std::nullopt;
    if (!config || !config->is_object()) continue;
    head_path_ = path;
    head_time_ = time;
    head.command = command;
    const json::value* const steps = config->as_object().if_contains("max_steps");
    if (steps != nullptr && steps->is_int64()) head.max_steps = steps->get_int64();
    head_of_file_ = head;
    break;
  }
  return head;
}

RunView::Head RunView::head() const {
  std::lock_guard lock(mutex_);
  return head_;
}

bool RunView::refresh(Part part) {
  bool has_more = false;
  if (part != Part::kRollouts) {
    const Head head = read_head();
    std::lock_guard lock(mutex_);
    head_ = head;
    has_more = !leads_out(folder_, series_.path()) && series_.read(kRoundBytes);
  }
  // Between the two whoever wants the curves comes in.
  if (part != Part::kMetrics) {
    std::lock_guard lock(mutex_);
    has_more |= rollouts_.read(kPieceBytes);
  }
  return has_more;
}

void RunView::read_metrics() {
  const Head head = read_head();
  std::lock_guard lock(mutex_);
  head_ = head;
  while (!leads_out(folder_, series_.path()) && series_.read(kRoundBytes)) {
  }
}

RunView::Version RunView::version() const {
  std::lock_guard lock(mutex_);
  return {series_.num_rows(), series_.generation(), rollouts_.num_changes()};
}

std::optional<std::vector<SeriesStore::KeptRow>> RunView::rows_after(std::uint64_t after) const {
  std::lock_guard lock(mutex_);
  std::vector<SeriesStore::KeptRow> rows;
  for (const SeriesStore::KeptRow& row : series_.kept_rows())
    if (row.number > after) rows.push_back(row);
  if (rows.size() != series_.num_rows() - std::min(after, series_.num_rows())) return std::nullopt;
  return rows;
}

std::string RunView::summary() const {
  std::lock_guard lock(mutex_);
  std::string out = "{";
  put_key(out, "name");
  put(out, std::string_view(name_));
  out += ",\"path\":";
  put(out, std::string_view(folder_.string()));
  out += ",\"command\":";
  put(out, std::string_view(head_.command));
  fmt::format_to(std::back_inserter(out), ",\"max_steps\":{},\"last_step\":{},\"last_time\":", head_.max_steps, series_.last_step());
  put(out, series_.last_time());
  fmt::format_to(std::back_inserter(out),
                 ",\"rows\":{},\"generation\":{},\"points\":{},\"damaged_rows\":{},\"is_thinned\":{},\"has_too_many_keys\":{}",
                 series_.num_rows(), series_.generation(), series_.num_points(), series_.num_damaged(), series_.is_thinned(),
                 series_.has_too_many_keys());
  fmt::format_to(std::back_inserter(out), ",\"rollouts\":{},\"rollout_files\":{},\"rollout_files_waiting\":{},\"rollouts_dropped\":{}",
                 rollouts_.size(), rollouts_.num_files(), rollouts_.num_files_waiting(), rollouts_.is_truncated());
  out += ",\"roles\":[";
  bool is_first = true;
  for (const auto& [role, times] : series_.times()) {
    if (!std::exchange(is_first, false)) out += ',';
    put(out, std::string_view(role));
  }
  return out + "]}";
}

std::string RunView::series() const {
  std::lock_guard lock(mutex_);
  std::string out = "[";
  for (const auto& [key, series] : series_.all()) {
    if (out.size() > 1) out += ',';
    out += "{\"role\":";
    put(out, std::string_view(key.role));
    out += ",\"key\":";
    put(out, std::string_view(key.name));
    fmt::format_to(std::back_inserter(out), ",\"count\":{},\"step\":{},\"last\":", series.size(), series.steps().back());
    put(out, series.values().back());
    out += '}';
  }
  return out + "]";
}

std::string RunView::metrics(const Query& query) const {
  constexpr std::size_t kMaxSeries = 64;
  constexpr std::int64_t kMaxPoints = 4000, kPoints = 1000;
  const auto wanted = query.all("s", kMaxSeries);
  const std::int64_t from = query.integer("from", 0, kMaxStep).value_or(0), to = query.integer("to", 0, kMaxStep).value_or(kMaxStep);
  const auto points = static_cast<std::size_t>(query.integer("points", 2, kMaxPoints).value_or(kPoints));
  std::lock_guard lock(mutex_);
  std::string out = fmt::format("{{\"generation\":{},\"rows\":{},\"series\":[", series_.generation(), series_.num_rows());
  bool is_first = true;
  for (const std::string& name : wanted) {
    const std::size_t colon = name.find(':');
    if (colon == std::string::npos) net::fail_param("s", "s must be ROLE:KEY" + found_text(name));
    const std::string role = name.substr(0, colon), key = name.substr(colon + 1);
    const Series* const series = series_.find(role, key);
    if (series == nullptr) continue;
    const Curve curve = sample_curve(*series, from, to, points);
    if (!std::exchange(is_first, false)) out += ',';
    out += "{\"role\":";
    put(out, std::string_view(role));
    out += ",\"key\":";
    put(out, std::string_view(key));
    out += ",\"steps\":";
    put_list(out, curve.steps);
    out += ",\"mean\":";
    put_list(out, curve.mean);
    // Where each bucket has one step its extremes say nothing more.
    if (curve.mean != curve.min || curve.mean != curve.max) {
      out += ",\"min\":";
      put_list(out, curve.min);
      out += ",\"max\":";
      put_list(out, curve.max);
    }
    out += '}';
  }
  return out + "]}";
}

namespace {

/// The steps of each role, and in `spans` the stretch of time they cover.
std::string timeline_rows(const SeriesStore& store, const Query& query, SpanQuery& spans) {
  constexpr std::int64_t kMaxSteps = 500, kSteps = 40;
  const std::int64_t to = query.integer("to", 0, kMaxStep).value_or(std::max<std::int64_t>(store.last_step(), 0));
  const std::int64_t steps_wanted = query.integer("steps", 1, kMaxSteps).value_or(kSteps + 1);
  const std::int64_t from = std::max(query.integer("from", 0, kMaxStep).value_or(to - steps_wanted + 1), to - kMaxSteps);
  std::map<std::pair<std::string, std::int64_t>, std::vector<std::pair<std::string_view, double>>> rows;
  for (const auto& [key, series] : store.all()) {
    const bool is_part = key.name.starts_with("time/") || (key.name.starts_with("timing/all/") && key.name.ends_with("/mean")) ||
                         key.name == "scheduler/policy_version" || key.name == "scheduler/async_level";
    if (!is_part) continue;
    const auto steps = series.steps();
    for (auto at = std::lower_bound(steps.begin(), steps.end(), from); at != steps.end() && *at <= to; ++at)
      rows[{key.role, *at}].emplace_back(key.name, series.values()[static_cast<std::size_t>(at - steps.begin())]);
  }
  std::string out = "[";
  for (const auto& [key, parts] : rows) {
    const Series& times = store.times().at(key.first);
    const auto at = std::lower_bound(times.steps().begin(), times.steps().end(), key.second);
    if (at == times.steps().end() || *at != key.second) continue;
    const double end = times.values()[static_cast<std::size_t>(at - times.steps().begin())];
    const auto step_time = std::ranges::find(parts, std::string_view("time/step"), [](const auto& part) { return part.first; });
    spans.to = std::max(spans.to, to >= store.last_step() ? std::numeric_limits<double>::infinity() : end);
    spans.from = std::min(spans.from, end - (step_time == parts.end() ? 0 : step_time->second));
    if (out.size() > 1) out += ',';
    out += "{\"role\":";
    put(out, std::string_view(key.first));
    fmt::format_to(std::back_inserter(out), ",\"step\":{},\"time\":{}", key.second, end);
    out += ",\"parts\":{";
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) out += ',';
      put_key(out, parts[i].first);
      put(out, parts[i].second);
    }
    out += "}}";
  }
  return out + "]";
}

}  // namespace

std::string RunView::timeline(const Query& query) const {
  SpanQuery spans{.from = std::numeric_limits<double>::infinity(), .to = 0};
  std::string rows;
  {
    std::lock_guard lock(mutex_);
    rows = timeline_rows(series_, query, spans);
  }
  if (spans.from > spans.to) spans = {.from = 0, .to = std::numeric_limits<double>::infinity()};  // no step has ended
  return "{\"rows\":" + rows + ",\"lanes\":" + spans_json(folder_ / "spans", spans) + "}";
}

std::string RunView::config() const {
  std::string out = "{";
  std::error_code ec;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder_ / "configs", ec), end; !ec && it != end && files.size() < 64; it.increment(ec))
    if (it->path().extension() == ".json") files.push_back(it->path());
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    const auto value = is_inside(folder_, file) ? read_json(file) : std::nullopt;
    if (!value) continue;
    if (out.size() > kMaxConfigsBytes) break;
    if (out.size() > 1) out += ',';
    put_key(out, file.stem().string());
    out += json::serialize(*value);
  }
  return out + "}";
}

std::string RunView::logs(const Query& query) const {
  constexpr std::int64_t kMaxLines = 1000, kLines = 300;
  const std::vector<fs::path> files = list_logs(folder_ / "logs");
  const std::string wanted = query.text("file").value_or("");
  std::string out = "{\"files\":[";
  bool is_chosen = false;
  const fs::path* chosen = files.empty() ? nullptr : &files.front();
  for (const fs::path& file : files) {
    if (out.back() != '[') out += ',';
    put(out, std::string_view(file.string()));
    if (wanted.empty() && !is_chosen && file.filename() == head_.command + ".log") {
      chosen = &file;  // the newest attempt comes first
      is_chosen = true;
    }
  }
  out += ']';
  if (!wanted.empty()) {
    // A name from outside never becomes a path: it must be one of those that were found.
    const auto found = std::find(files.begin(), files.end(), fs::path(wanted));
    if (found == files.end()) net::fail_param("file", "file must be one of `files`" + found_text(wanted));
    chosen = &*found;
  }
  LogQuery log;
  if (const auto level = query.text("level", 16); level && !level->empty()) {
    const auto number = level_of(*level);
    if (!number) net::fail_param("level", "level must be debug, info, success, warning or error" + found_text(*level));
    log.min_level = *number;
  }
  if (const auto role = query.text("role"); role && !role->empty()) log.role = *role;
  log.contains = query.text("q").value_or("");
  if (const auto before = query.integer("before", 0, kMaxStep)) log.before = static_cast<std::uint64_t>(*before);
  log.max_lines = static_cast<std::size_t>(query.integer("limit", 1, kMaxLines).value_or(kLines));
  const LogPage page = chosen == nullptr ? LogPage{} : read_log(folder_ / "logs" / *chosen, log);
  out += ",\"file\":";
  put(out, std::string_view(chosen == nullptr ? std::string() : chosen->string()));
  fmt::format_to(std::back_inserter(out), ",\"next\":{},\"size\":{},\"lines\":[", page.next, page.num_bytes);
  for (const LogLine& line : page.lines) {
    if (out.back() != '[') out += ',';
    fmt::format_to(std::back_inserter(out), "{{\"offset\":{},\"level\":\"{}\",\"time\":", line.offset, level_name(line.level));
    put(out, std::string_view(line.time));
    out += ",\"role\":";
    put(out, std::string_view(line.role));
    out += ",\"text\":";
    put(out, std::string_view(line.text));
    out += '}';
  }
  return out + "]}";
}

std::string RunView::proofs() const {
  constexpr std::uint64_t kTailBytes = std::uint64_t{1} << 20;
  const fs::path path = folder_ / "logs" / "weight_proofs.jsonl";
  std::error_code ec;
  const std::uint64_t size = fs::is_regular_file(path, ec) && is_inside(folder_, path) ? fs::file_size(path, ec) : 0;
  std::string out = fmt::format("{{\"size\":{},\"proofs\":[", size);
  if (size == 0) return out + "]}";
  const std::uint64_t begin = size > kTailBytes ? size - kTailBytes : 0;
  const std::string bytes = read_range(path, begin, size - begin);
  std::size_t at = begin == 0 ? 0 : std::min(bytes.find('\n'), bytes.size());
  while (at < bytes.size()) {
    const std::size_t end = bytes.find('\n', at);
    if (end == std::string::npos) break;  // torn, or nothing
    json::error_code parse_error;
    const json::value value = json::parse(std::string_view(bytes).substr(at, end - at), parse_error);
    if (!parse_error && value.is_object()) {
      if (out.back() != '[') out += ',';
      out += json::serialize(value);
    }
    at = end + 1;
  }
  return out + "]}";
}

}  // namespace prl::dashboard
