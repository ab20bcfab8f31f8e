#include "rollouts/file_queue.hpp"

#include <algorithm>
#include <charconv>
#include <string>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::rollouts {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kFilePoll{10};
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{16} << 30;

fs::path step_dir(const fs::path& folder, std::int64_t step) { return folder / fmt::format("step_{}", step); }
fs::path ready_file(const fs::path& folder, std::int64_t step, std::int64_t rank) {
  return step_dir(folder, step) / fmt::format("rank_{}.bin", rank);
}
fs::path taken_file(const fs::path& folder, std::int64_t step, std::int64_t rank) {
  return step_dir(folder, step) / fmt::format("rank_{}.taken", rank);
}
fs::path end_file(const fs::path& folder) { return folder / "END"; }

bool is_there(const fs::path& path) {
  std::error_code ec;
  return fs::exists(path, ec);
}

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
    fs::remove(end_file(options_.folder), ec);
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
      write_file_atomic(ready_file(options_.folder, batch.step, rank), wire::encode(one));
      fs::remove(taken_file(options_.folder, batch.step, rank), ec);
    }
    last_step_ = batch.step;
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
    // An END before our first step is an earlier run's: the sender of this one has not removed it yet.
    std::error_code ec;
    if (is_closed()) ignored_end_ = fs::last_write_time(end_file(options_.folder), ec);
  }

  std::optional<RankBatch> pop(std::chrono::milliseconds timeout) override {
    const fs::path ready = ready_file(options_.folder, next_step_, options_.rank);
    const fs::path taken = taken_file(options_.folder, next_step_, options_.rank);
    fs::path found;
    poll_until(timeout, [&] {
      if (is_there(ready))
        found = ready;
      else if (is_there(taken))
        found = taken;
      return !found.empty() || is_closed();
    });
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
    if (!is_there(path)) return false;
    std::error_code ec;
    if (ignored_end_ && fs::last_write_time(path, ec) == *ignored_end_) return false;
    const std::string text = read_file(path, 64);
    std::int64_t last_step = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), last_step).ec != std::errc())
      fail(ErrorCode::kCorrupt, "sample queue: {} holds '{}', wanted the last step", path.string(), text);
    return next_step_ > last_step;
  }
  std::string describe() const override {
    return fmt::format("files below {}, rank {}, waiting for step {}", options_.folder.string(), options_.rank, next_step_);
  }

 private:
  RankBatch read(const fs::path& path) const {
    try {
      wire::TrainingBatch batch = wire::decode_training_batch(read_file(path, kMaxFileBytes));
      if (batch.step != next_step_ || batch.ranks.size() != 1)
        fail(ErrorCode::kCorrupt, "holds step {} for {} ranks, wanted step {} for one", batch.step, batch.ranks.size(), next_step_);
      return RankBatch{batch.step, std::move(batch.ranks.front())};
    } catch (const Error& error) {
      throw error.with_context(path.string());
    }
  }

  const FileReceiverOptions options_;
  std::int64_t next_step_;
  std::optional<fs::file_time_type> ignored_end_;
};

}  // namespace

std::unique_ptr<SampleSender> make_file_sender(FileSenderOptions options) { return std::make_unique<FileSender>(std::move(options)); }
std::unique_ptr<SampleReceiver> make_file_receiver(FileReceiverOptions options) {
  return std::make_unique<FileReceiver>(std::move(options));
}

void clean_file_queue(const fs::path& folder, std::int64_t first_step) {
  std::error_code ec;
  fs::remove(end_file(folder), ec);
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
