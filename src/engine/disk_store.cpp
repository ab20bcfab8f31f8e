#include "engine/disk_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"

namespace prl::engine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kPrefix = "prl-kv-", kSuffix = ".blocks";
/// So many times its timeout the disk is left alone after a read that was late.
constexpr int kRestAfterLateRead = 10;
/// Blocks that were read and wait for the caller.
constexpr std::size_t kMaxReady = 4;

/// "prl-kv-<digits>-<digits>.blocks".
bool is_name_of_ours(std::string_view name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return false;
  name = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  const std::size_t dash = name.find('-');
  const auto is_number = [](std::string_view text) {
    return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  };
  return dash != std::string_view::npos && is_number(name.substr(0, dash)) && is_number(name.substr(dash + 1));
}

/// The path still names the open file, which is a plain one.
bool is_file_at(int fd, const std::filesystem::path& path) {
  struct stat open_file {
  }, named{};
  return ::fstat(fd, &open_file) == 0 && ::lstat(path.c_str(), &named) == 0 && S_ISREG(named.st_mode) && open_file.st_ino == named.st_ino &&
         open_file.st_dev == named.st_dev;
}

/// Removes what processes have left that were killed: their locks went with them.
void remove_leftovers(const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (is_name_of_ours(it->path().filename().string())) found.push_back(it->path());
  for (const std::filesystem::path& path : found) {
    const Fd file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!file.is_open() || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 || !is_file_at(file.get(), path)) continue;
    if (::unlink(path.c_str()) == 0) log::info("removed {}, which a process that was killed has left", path.string());
  }
}

/// A new file, locked.
Fd make_file(const std::filesystem::path& folder, std::filesystem::path& path) {
  for (int number = 0;; ++number) {
    path = folder / fmt::format("{}{}-{}{}", kPrefix, ::getpid(), number, kSuffix);
    Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file.is_open() && errno == EEXIST) continue;
    if (!file.is_open()) fail(ErrorCode::kIo, "{} for KV blocks cannot be made: {}", path.string(), std::strerror(errno));
    const bool is_locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
    if (!is_locked && errno != EWOULDBLOCK)
      fail(ErrorCode::kIo, "{} for KV blocks cannot be locked: {}", path.string(), std::strerror(errno));
    // Another that starts may have taken it for a leftover before it was locked.
    if (is_locked && is_file_at(file.get(), path)) return file;
  }
}

/// False at the end of the file, or with errno.
template <typename Transfer, typename Byte>
bool transfer_all(const Transfer& transfer, int fd, Byte* bytes, std::size_t count, off_t at) {
  while (count > 0) {
    const ssize_t done = transfer(fd, bytes, count, at);
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = 0;
    if (done <= 0) return false;
    bytes += done;
    at += done;
    count -= static_cast<std::size_t>(done);
  }
  return true;
}

}  // namespace

/// A read() under way. Guarded by the store's mutex.
struct DiskStore::Reading {
  /// Gives the reading up at its end, whatever ends it.
  struct Handle {
    explicit Handle(DiskStore& owner) : store(owner) {}
    ~Handle() {
      {
        const std::lock_guard lock(store.mutex_);
        reading->is_abandoned = true;
        reading->ready.clear();
      }
      reading->news.notify_all();
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    DiskStore& store;
    std::shared_ptr<Reading> reading = std::make_shared<Reading>();
  };
  struct Ready {
    std::size_t index;
    Bytes bytes;  ///< null: it is gone
  };
  std::deque<Ready> ready;
  bool is_abandoned = false;
  std::condition_variable news;  ///< for both sides
};

DiskStore::DiskStore(DiskStoreOptions options) : options_(std::move(options)) {
  PRL_CHECK(options_.num_slots > 0 && options_.block_bytes > 0, "a file of {} blocks of {} bytes", options_.num_slots,
            options_.block_bytes);
  if (!options_.read_at) options_.read_at = ::pread;
  if (!options_.write_at) options_.write_at = ::pwrite;
  options_.max_queued_bytes = std::max(options_.max_queued_bytes, 2 * options_.block_bytes);
  std::error_code error;
  std::filesystem::create_directories(options_.folder, error);
  if (error) fail(ErrorCode::kIo, "the folder {} of KV blocks cannot be made: {}", options_.folder.string(), error.message());
  remove_leftovers(options_.folder);
  file_ = make_file(options_.folder, path_);
  slots_.resize(static_cast<std::size_t>(options_.num_slots));
  writer_ = std::thread([this] { write_queued(); });
  try {
    reader_ = std::thread([this] { read_queued(); });
  } catch (...) {
    stop();  // the writer
    throw;
  }
}

DiskStore::~DiskStore() { stop(); }

void DiskStore::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    forget_locked();
  }
  write_news_.notify_all();
  read_news_.notify_all();
  ::unlink(path_.c_str());  // while it is locked: nobody else takes it for a leftover
  writer_.join();
  if (reader_.joinable()) reader_.join();
}

bool DiskStore::write(std::int64_t slot, std::span<const std::byte> bytes) {
  PRL_CHECK(bytes.size() == options_.block_bytes, "a block of {} bytes, wanted {}", bytes.size(), options_.block_bytes);
  {
    const std::lock_guard lock(mutex_);
    Slot& taken = slots_[static_cast<std::size_t>(slot)];
    taken.state = Slot::State::kEmpty;
    taken.queued.reset();
    ++taken.generation;
    if (stats_.is_off || num_queued_bytes_ + bytes.size() > options_.max_queued_bytes) {
      ++stats_.num_not_queued;
      return false;
    }
    num_queued_bytes_ += bytes.size();
  }
  auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  {
    const std::lock_guard lock(mutex_);
    Slot& taken = slots_[static_cast<std::size_t>(slot)];
    if (stats_.is_off) {
      num_queued_bytes_ -= bytes.size();
      return false;
    }
    taken.state = Slot::State::kQueued;
    taken.queued = copy;
    writes_.push_back({slot, taken.generation, std::move(copy)});
    stats_.num_writes_queued = std::ssize(writes_);
  }
  write_news_.notify_one();
  return true;
}

void DiskStore::write_queued() {
  std::unique_lock lock(mutex_);
  for (;;) {
    write_news_.wait(lock, [&] { return is_stopping_ || !writes_.empty(); });  // ends with the store
    if (is_stopping_) return;
    const Write write = std::move(writes_.front());
    writes_.pop_front();
    Slot& slot = slots_[static_cast<std::size_t>(write.slot)];
    if (slot.generation == write.generation) {
      lock.unlock();
      const std::uint64_t checksum = hash_bytes(*write.bytes, write.generation);
      const auto at = static_cast<off_t>(write.slot) * static_cast<off_t>(options_.block_bytes);
      const bool is_written = transfer_all(options_.write_at, file_.get(), write.bytes->data(), write.bytes->size(), at);
      const int reason = errno;
      lock.lock();
      if (!is_written && !is_stopping_) end_use_locked(std::strerror(reason));
      if (is_written) ++stats_.num_written;
      if (is_written && slot.generation == write.generation) {
        slot.state = Slot::State::kWritten;
        slot.checksum = checksum;
        slot.queued.reset();
      }
    }
    // Blocks that were forgotten are in memory until they had their turn.
    num_queued_bytes_ -= write.bytes->size();
    stats_.num_writes_queued = std::ssize(writes_);
  }
}

std::vector<DiskRead> DiskStore::read(std::span<const std::int64_t> slots,
                                      const std::function<void(std::size_t, std::span<const std::byte>)>& take) {
  const Clock::time_point deadline = Clock::now() + options_.read_timeout;
  std::vector<DiskRead> outcomes(slots.size(), DiskRead::kLate);
  std::vector<Reading::Ready> at_hand;
  Reading::Handle call(*this);
  std::size_t num_left = 0;
  std::unique_lock lock(mutex_);
  const bool may_read = Clock::now() >= no_reads_before_;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(slots[i])];
    if (slot.state != Slot::State::kWritten) at_hand.push_back({i, slot.queued});
    if (slot.state != Slot::State::kWritten || !may_read) continue;
    reads_.push_back({slots[i], slot.generation, slot.checksum, i, call.reading});
    ++num_left;
  }
  lock.unlock();
  read_news_.notify_one();
  const auto accept = [&](const Reading::Ready& ready) {
    outcomes[ready.index] = ready.bytes != nullptr ? DiskRead::kRead : DiskRead::kGone;
    if (ready.bytes != nullptr) take(ready.index, *ready.bytes);
  };
  for (const Reading::Ready& ready : at_hand) accept(ready);
  lock.lock();
  while (num_left > 0 && Clock::now() < deadline) {
    if (!call.reading->news.wait_until(lock, deadline, [&] { return !call.reading->ready.empty(); })) break;
    const Reading::Ready ready = std::move(call.reading->ready.front());
    call.reading->ready.pop_front();
    --num_left;
    lock.unlock();
    call.reading->news.notify_all();
    accept(ready);
    lock.lock();
  }
  if (num_left > 0) no_reads_before_ = Clock::now() + kRestAfterLateRead * options_.read_timeout;
  stats_.num_read += std::ranges::count(outcomes, DiskRead::kRead);
  stats_.num_late += std::ranges::count(outcomes, DiskRead::kLate);
  return outcomes;
}

void DiskStore::read_queued() {
  std::unique_lock lock(mutex_);
  for (;;) {
    read_news_.wait(lock, [&] { return is_stopping_ || !reads_.empty(); });  // ends with the store
    if (is_stopping_) return;
    const Read read = std::move(reads_.front());
    reads_.pop_front();
    // The caller gives it up at its deadline.
    read.call->news.wait(lock, [&] { return read.call->is_abandoned || read.call->ready.size() < kMaxReady; });
    if (read.call->is_abandoned) continue;
    lock.unlock();
    Bytes bytes = read_slot(read);
    lock.lock();
    const Slot& slot = slots_[static_cast<std::size_t>(read.slot)];
    if (bytes == nullptr && slot.generation == read.generation && !stats_.is_off) {
      ++stats_.num_damaged;
      if (std::has_single_bit(static_cast<std::uint64_t>(stats_.num_damaged)))
        log::warning("{}: a KV block is not what was written there ({} so far); it is computed again", path_.string(), stats_.num_damaged);
    }
    if (!read.call->is_abandoned) read.call->ready.push_back({read.index, std::move(bytes)});
    read.call->news.notify_all();
  }
}

DiskStore::Bytes DiskStore::read_slot(const Read& read) {
  auto bytes = std::make_shared<std::vector<std::byte>>(options_.block_bytes);
  const auto at = static_cast<off_t>(read.slot) * static_cast<off_t>(options_.block_bytes);
  if (!transfer_all(options_.read_at, file_.get(), bytes->data(), bytes->size(), at)) {
    log::debug("{}: reading a KV block failed: {}", path_.string(), errno != 0 ? std::strerror(errno) : "the file is shorter");
    return nullptr;
  }
  return hash_bytes(*bytes, read.generation) == read.checksum ? bytes : nullptr;
}

void DiskStore::forget() {
  const std::lock_guard lock(mutex_);
  forget_locked();
}

void DiskStore::forget_locked() {
  for (Slot& slot : slots_) {
    slot.state = Slot::State::kEmpty;
    slot.queued.reset();
    ++slot.generation;
  }
  for (const Write& write : writes_) num_queued_bytes_ -= write.bytes->size();
  writes_.clear();
  stats_.num_writes_queued = 0;
}

void DiskStore::end_use_locked(const std::string& why) {
  if (std::exchange(stats_.is_off, true)) return;
  forget_locked();
  log::warning("{} cannot be written ({}): KV blocks are kept in host memory alone from now on", path_.string(), why);
  if (::ftruncate(file_.get(), 0) != 0) log::debug("{} keeps its size: {}", path_.string(), std::strerror(errno));
}

DiskStats DiskStore::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace prl::engine
