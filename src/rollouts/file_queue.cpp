#include "rollouts/file_queue.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rollouts/sealed.hpp"

namespace prl::rollouts {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFilePoll{10};
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{16} << 30;

/// Begins a sealed file of the queue.
constexpr std::string_view kMark = "PRLQUEUE";

fs::path step_dir(const fs::path& folder, std::int64_t step) { return folder / fmt::format("step_{}", step); }
fs::path ready_file(const fs::path& folder, std::int64_t step, std::int64_t rank) {
  return step_dir(folder, step) / fmt::format("rank_{}.bin", rank);
}
fs::path taken_file(const fs::path& folder, std::int64_t step, std::int64_t rank) {
  return step_dir(folder, step) / fmt::format("rank_{}.taken", rank);
}
fs::path end_file(const fs::path& folder) { return folder / "END"; }
fs::path sent_file(const fs::path& folder) { return folder / "SENT"; }

bool is_there(const fs::path& path) {
  std::error_code ec;
  return fs::exists(path, ec);
}

/// The number in a marker that holds nothing else; nullopt if there is none (the other side may remove it at any time).
std::optional<std::int64_t> read_step(const fs::path& path) {
  if (!is_there(path)) return std::nullopt;
  std::string text;
  try {
    text = read_file(path, 64);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound) return std::nullopt;
    throw;
  }
  std::int64_t step = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), step).ec != std::errc())
    fail(ErrorCode::kCorrupt, "sample queue: {} holds '{}', wanted the last step", path.string(), text);
  return step;
}

bool holds(const fs::path& path, const std::string& bytes) {
  std::error_code ec;
  return fs::file_size(path, ec) == bytes.size() && !ec && read_file(path, kMaxFileBytes) == bytes;
}

/// A marker as an earlier run left it: the sender of this run has not removed it yet.
class StaleMarker {
 public:
  void remember(const fs::path& path) {
    std::error_code ec;
    time_ = fs::last_write_time(path, ec);
  }
  bool is(const fs::path& path) const {
    std::error_code ec;
    return time_ && fs::last_write_time(path, ec) == *time_;
  }

 private:
  std::optional<fs::file_time_type> time_;
};

/// Tries `condition` until it holds or the timeout passes.
template <typename Condition>
bool poll_until(std::chrono::milliseconds timeout, Condition condition) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    if (condition()) return true;
    const auto now = Clock::now();
    if (now >= deadline) return false;
    std::this_thread::sleep_for(std::min<Clock::duration>(kFilePoll, deadline - now));
  }
}

class FileSender final : public SampleSender {
 public:
  explicit FileSender(FileSenderOptions options) : options_(std::move(options)), last_step_(options_.first_step - 1) {
    if (options_.num_ranks < 1 || options_.capacity < 1)
      fail(ErrorCode::kInvalidArgument, "sample queue: num_ranks {} and capacity {} must be at least 1", options_.num_ranks,
           options_.capacity);
    std::error_code ec;
    fs::create_directories(options_.folder, ec);
    if (ec) fail(ErrorCode::kIo, "sample queue: {}: {}", options_.folder.string(), ec.message());
    for (const fs::path& marker : {end_file(options_.folder), sent_file(options_.folder)}) fs::remove(marker, ec);
  }

  bool push(const wire::TrainingBatch& batch, std::chrono::milliseconds timeout) override {
    if (static_cast<std::int64_t>(batch.ranks.size()) != options_.num_ranks)
      fail(ErrorCode::kInvalidArgument, "sample queue: step {} has micro-batches for {} ranks, the queue has {}", batch.step,
           batch.ranks.size(), options_.num_ranks);
    if (is_closed_) fail(ErrorCode::kUnavailable, "sample queue: step {} pushed after the queue was closed", batch.step);
    // Ranks take steps in order, so there is room when nobody holds on to the step `capacity` before this one.
    const std::int64_t blocking = batch.step - options_.capacity;
    const bool has_room = poll_until(timeout, [&] {
      for (std::int64_t rank = 0; rank < options_.num_ranks; ++rank)
        if (blocking >= options_.first_step && is_there(ready_file(options_.folder, blocking, rank))) return false;
      return true;
    });
    if (!has_room) return false;
    std::error_code ec;
    fs::create_directories(step_dir(options_.folder, batch.step), ec);
    if (ec) fail(ErrorCode::kIo, "sample queue: {}: {}", step_dir(options_.folder, batch.step).string(), ec.message());
    for (std::int64_t rank = 0; rank < options_.num_ranks; ++rank) {
      wire::TrainingBatch one;
      one.step = batch.step;
      one.ranks.push_back(batch.ranks[static_cast<std::size_t>(rank)]);
      const std::string bytes = sealed(kMark, wire::encode(one));
      const fs::path taken = taken_file(options_.folder, batch.step, rank);
      // A sender before this one sent it, and it was taken: nobody would take a second copy, and later steps would wait for that.
      if (holds(taken, bytes)) continue;
      // What an earlier sender left goes first: once the new file stands, a rank may take it, and its name is then `taken`.
      fs::remove(taken, ec);
      write_file_atomic(ready_file(options_.folder, batch.step, rank), bytes);
    }
    last_step_ = batch.step;
    write_file_atomic(sent_file(options_.folder), std::to_string(last_step_));
    for (std::int64_t rank = 0; rank < options_.num_ranks; ++rank)
      fs::remove(taken_file(options_.folder, batch.step - options_.keep_taken - 1, rank), ec);
    return true;
  }
  std::int64_t num_ranks() const noexcept override { return options_.num_ranks; }
  void close() override {
    if (std::exchange(is_closed_, true)) return;
    write_file_atomic(end_file(options_.folder), std::to_string(last_step_));
  }
  bool drain(std::chrono::milliseconds) override { return true; }
  std::string describe() const override {
    std::string text =
        fmt::format("files below {}, last step sent {}, oldest step not taken per rank:", options_.folder.string(), last_step_);
    for (std::int64_t rank = 0; rank < options_.num_ranks; ++rank) {
      std::int64_t oldest = 0;
      for (std::int64_t step = std::max(options_.first_step, last_step_ - options_.capacity); step <= last_step_ && oldest == 0; ++step)
        if (is_there(ready_file(options_.folder, step, rank))) oldest = step;
      text += oldest == 0 ? std::string(" none") : fmt::format(" {}", oldest);
    }
    return text;
  }

 private:
  const FileSenderOptions options_;
  std::int64_t last_step_;
  bool is_closed_ = false;
};

class FileReceiver final : public SampleReceiver {
 public:
  explicit FileReceiver(FileReceiverOptions options) : options_(std::move(options)), next_step_(options_.first_step) {
    // An END before our first step is an earlier run's, and so is a SENT beyond it without the step's file.
    if (is_closed()) stale_end_.remember(end_file(options_.folder));
    if (is_lost()) stale_sent_.remember(sent_file(options_.folder));
  }

  std::optional<RankBatch> pop(std::chrono::milliseconds timeout) override {
    const fs::path ready = ready_file(options_.folder, next_step_, options_.rank);
    const fs::path taken = taken_file(options_.folder, next_step_, options_.rank);
    fs::path found;
    bool lost = false;
    poll_until(timeout, [&] {
      if (is_there(ready))
        found = ready;
      else if (is_there(taken))
        found = taken;
      else
        lost = is_lost();
      return !found.empty() || lost || is_closed();
    });
    if (lost)
      fail(ErrorCode::kCorrupt,
           "sample queue: step {} was sent, but {} is not there any more: something removed it. Stop the run and resume it from "
           "its last checkpoint",
           next_step_, ready.string());
    if (found.empty()) return std::nullopt;
    RankBatch batch = read(found);
    if (found == ready) {
      std::error_code ec;
      fs::rename(ready, taken, ec);
      if (ec) fail(ErrorCode::kIo, "sample queue: {} could not be renamed to {}: {}", ready.string(), taken.string(), ec.message());
    }
    ++next_step_;
    return batch;
  }

  bool is_closed() const override {
    const fs::path path = end_file(options_.folder);
    const auto last_step = read_step(path);
    return last_step && !stale_end_.is(path) && next_step_ > *last_step;
  }
  bool was_closed_before() const override { return stale_end_.is(end_file(options_.folder)); }
  std::string describe() const override {
    return fmt::format("files below {}, rank {}, waiting for step {}", options_.folder.string(), options_.rank, next_step_);
  }

 private:
  /// Whether the step that is due was sent and its file is gone. The marker is written after the files, so it is read first.
  bool is_lost() const {
    const fs::path path = sent_file(options_.folder);
    const auto sent = read_step(path);
    if (!sent || *sent < next_step_ || stale_sent_.is(path)) return false;
    return !is_there(ready_file(options_.folder, next_step_, options_.rank)) &&
           !is_there(taken_file(options_.folder, next_step_, options_.rank));
  }

  RankBatch read(const fs::path& path) const {
    try {
      const std::string file = read_file(path, kMaxFileBytes);
      wire::TrainingBatch batch = wire::decode_training_batch(unsealed(kMark, file, "a file of a sample queue"));
      if (batch.step != next_step_ || batch.ranks.size() != 1)
        fail(ErrorCode::kCorrupt, "holds step {} for {} ranks, wanted step {} for one", batch.step, batch.ranks.size(), next_step_);
      return RankBatch{batch.step, std::move(batch.ranks.front())};
    } catch (const Error& error) {
      fail(error.code(), "{}: {}; resume from the last checkpoint", path.string(), error.what());
    }
  }

  const FileReceiverOptions options_;
  std::int64_t next_step_;
  StaleMarker stale_end_, stale_sent_;
};

}  // namespace

std::unique_ptr<SampleSender> make_file_sender(FileSenderOptions options) { return std::make_unique<FileSender>(std::move(options)); }
std::unique_ptr<SampleReceiver> make_file_receiver(FileReceiverOptions options) {
  return std::make_unique<FileReceiver>(std::move(options));
}

void clean_file_queue(const fs::path& folder, std::int64_t first_step) {
  std::error_code ec;
  for (const fs::path& marker : {end_file(folder), sent_file(folder)}) fs::remove(marker, ec);
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    if (parse_step_dir(it->path().filename().string()) < first_step) continue;
    std::error_code inner;
    std::vector<fs::path> doomed;
    for (fs::directory_iterator file(it->path(), inner), last; !inner && file != last; file.increment(inner)) {
      const std::string name = file->path().filename().string();
      if (name.starts_with("rank_") && (name.ends_with(".bin") || name.ends_with(".taken"))) doomed.push_back(file->path());
    }
    for (const fs::path& path : doomed) fs::remove(path, inner);
  }
}

}  // namespace prl::rollouts
