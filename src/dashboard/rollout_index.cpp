#include "dashboard/rollout_index.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "dashboard/inside.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace {

/// Files of so many newest steps are looked at in each round, all others in every kFullRound-th one.
constexpr std::size_t kWatchedFiles = 16;
constexpr std::uint64_t kFullRound = 10;
constexpr std::uint64_t kLeastBytes = std::uint64_t{64} << 10;
/// Up to here a line that is no JSON is looked at a second time, repaired.
constexpr std::uint64_t kMaxRepairBytes = std::uint64_t{8} << 20;

/// Rollout files of a step's folder: ours, and the layout of newer versions of prime-rl.
struct Place {
  const char* path;
  RolloutKind kind;
};
constexpr Place kPlaces[] = {
    {"train_rollouts.jsonl", RolloutKind::kTrain},
    {"eval_rollouts.jsonl", RolloutKind::kEval},
    {"train/effective/traces.jsonl", RolloutKind::kTrain},
    {"eval/effective/traces.jsonl", RolloutKind::kEval},
};

template <typename Int>
Int to_int(double value) {
  if (!(value > 0)) return 0;
  return value >= static_cast<double>(std::numeric_limits<Int>::max()) ? std::numeric_limits<Int>::max() : static_cast<Int>(value);
}
std::int64_t to_id(double value) { return std::abs(value) < 9e15 ? static_cast<std::int64_t>(value) : -1; }

}  // namespace

std::string_view kind_name(RolloutKind kind) noexcept { return kind == RolloutKind::kTrain ? "train" : "eval"; }

struct RolloutIndex::File {
  File(const fs::path& path, std::int64_t step_of, RolloutKind kind_of) : reader(path), step(step_of), kind(kind_of) {}
  LineReader reader;
  std::int64_t step;
  RolloutKind kind;
  std::uint32_t id = 0;
  std::vector<RolloutEntry> entries;
  std::uint32_t num_rows = 0;
  bool is_behind = true;
};

RolloutIndex::RolloutIndex(fs::path folder, Limits limits)
    : folder_(std::move(folder)),
      limits_(limits),
      scanner_([this](std::string_view section, std::string_view key, const Scalar& value) { take(section, key, value); }) {}
RolloutIndex::~RolloutIndex() = default;

fs::path RolloutIndex::path_of(const RolloutEntry& entry) const { return files_[entry.file]->reader.path(); }

void RolloutIndex::add_file(const fs::path& path, std::int64_t step, RolloutKind kind) {
  std::error_code ec;
  if (files_.size() >= limits_.max_files || file_ids_.contains(path) || !fs::is_regular_file(path, ec)) return;
  if (!is_inside(folder_.parent_path(), path)) return;
  auto file = std::make_unique<File>(path, step, kind);
  file->id = static_cast<std::uint32_t>(files_.size());
  file_ids_[path] = files_.size();
  files_.push_back(std::move(file));
}

void RolloutIndex::look_for_files() {
  std::error_code ec;
  // Of a run of thousands of steps the folders of old ones, which hardly get another file, are not asked for it in each round.
  const bool is_full_round = num_rounds_ % kFullRound == 0;
  const std::int64_t watched = known_steps_.empty() ? 0 : *known_steps_.rbegin() - static_cast<std::int64_t>(kWatchedFiles);
  // A folder that got no other since it was listed is not listed again; one that changed just now may change again within its clock's tick.
  constexpr auto kTick = std::chrono::seconds(2);
  const fs::file_time_type folder_time = fs::last_write_time(folder_, ec);
  const bool is_listed = !ec && folder_time == folder_time_ && fs::file_time_type::clock::now() - folder_time > kTick;
  folder_time_ = folder_time;
  if (!is_listed || is_full_round)
    for (fs::directory_iterator it(folder_, ec), end; !ec && it != end; it.increment(ec)) {
      const std::int64_t step = parse_step_dir(it->path().filename().string());
      if (step < first_step_) continue;  // -1: no folder of a step
      if (!known_steps_.insert(step).second && step < watched && !is_full_round) continue;
      for (const Place& place : kPlaces) add_file(it->path() / place.path, step, place.kind);
    }
  else
    for (auto step = known_steps_.lower_bound(watched); step != known_steps_.end(); ++step)
      for (const Place& place : kPlaces) add_file(folder_ / fmt::format("step_{}", *step) / place.path, *step, place.kind);
}

std::uint16_t RolloutIndex::name_id(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 200;
  name = name.substr(0, kMaxNameBytes);
  const auto found = name_ids_.find(name);
  if (found != name_ids_.end()) return found->second;
  if (names_.size() >= limits_.max_names) return kOtherName;
  const auto id = static_cast<std::uint16_t>(names_.size());
  names_.emplace_back(name);
  name_ids_.emplace(name, id);
  return id;
}

void RolloutIndex::take(std::string_view section, std::string_view key, const Scalar& value) {
  const bool is_number = value.kind == Scalar::Kind::kNumber, is_text = value.kind == Scalar::Kind::kText;
  RolloutEntry& e = current_;
  if (section.empty()) {
    if (key == "reward" && is_number) {
      e.reward = value.number;
      e.has_reward = true;
    } else if (key == "advantage" && is_number) {
      e.advantage = value.number;
      e.has_advantage = true;
    } else if (key == "group_id" && is_number) {
      e.group = to_id(value.number);
    } else if (key == "example_id" && is_number) {
      e.example = to_id(value.number);
    } else if ((key == "task" || key == "env_name") && is_text) {
      e.env = name_id(value.text);
    } else if (key == "stop_condition" && is_text) {
      e.stop = name_id(value.text);
    } else if (key == "error" && is_text) {
      e.error = name_id(value.text.empty() ? std::string_view() : value.text);
    } else if (key == "is_truncated") {
      e.is_truncated = value.number != 0;
    } else if (key == "num_turns" && is_number) {
      e.turns = to_int<std::uint16_t>(value.number);
    } else if (key == "completion_len" && is_number && e.output_tokens == 0) {
      e.output_tokens = to_int<std::uint32_t>(value.number);
    }
  } else if (section == "error") {
    if ((key == "type" || key == "error") && is_text) e.error = name_id(value.text.empty() ? std::string_view("error") : value.text);
  } else if (section == "token_usage") {
    if (key == "output_tokens" && is_number) e.output_tokens = to_int<std::uint32_t>(value.number);
  }
}

void RolloutIndex::finish_entry(File& file, std::uint64_t offset, std::uint64_t num_bytes) {
  is_line_open_ = false;
  const std::uint32_t row = file.num_rows++;
  if (num_bytes == 0) return;
  bool is_whole = scanner_.end();
  if (!is_whole && num_bytes <= kMaxRepairBytes) {
    current_ = {};
    scanner_.begin();
    try {
      is_whole = scanner_.feed(repair_json(read_range(file.reader.path(), offset, num_bytes))) && scanner_.end();
    } catch (const Error&) {
      is_whole = false;  // replaced meanwhile: the next round reads it anew
    }
  }
  if (!is_whole) current_ = {};
  current_.is_damaged = !is_whole;
  current_.offset = offset;
  current_.num_bytes = num_bytes;
  current_.step = file.step;
  current_.kind = file.kind;
  current_.file = file.id;
  current_.row = row;
  file.entries.push_back(current_);
  ++num_entries_;
  ++num_changes_;
}

bool RolloutIndex::read_file(File& file, std::uint64_t& budget) {
  LineReader::Sink sink;
  sink.restart = [&] {
    num_entries_ -= file.entries.size();
    file.entries.clear();
    file.num_rows = 0;
    is_line_open_ = false;
    ++num_changes_;
  };
  sink.piece = [&](std::string_view piece) {
    if (!std::exchange(is_line_open_, true)) {
      current_ = {};
      scanner_.begin();
    }
    (void)scanner_.feed(piece);
  };
  sink.end_line = [&](std::uint64_t offset, std::uint64_t num_bytes) { finish_entry(file, offset, num_bytes); };
  const std::uint64_t before = file.reader.offset();
  const bool has_more = file.reader.read(sink, budget);
  const std::uint64_t after = file.reader.offset();
  budget -= std::min(budget, after >= before ? after - before : after);
  return has_more;
}

void RolloutIndex::drop_oldest() {
  while (num_entries_ > limits_.max_entries) {
    File* oldest = nullptr;
    for (const auto& file : files_)
      if (!file->entries.empty() && (oldest == nullptr || file->step < oldest->step)) oldest = file.get();
    if (oldest == nullptr) return;
    first_step_ = std::max(first_step_, oldest->step + 1);
    for (const auto& file : files_)
      if (file->step < first_step_) {
        num_entries_ -= file->entries.size();
        file->entries = {};
      }
    ++num_changes_;
  }
}

bool RolloutIndex::read(std::uint64_t max_bytes) {
  look_for_files();
  std::vector<File*> order;
  for (const auto& file : files_)
    if (file->step >= first_step_) order.push_back(file.get());
  std::sort(order.begin(), order.end(),
            [](const File* a, const File* b) { return a->step != b->step ? a->step > b->step : a->id < b->id; });
  const bool is_full_round = num_rounds_++ % kFullRound == 0;
  bool has_more = false;
  std::size_t position = 0;
  num_waiting_ = 0;
  for (File* file : order) {
    const bool is_watched = position++ < kWatchedFiles || is_full_round || file->is_behind;
    if (!is_watched) continue;
    // One line is open in the scanner at a time, so it is read to its end before the next file.
    while (max_bytes > 0 || is_line_open_) {
      std::uint64_t budget = std::max(max_bytes, kLeastBytes);
      file->is_behind = read_file(*file, budget);
      max_bytes = std::min(max_bytes, budget);
      if (!file->is_behind) break;
    }
    if (std::exchange(is_line_open_, false)) file->reader.rewind_line();  // torn: what was scanned is lost with the next file
    has_more |= file->is_behind;
    num_waiting_ += file->is_behind ? 1u : 0u;
  }
  drop_oldest();
  return has_more;
}

void RolloutIndex::for_each(const std::function<void(const RolloutEntry&)>& visit) const {
  for (const auto& file : files_)
    for (const RolloutEntry& entry : file->entries) visit(entry);
}

std::optional<RolloutEntry> RolloutIndex::find(RolloutKind kind, std::int64_t step, std::uint32_t row) const {
  for (const auto& file : files_) {
    if (file->kind != kind || file->step != step) continue;
    const auto found = std::lower_bound(file->entries.begin(), file->entries.end(), row,
                                        [](const RolloutEntry& entry, std::uint32_t wanted) { return entry.row < wanted; });
    if (found != file->entries.end() && found->row == row) return *found;
  }
  return std::nullopt;
}

}  // namespace prl::dashboard
