#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "engine/kv/disk_blocks.hpp"

namespace prl::engine {

struct DiskStoreOptions {
  std::filesystem::path folder;  ///< made if it is not there
  std::int64_t num_slots = 0;    ///< blocks that the file has room for
  std::size_t block_bytes = 0;
  std::chrono::milliseconds read_timeout{50};  ///< of one read(), however many blocks it asks for
  std::size_t max_queued_bytes = 64ull << 20;  ///< of blocks that wait to be written; two blocks at least
  /// As pread and pwrite; others are for tests.
  std::function<ssize_t(int, void*, std::size_t, off_t)> read_at = {};
  std::function<ssize_t(int, const void*, std::size_t, off_t)> write_at = {};
};

/// A file of blocks, each in a slot of its own, for the lifetime of this object: nothing in it is of use to another process, for what the
/// blocks are is known here alone. A thread writes and another reads, so that the caller never waits for the disk longer than
/// read_timeout. Every block has a checksum: what comes back is what was given, or nothing. One caller.
///
/// The file is "prl-kv-<process>-<number>.blocks", readable by its owner only, and locked as long as it is in use. A start removes files of
/// that name whose lock is free: their process was killed. A write that fails, as on a full disk, ends the store's use with one warning.
class DiskStore {
 public:
  /// Error{kIo} naming the folder.
  explicit DiskStore(DiskStoreOptions options);
  /// Removes the file.
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  /// Takes a copy of the bytes, which are written later; the slot's former block is forgotten. False, and the slot empty, if too much waits
  /// to be written or the store is out of use.
  [[nodiscard]] bool write(std::int64_t slot, std::span<const std::byte> bytes);
  /// take(i, bytes) with the block of slots[i], on the caller's thread, for each that comes in time. After a read that was late the disk is
  /// left alone for a while.
  std::vector<DiskRead> read(std::span<const std::int64_t> slots, const std::function<void(std::size_t, std::span<const std::byte>)>& take);
  /// Empties all slots.
  void forget();
  DiskStats stats() const;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  void stop();

  using Bytes = std::shared_ptr<std::vector<std::byte>>;
  struct Slot {
    enum class State : std::uint8_t { kEmpty, kQueued, kWritten };
    State state = State::kEmpty;
    std::uint64_t generation = 0;  ///< counts its blocks: what is found out about an earlier one says nothing
    std::uint64_t checksum = 0;
    Bytes queued;  ///< while it waits to be written
  };
  struct Write {
    std::int64_t slot;
    std::uint64_t generation;
    Bytes bytes;
  };
  struct Reading;
  struct Read {
    std::int64_t slot;
    std::uint64_t generation, checksum;
    std::size_t index;
    std::shared_ptr<Reading> call;
  };

  void write_queued();
  void read_queued();
  /// Empty if it is not what was written. Logs why.
  Bytes read_slot(const Read& read);
  /// With the mutex held.
  void forget_locked();
  void end_use_locked(const std::string& why);

  DiskStoreOptions options_;
  std::filesystem::path path_;
  Fd file_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable write_news_, read_news_;
  std::vector<Slot> slots_;
  std::deque<Write> writes_;
  std::deque<Read> reads_;
  std::size_t num_queued_bytes_ = 0;
  std::chrono::steady_clock::time_point no_reads_before_{};
  DiskStats stats_;
  bool is_stopping_ = false;
  std::thread writer_, reader_;
};

}  // namespace prl::engine
