#include "comm/store.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "base/waiting.hpp"

namespace prl::comm {

namespace {

namespace fs = std::filesystem;

constexpr char kGenerationKey[] = "generation";

std::int64_t parse_number(const std::string& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size())
    fail(ErrorCode::kCorrupt, "[store] key '{}' holds '{}', a number was wanted", kGenerationKey, text);
  return number;
}

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, std::string_view value) override {
    check(key, value);
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    check(key);
    const std::lock_guard lock(mutex_);
    const auto it = values_.find(key);
    return it == values_.end() ? std::nullopt : std::optional(it->second);
  }
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected, std::string_view value) override {
    check(key, value);
    const std::lock_guard lock(mutex_);
    const auto it = values_.find(key);
    if (it == values_.end()) return expected ? std::string() : values_.emplace(key, value).first->second;
    if (expected && it->second == *expected) it->second = value;
    return it->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

/// Files are written under a name of their own and renamed, so that a reader sees a whole value. A lock file makes compare_and_set one
/// step.
class FileStore final : public Store {
 public:
  explicit FileStore(fs::path folder) : folder_(std::move(folder)) {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) fail(ErrorCode::kUnavailable, "[store] cannot make {}: {}", folder_.string(), error.message());
  }
  void set(const std::string& key, std::string_view value) override {
    check(key, value);
    const Lock lock(*this);
    write(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    check(key);
    std::ifstream file(path_of(key), std::ios::binary);
    if (!file) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected, std::string_view value) override {
    check(key, value);
    const Lock lock(*this);
    const std::optional<std::string> held = get(key);
    if (held != expected) return held.value_or(std::string());
    write(key, value);
    return std::string(value);
  }

 private:
  /// Held for one small read and write; the kernel frees it when its holder dies.
  class Lock {
   public:
    explicit Lock(const FileStore& store) : fd_(::open((store.folder_ / ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
      int result = fd_ < 0 ? -1 : ::flock(fd_, LOCK_EX);
      while (result != 0 && errno == EINTR && fd_ >= 0) result = ::flock(fd_, LOCK_EX);
      if (result == 0) return;
      const int error = errno;
      if (fd_ >= 0) ::close(fd_);
      fail(ErrorCode::kUnavailable, "[store] cannot lock {}: {}", store.folder_.string(), std::strerror(error));
    }
    ~Lock() { ::close(fd_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    int fd_;
  };

  fs::path path_of(const std::string& key) const {
    std::string name = "key-";
    for (const char c : key) {
      const bool is_plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
      name += is_plain ? std::string(1, c) : fmt::format("%{:02x}", static_cast<unsigned char>(c));
    }
    return folder_ / name;
  }
  void write(const std::string& key, std::string_view value) const {
    const fs::path path = path_of(key), temporary = folder_ / fmt::format(".new-{}-{}", ::getpid(), num_written_.fetch_add(1));
    std::ofstream file(temporary, std::ios::binary);
    file.write(value.data(), static_cast<std::streamsize>(value.size()));
    file.close();
    std::error_code error;
    if (file) fs::rename(temporary, path, error);
    if (!file || error)
      fail(ErrorCode::kUnavailable, "[store] cannot write {}: {}", path.string(), error ? error.message() : "write failed");
  }

  fs::path folder_;
  mutable std::atomic<std::uint64_t> num_written_{0};
};

}  // namespace

void Store::check(const std::string& key, std::string_view value) {
  const bool is_printable = std::ranges::all_of(key, [](char c) { return c > ' ' && c < 127; });
  if (key.empty() || key.size() > kMaxKeyBytes || !is_printable)
    fail(ErrorCode::kInvalidArgument, "[store] a key is 1 to {} characters of printable ASCII without spaces, not '{}'", kMaxKeyBytes, key);
  if (value.size() > kMaxValueBytes)
    fail(ErrorCode::kInvalidArgument, "[store] the value of '{}' has {} bytes, at most {} are taken", key, value.size(), kMaxValueBytes);
}

std::string Store::wait(const std::string& key, std::chrono::milliseconds timeout, std::string_view who) {
  Waiting waiting(
      {.who = fmt::format("process {}", ::getpid()), .what = fmt::format("{} to set '{}' in the store", who, key), .limit = timeout});
  std::chrono::microseconds pause{100};
  for (;;) {
    if (auto value = get(key)) return *std::move(value);
    if (waiting.is_expired())
      fail(ErrorCode::kDeadline, "[store] waited {:.1f} s for key '{}', which {} should have set",
           std::chrono::duration<double>(timeout).count(), key, who);
    waiting.check();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10'000));
  }
}

std::int64_t Store::generation() {
  const auto held = get(kGenerationKey);
  return held ? parse_number(*held) : 0;
}

void Store::advance_generation(std::int64_t to) {
  for (;;) {
    const auto held = get(kGenerationKey);
    if (held ? parse_number(*held) >= to : to <= 0) return;
    (void)compare_and_set(kGenerationKey, held, std::to_string(to));
  }
}

std::shared_ptr<Store> make_memory_store() { return std::make_shared<MemoryStore>(); }

std::shared_ptr<Store> make_file_store(const fs::path& folder) { return std::make_shared<FileStore>(folder); }

std::shared_ptr<Store> make_store(const std::string& address, std::chrono::milliseconds timeout) {
  constexpr std::string_view kFile = "file:", kTcp = "tcp://";
  if (address.starts_with(kFile) && address.size() > kFile.size()) return make_file_store(address.substr(kFile.size()));
  const std::size_t colon = address.rfind(':');
  if (address.starts_with(kTcp) && colon > kTcp.size()) {
    std::string host = address.substr(kTcp.size(), colon - kTcp.size());
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    int port = 0;
    const char* end = address.data() + address.size();
    const auto parsed = std::from_chars(address.data() + colon + 1, end, port);
    if (parsed.ec == std::errc() && parsed.ptr == end && port > 0 && port < 65536) return make_tcp_store(host, port, timeout);
  }
  fail(ErrorCode::kInvalidArgument, "[store] '{}' is no address of a store: wanted file:<folder> or tcp://<host>:<port>", address);
}

}  // namespace prl::comm
