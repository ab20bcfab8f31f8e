#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dashboard/line_reader.hpp"
#include "dashboard/member_scanner.hpp"

namespace prl::dashboard {

/// What a rollout was made for.
enum class RolloutKind : std::uint8_t { kTrain, kEval };
std::string_view kind_name(RolloutKind kind) noexcept;

/// Where a rollout lies and what lists show of it.
struct RolloutEntry {
  std::uint64_t offset = 0, num_bytes = 0;
  std::int64_t step = 0, group = -1, example = -1;
  double reward = 0, advantage = 0;
  std::uint32_t file = 0, row = 0;  ///< row: of its file, from 0
  std::uint32_t output_tokens = 0;
  std::uint16_t turns = 0;
  std::uint16_t env = 0, stop = 0, error = 0;  ///< of RolloutIndex::name(); 0 is the empty name
  RolloutKind kind = RolloutKind::kTrain;
  bool is_truncated = false, has_reward = false, has_advantage = false;
  bool is_damaged = false;  ///< the line is no whole JSON object
};

/// Which rollouts are wanted, and in which order.
struct RolloutQuery {
  std::optional<RolloutKind> kind = {};
  std::optional<std::int64_t> step_from = {}, step_to = {}, group = {}, example = {};
  std::optional<double> reward_min = {}, reward_max = {};
  std::optional<std::string> env = {}, stop = {};
  std::optional<std::string> error = {};  ///< "*": any, "": none, else the type
  std::optional<bool> is_truncated = {};
  enum class Order { kNewest, kOldest, kRewardUp, kRewardDown, kLongest, kAdvantageUp, kAdvantageDown } order = Order::kNewest;
};

/// Offsets and heads of all rollouts below a folder `rollouts/`, found as a run writes them. Holds no text: a rollout is read from its
/// file when somebody asks for it. Memory is bounded by `max_entries`; the oldest steps go first. One thread at a time.
class RolloutIndex {
 public:
  struct Limits {
    std::size_t max_entries = 1'000'000;
    std::size_t max_files = 200'000;
    std::size_t max_names = 4096;
  };
  explicit RolloutIndex(std::filesystem::path folder) : RolloutIndex(std::move(folder), Limits()) {}
  RolloutIndex(std::filesystem::path folder, Limits limits);
  ~RolloutIndex();

  /// Reads up to `max_bytes` of what is new, newest steps first; true if there is more.
  bool read(std::uint64_t max_bytes);

  std::size_t size() const noexcept { return num_entries_; }
  std::size_t num_files() const noexcept { return files_.size(); }
  std::size_t num_files_waiting() const noexcept { return num_waiting_; }
  bool is_truncated() const noexcept { return first_step_ > 0; }
  std::uint64_t num_changes() const noexcept { return num_changes_; }
  const std::string& name(std::uint16_t id) const { return names_[id]; }
  const std::vector<std::string>& names() const noexcept { return names_; }
  std::filesystem::path path_of(const RolloutEntry& entry) const;

  /// What matches, in order.
  std::vector<RolloutEntry> select(const RolloutQuery& query) const;
  struct Selection {
    std::vector<RolloutEntry> entries;
    std::size_t total = 0;  ///< of all that match
  };
  /// The first `max_entries` of them.
  Selection select_first(const RolloutQuery& query, std::size_t max_entries) const;
  std::optional<RolloutEntry> find(RolloutKind kind, std::int64_t step, std::uint32_t row) const;

  /// Mean reward of the evaluations by step and environment.
  struct EvalPoint {
    std::int64_t step = 0;
    std::uint16_t env = 0;
    std::size_t count = 0, num_truncated = 0, num_failed = 0;
    double mean = 0, half_width = 0;  ///< of the 95 % interval of the mean, normal approximation over rollouts
  };
  std::vector<EvalPoint> eval_points() const;
  /// Distinct values of what lists are filtered by, and the steps there are.
  struct Facets {
    std::vector<std::uint16_t> envs, stops, errors;
    std::int64_t first_step = 0, last_step = 0;
    double min_reward = 0, max_reward = 0;
    std::size_t num_train = 0, num_eval = 0, num_failed = 0, num_damaged = 0;
  };
  Facets facets() const;

 private:
  struct File;
  void for_each(const std::function<void(const RolloutEntry&)>& visit) const;
  void look_for_files();
  void add_file(const std::filesystem::path& path, std::int64_t step, RolloutKind kind);
  bool read_file(File& file, std::uint64_t& budget);
  void finish_entry(File& file, std::uint64_t offset, std::uint64_t num_bytes);
  void take(std::string_view section, std::string_view key, const Scalar& value);
  std::uint16_t name_id(std::string_view name);
  void drop_oldest();

  std::filesystem::path folder_;
  const Limits limits_;
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::filesystem::path, std::size_t> file_ids_;
  std::set<std::int64_t> known_steps_;             ///< with a folder that was looked into
  std::filesystem::file_time_type folder_time_{};  ///< of folder_ when its steps were listed last
  static constexpr std::uint16_t kOtherName = 1;   ///< stands for all names beyond the limit
  std::vector<std::string> names_{"", "(other)"};
  std::map<std::string, std::uint16_t, std::less<>> name_ids_{{"", 0}, {"(other)", kOtherName}};
  RolloutEntry current_;
  MemberScanner scanner_;
  bool is_line_open_ = false;
  std::size_t num_entries_ = 0, num_waiting_ = 0;
  std::int64_t first_step_ = 0;
  std::uint64_t num_changes_ = 0, num_rounds_ = 0;
};

}  // namespace prl::dashboard
