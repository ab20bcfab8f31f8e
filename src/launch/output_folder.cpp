#include "launch/output_folder.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>

#include <fmt/format.h>
#include <boost/json.hpp>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "config/cli.hpp"
#include "io/checkpoint_dir.hpp"
#include "launch/log_folder.hpp"
#include "launch/run_lock.hpp"
#include "monitor/metrics_file.hpp"
#include "orchestrator/progress.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::array kCommands{"rl", "trainer", "orchestrator", "inference", "teacher_inference", "sft", "eval", "evals", "synthesize"};
constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr std::string_view kAbandoned = "abandoned_after_step_";

/// A folder itself, not a link to one.
bool is_own_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() == fs::file_type::directory;
}
bool is_own_file(const fs::path& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() == fs::file_type::regular;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) out.push_back(it->path());
  return out;
}

/// Steps with a folder step_N, ascending.
std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const fs::path& entry : entries_of(folder))
    if (const std::int64_t step = parse_step_dir(entry.filename().string()); step >= 0 && is_own_folder(entry)) steps.push_back(step);
  std::ranges::sort(steps);
  return steps;
}

bool holds_steps(const fs::path& folder) {
  return std::ranges::any_of(entries_of(folder), [](const fs::path& entry) { return parse_step_dir(entry.filename().string()) >= 0; });
}

/// The folder itself or a step in it, if that is a link; empty if none is.
fs::path link_to_steps(const fs::path& folder) {
  if (!holds_steps(folder)) return {};
  if (!is_own_folder(folder)) return folder;
  for (const fs::path& entry : entries_of(folder))
    if (parse_step_dir(entry.filename().string()) >= 0 && !is_own_folder(entry)) return entry;
  return {};
}

void remove_file(const fs::path& path) {
  std::error_code error;
  if (is_own_file(path) && !fs::remove(path, error) && error) fail(ErrorCode::kIo, "cannot remove {}: {}", path.string(), error.message());
}

void remove_folder(const fs::path& path) {
  std::error_code error;
  if (is_own_folder(path)) fs::remove_all(path, error);
  if (error) fail(ErrorCode::kIo, "cannot remove {}: {}", path.string(), error.message());
}

void remove_if_empty(const fs::path& folder) {
  std::error_code ignored;
  if (is_own_folder(folder) && fs::is_empty(folder, ignored)) fs::remove(folder, ignored);
}

void clean_steps(const fs::path& folder) {
  if (!is_own_folder(folder)) return;
  for (const std::int64_t step : steps_in(folder)) remove_folder(io::checkpoint_folder(folder, step));
  remove_if_empty(folder);
}

void clean_abandoned(const fs::path& root) {
  for (const fs::path& entry : entries_of(root))
    if (entry.filename().string().starts_with(kAbandoned)) remove_folder(entry);
}

/// evals/<environment>--<model>/<run id>.
void clean_evals(const fs::path& folder) {
  if (!is_own_folder(folder)) return;
  for (const fs::path& group : entries_of(folder)) {
    if (!is_own_folder(group)) continue;
    for (const fs::path& run : entries_of(group))
      if (is_own_file(run / "results.jsonl") || is_own_file(run / "metadata.json")) remove_folder(run);
    remove_if_empty(group);
  }
  remove_if_empty(folder);
}

void remove_temporaries_in(const fs::path& folder) {
  if (!is_own_folder(folder)) return;
  for (const fs::path& entry : entries_of(folder)) {
    const std::string name = entry.filename().string();
    const std::size_t at = name.rfind(kTemporaryMark);
    if (at == std::string::npos || at == 0 || at + kTemporaryMark.size() == name.size()) continue;
    if (name.find_first_not_of("0123456789-", at + kTemporaryMark.size()) != std::string::npos) continue;
    std::error_code ignored;
    if (is_own_file(entry) || is_own_folder(entry)) fs::remove_all(entry, ignored);
  }
}

/// Whether nothing but parts that roles save lies in the folder of a step.
bool holds_only_parts(const fs::path& step) {
  return std::ranges::all_of(entries_of(step), [](const fs::path& entry) {
    const std::string name = entry.filename().string();
    return name.starts_with("trainer") || name.starts_with("orchestrator");
  });
}

fs::path unused_folder(const fs::path& root, const std::string& name) {
  fs::path path = root / name;
  for (int i = 2; fs::exists(fs::symlink_status(path)); ++i) path = root / fmt::format("{}_{}", name, i);
  return path;
}

/// Moves <from>/step_N to <to>/step_N.
void move_step(const fs::path& from, const fs::path& to, std::int64_t step) {
  std::error_code error;
  fs::create_directories(to, error);
  if (!error) fs::rename(io::checkpoint_folder(from, step), io::checkpoint_folder(to, step), error);
  if (error) fail(ErrorCode::kIo, "cannot move {} to {}: {}", io::checkpoint_folder(from, step).string(), to.string(), error.message());
}

std::vector<std::int64_t> after(std::vector<std::int64_t> steps, std::int64_t step) {
  std::erase_if(steps, [step](std::int64_t s) { return s <= step; });
  return steps;
}

}  // namespace

std::string list_of_steps(std::span<const std::int64_t> steps) {
  constexpr std::size_t kMost = 12;
  std::string text;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (steps.size() > kMost && i == kMost / 2) {
      text += ", ...";
      i = steps.size() - kMost / 2;
    }
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == steps.size() ? " and " : ", ", steps[i]);
  }
  return text;
}

OutputFolder::OutputFolder(fs::path root, fs::path saved, fs::path metrics_file)
    : root_(std::move(root)), saved_(saved.empty() ? root_ : std::move(saved)), metrics_file_(std::move(metrics_file)) {
  read_marker();
}

void OutputFolder::read_marker() {
  const fs::path path = root_ / kMarkerName;
  if (!is_own_file(path)) return;
  json::error_code error;
  const json::value parsed = json::parse(read_file(path, 1 << 20), error);
  const auto member = [&](const char* key) { return parsed.is_object() ? parsed.get_object().if_contains(key) : nullptr; };
  const auto text = [&](const char* key) {
    const json::value* value = member(key);
    return value != nullptr && value->is_string() ? std::string(value->get_string()) : std::string();
  };
  // A file of that name that another program wrote is the user's.
  if (error || text("format") != "prl-run") return;
  is_marked_ = true;
  id_ = text("id");
  marked_saved_ = text("checkpoints_in");
  marked_metrics_ = text("metrics");
  if (const json::value* bench = member("is_bench")) is_bench_ = bench->is_bool() && bench->get_bool();
  if (const json::value* kinds = member("kinds"); kinds != nullptr && kinds->is_array())
    for (const json::value& kind : kinds->get_array())
      if (kind.is_string()) kinds_.emplace_back(kind.get_string());
}

std::vector<std::string> OutputFolder::records() const {
  std::vector<std::string> found;
  for (const fs::path& folder : {checkpoints(), weights()})
    if (holds_steps(folder)) found.push_back(folder.filename().string());
  for (const char* name : {"rollouts", "broadcasts"})
    if (holds_steps(root_ / name)) found.emplace_back(name);
  for (const fs::path& group : entries_of(root_ / "evals"))
    if (!entries_of(group).empty()) {
      found.emplace_back("evals");
      break;
    }
  std::error_code ignored;
  if (fs::is_regular_file(metrics(), ignored) && fs::file_size(metrics(), ignored) > 0) found.push_back(metrics_file_.string());
  return found;
}

bool OutputFolder::may_be_of(const std::string& kind) const {
  return !is_marked_ || kinds_.empty() || std::ranges::find(kinds_, kind) != kinds_.end();
}

std::string OutputFolder::owner() const {
  if (!is_marked_ || kinds_.empty()) return "another run";
  if (is_bench_) return "a benchmark";
  return fmt::format("another run (of `prl {}`)", fmt::join(kinds_, "`, `prl "));
}

void OutputFolder::claim(const std::string& kind, bool is_bench) {
  const bool is_training = kind == "rl" || kind == "sft";
  // Evaluations may start beside a training run that has not recorded anything yet.
  if (!is_marked_ || (is_training && records().empty())) {
    kinds_.clear();
    id_ = fmt::format("{:016x}", hash_bytes(fmt::format("{} {} {}", fs::absolute(root_).string(), kind,
                                                        std::chrono::system_clock::now().time_since_epoch().count())));
    is_bench_ = is_bench;
  }
  if (std::ranges::find(kinds_, kind) == kinds_.end()) kinds_.push_back(kind);
  is_marked_ = true;
  if (is_training || marked_metrics_.empty()) {
    marked_metrics_ = metrics_file_.string();
    marked_saved_ = saved_ == root_ ? fs::path() : fs::absolute(saved_);
  }
  json::array kinds(kinds_.begin(), kinds_.end());
  json::object marker{{"format", "prl-run"}, {"version", 1}, {"id", id_}, {"kinds", std::move(kinds)}, {"metrics", marked_metrics_}};
  if (!marked_saved_.empty()) marker["checkpoints_in"] = marked_saved_.string();
  if (is_bench_) marker["is_bench"] = true;
  write_file_atomic(root_ / kMarkerName, json::serialize(marker) + "\n");
}

void OutputFolder::clean() {
  const std::vector<std::string> found = records();
  if (!is_marked_) {
    if (found.empty()) return;
    fail(ErrorCode::kInvalidArgument,
         "clean_output_dir: {} holds {}, but no {} of prl, so nothing says that prl wrote them: remove them by hand or choose another "
         "--output-dir",
         root_.string(), fmt::join(found, ", "), kMarkerName);
  }
  std::vector<fs::path> roots{root_ / "rollouts", root_ / "broadcasts", root_ / "token_exports", root_ / orchestrator::kRecoveryFolder};
  const bool is_saved_ours = saved_ == root_ || fs::absolute(saved_) == marked_saved_;
  for (const fs::path& folder : {checkpoints(), weights()}) {
    if (is_saved_ours) roots.push_back(folder);
    if (!is_saved_ours && holds_steps(folder))
      fail(ErrorCode::kInvalidArgument, "clean_output_dir: {} is not of the run in {}: remove it by hand or choose another ckpt.output_dir",
           folder.string(), root_.string());
  }
  // What cannot be cleaned is refused before anything is removed.
  for (const fs::path& folder : roots)
    if (const std::string link = link_to_steps(folder).string(); !link.empty())
      fail(ErrorCode::kInvalidArgument, "clean_output_dir: {} is a link, which prl did not make and does not follow: remove it by hand",
           link);
  remove_temporaries();
  for (const char* name : {"END", "SENT"}) remove_file(root_ / "rollouts" / name);
  for (const fs::path& folder : roots) clean_steps(folder);
  clean_abandoned(root_);
  if (is_saved_ours) clean_abandoned(saved_);
  clean_evals(root_ / "evals");
  remove_attempts(root_);
  for (const char* command : kCommands) {
    remove_file(root_ / "logs" / fmt::format("{}.log", command));
    // The mark goes last: a clean that was cut short can be repeated.
    if (config::is_resolved_pair(root_ / "configs", command))
      for (const char* format : {"json", "toml"}) remove_file(root_ / "configs" / fmt::format("{}.{}", command, format));
  }
  for (const auto& [folder, extension] : {std::pair{"spans", ".jsonl"}, std::pair{"memory", ".json"}})
    for (const fs::path& entry : entries_of(root_ / folder))
      if (entry.extension() == extension) remove_file(entry);
  remove_file(root_ / "control.key");
  for (const char* name : {"logs", "configs", "spans", "memory"}) remove_if_empty(root_ / name);
  for (const std::string& name : {metrics_file_.string(), marked_metrics_})
    if (!name.empty() && fs::path(name).is_relative() && name.find("..") == std::string::npos) remove_file(root_ / name);
  remove_file(root_ / kMarkerName);  // last: a clean that was cut short can be repeated
  is_marked_ = is_bench_ = false;
  kinds_.clear();
  marked_saved_.clear();
  marked_metrics_.clear();
}

bool OutputFolder::holds_unit(const std::string& unit) const {
  std::error_code ignored;
  return std::ranges::any_of(entries_of(checkpoints()), [&](const fs::path& entry) {
    return parse_step_dir(entry.filename().string()) >= 0 && fs::exists(entry / unit, ignored);
  });
}

std::vector<std::int64_t> OutputFolder::snapshots() const { return steps_in(weights()); }

OutputFolder::Dropped OutputFolder::drop_after(std::int64_t step, std::span<const std::string> units, std::span<const std::string> roles,
                                               bool keeps_broadcast) const {
  return drop(step, units, roles, false, keeps_broadcast);
}

OutputFolder::Dropped OutputFolder::drop_own_after(std::int64_t step, std::span<const std::string> units,
                                                   std::span<const std::string> roles) const {
  return drop(step, units, roles, true, false);
}

OutputFolder::Dropped OutputFolder::drop(std::int64_t step, std::span<const std::string> units, std::span<const std::string> roles,
                                         bool is_alone, bool keeps_broadcast) const {
  Dropped dropped;
  const std::vector<std::int64_t> whole = io::list_checkpoints(checkpoints(), units);
  dropped.checkpoints = after(whole, step);
  dropped.weights = after(steps_in(weights()), step);
  if (!is_alone) dropped.rollouts = after(steps_in(root_ / "rollouts"), step);
  for (const std::int64_t half : is_alone ? std::vector<std::int64_t>() : steps_in(checkpoints()))
    if (!std::ranges::binary_search(whole, half) && holds_only_parts(io::checkpoint_folder(checkpoints(), half)))
      dropped.half_checkpoints.push_back(half);

  const bool never_removes = std::getenv("NEVER_CLEAN") != nullptr;
  const bool is_worth_keeping = !dropped.checkpoints.empty() || !dropped.weights.empty() || never_removes;
  const std::string name = fmt::format("{}{}", kAbandoned, step);
  fs::path kept, kept_saved;
  if (is_worth_keeping) {
    kept = unused_folder(root_, name);
    kept_saved = saved_ == root_ ? kept : unused_folder(saved_, name);
    dropped.moved_to = dropped.checkpoints.empty() && dropped.weights.empty() ? kept : kept_saved;
  }
  // Before anything moves: what a killed process left half-written goes with nothing.
  if (!is_alone) remove_temporaries();
  const auto drop_steps = [&](const fs::path& from, const std::vector<std::int64_t>& steps, const fs::path& to, bool is_moved) {
    for (const std::int64_t one : steps) {
      if (is_moved)
        move_step(from, to, one);
      else
        io::remove_published_folder(io::checkpoint_folder(from, one));
    }
  };
  drop_steps(checkpoints(), dropped.half_checkpoints, kept_saved / "checkpoints", never_removes);
  // Newest first: cut short, what is left is still the beginning of one branch.
  for (auto it = dropped.checkpoints.rbegin(); it != dropped.checkpoints.rend(); ++it)
    move_step(checkpoints(), kept_saved / "checkpoints", *it);
  drop_steps(weights(), dropped.weights, kept_saved / "weights", true);
  drop_steps(root_ / "rollouts", dropped.rollouts, kept / "rollouts", is_worth_keeping);
  drop_steps(root_ / "token_exports", after(steps_in(root_ / "token_exports"), step), kept / "token_exports", is_worth_keeping);
  if (!is_alone) {
    for (const char* marker : {"END", "SENT"}) remove_file(root_ / "rollouts" / marker);
    drop_steps(root_ / "broadcasts", after(steps_in(root_ / "broadcasts"), keeps_broadcast ? step : step - 1), kept / "broadcasts",
               never_removes);
  }
  const monitor::TrimmedRows rows = monitor::trim_rows(metrics(), roles, step, kept.empty() ? fs::path() : kept / metrics_file_);
  dropped.num_rows = rows.num_late + rows.num_doubled;
  dropped.num_damaged_rows = rows.num_damaged;
  return dropped;
}

std::string OutputFolder::Dropped::describe() const {
  std::vector<std::string> parts;
  if (!checkpoints.empty()) parts.push_back("checkpoints " + list_of_steps(checkpoints));
  if (!half_checkpoints.empty()) parts.push_back("incomplete checkpoints " + list_of_steps(half_checkpoints));
  if (!weights.empty()) parts.push_back("weights " + list_of_steps(weights));
  if (!rollouts.empty()) parts.push_back("rollouts " + list_of_steps(rollouts));
  if (num_rows > 0) parts.push_back(fmt::format("{} rows of metrics", num_rows));
  if (num_damaged_rows > 0) parts.push_back(fmt::format("{} damaged rows of metrics", num_damaged_rows));
  return fmt::format("{}", fmt::join(parts, "; "));
}

void OutputFolder::remove_temporaries() const {
  for (const fs::path& folder : {root_, root_ / "configs", root_ / "rollouts", checkpoints(), weights(), root_ / "broadcasts"}) {
    // Beside our own folders a user's files may lie; only names that we write are looked at there.
    if (folder != root_) {
      remove_temporaries_in(folder);
      continue;
    }
    for (const fs::path& entry : entries_of(folder)) {
      const std::string file = entry.filename().string();
      if ((file.starts_with(std::string(kMarkerName) + ".tmp-") || file.starts_with(metrics_file_.string() + ".tmp-")) &&
          is_own_file(entry))
        remove_file(entry);
    }
  }
  for (const fs::path& folder : {checkpoints(), root_ / "broadcasts", root_ / "rollouts"})
    for (const std::int64_t step : steps_in(folder)) remove_temporaries_in(io::checkpoint_folder(folder, step));
}

}  // namespace prl::launch
