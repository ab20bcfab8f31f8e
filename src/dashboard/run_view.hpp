#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dashboard/query.hpp"
#include "dashboard/rollout_index.hpp"
#include "dashboard/series_store.hpp"

namespace prl::text {
class Tokenizer;
}

namespace prl::dashboard {

/// One run folder as the page sees it. Reads only; every answer is JSON text. Any thread; refresh() by one thread at a time.
class RunView {
 public:
  RunView(std::filesystem::path folder, std::string name);

  struct Head {
    std::string command = {};    ///< "rl", "sft", ...; empty if the folder does not say
    std::int64_t max_steps = 0;  ///< 0: not limited, or not known
  };

  const std::string& name() const noexcept { return name_; }
  const std::filesystem::path& folder() const noexcept { return folder_; }
  enum class Part { kAll, kMetrics, kRollouts };
  /// Reads what is new, a bounded amount; true if there is more.
  bool refresh(Part part = Part::kAll);
  /// Reads the metrics alone, all there are.
  void read_metrics();
  /// What tells that something changed: rows, generation of the metrics, changes of the rollouts.
  struct Version {
    std::uint64_t rows = 0, generation = 0, rollouts = 0;
    bool operator==(const Version&) const = default;
  };
  Version version() const;
  /// Rows after number `after` as JSON texts; nullopt if some of them are no longer kept.
  std::optional<std::vector<SeriesStore::KeptRow>> rows_after(std::uint64_t after) const;

  /// {"name", "path", "command", "max_steps", "last_step", "last_time", "roles", "rollouts", ...}
  std::string summary() const;
  /// [{"role", "key", "count", "step", "last"}, ...]
  std::string series() const;
  /// s=role:key (up to 64), from, to, points -> [{"role", "key", "steps", "mean", "min", "max"}, ...]
  std::string metrics(const Query& query) const;
  /// from, to (up to 500 steps), or steps: the last so many -> {"rows": [{"role", "step", "time", "parts": {"time/step": s, ...}}, ...],
  /// "lanes": spans_json()}
  std::string timeline(const Query& query) const;
  /// Filters, order, offset, limit (up to 200), q -> {"total", "rollouts": [...], "next", "facets"}
  std::string rollouts(const Query& query) const;
  /// kind, step, row -> the rollout, with texts cut
  std::string rollout(const Query& query) const;
  std::string tokens(const Query& query) const;
  std::string evals() const;
  std::string config() const;
  std::string logs(const Query& query) const;
  std::string proofs() const;
  /// Path, offset and length of a rollout's line, to send it as it is.
  struct RawLine {
    std::filesystem::path path;
    std::uint64_t offset = 0, num_bytes = 0;
  };
  RawLine raw_line(const Query& query) const;

  Head head() const;

  /// For reports, plots and terminals, after refresh(): while nobody refreshes.
  const SeriesStore& series_store() const noexcept { return series_; }
  const RolloutIndex& rollout_index() const noexcept { return rollouts_; }

 private:
  /// What the newest of its files says, which is read again only when it has changed. By whoever refreshes.
  Head read_head();
  RolloutEntry entry_of(const Query& query) const;
  void put_entry(std::string& out, const RolloutEntry& entry, std::string_view preview) const;
  std::shared_ptr<const text::Tokenizer> tokenizer() const;

  const std::filesystem::path folder_;
  const std::string name_;
  mutable std::mutex mutex_;
  SeriesStore series_;
  RolloutIndex rollouts_;
  Head head_;
  Head head_of_file_;  ///< and the file it was read from, with its time: of the thread that refreshes
  std::filesystem::path head_path_;
  std::filesystem::file_time_type head_time_{};
  mutable std::mutex tokenizer_mutex_;
  mutable std::shared_ptr<const text::Tokenizer> tokenizer_;
  mutable bool has_no_tokenizer_ = false;
};

/// Run folders among `paths`: a path that is one, or those up to two levels below it. Error{kNotFound} naming a path where there is none;
/// at most `max_runs`.
std::vector<std::filesystem::path> find_runs(const std::vector<std::filesystem::path>& paths, std::size_t max_runs = 64);

}  // namespace prl::dashboard
