#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/error.hpp"

namespace prl::io {
namespace {

/// A map that the SIGBUS handler looks after. All members are lock-free atomics: the handler may interrupt anything.
struct GuardedMap {
  std::atomic<bool> is_taken{false};
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};  // set last, cleared first: 0 means not guarded
  std::atomic<std::atomic<bool>*> is_cut{nullptr};
};

constexpr std::size_t kMaxGuardedMaps = 4096;
std::array<GuardedMap, kMaxGuardedMaps> g_guarded_maps;
std::uintptr_t g_page_size = 0;
struct sigaction g_previous_action {};

/// Puts zeros in place of the pages from the unreadable one to the end of its map.
void handle_bus_error(int, siginfo_t* info, void*) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (GuardedMap& map : g_guarded_maps) {
    const std::uintptr_t end = map.end.load();
    if (address >= end || address < map.begin.load()) continue;
    const std::uintptr_t page = address / g_page_size * g_page_size;
    map.is_cut.load()->store(true);
    void* zeros = ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (zeros == MAP_FAILED) break;
    errno = saved_errno;
    return;
  }
  // Not one of ours: the instruction runs again under the action that was there before. A signal that was sent does not come again.
  ::sigaction(SIGBUS, &g_previous_action, nullptr);
  if (info->si_code <= 0) ::raise(SIGBUS);
  errno = saved_errno;
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    g_page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = handle_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGBUS, &action, &g_previous_action);
  });
}

int guard_map(const void* data, std::size_t size, std::atomic<bool>& is_cut) {
  install_handler();
  for (std::size_t i = 0; i < g_guarded_maps.size(); ++i) {
    GuardedMap& map = g_guarded_maps[i];
    if (map.is_taken.exchange(true)) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    map.is_cut.store(&is_cut);
    map.begin.store(begin);
    map.end.store(begin + size);
    return static_cast<int>(i);
  }
  return -1;
}

void release_guard(int guard) {
  if (guard < 0) return;
  GuardedMap& map = g_guarded_maps[static_cast<std::size_t>(guard)];
  map.end.store(0);
  map.is_taken.store(false);
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const bool leads_nowhere = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
    const auto code = leads_nowhere ? ErrorCode::kNotFound : ErrorCode::kIo;
    fail(code, "cannot open {}: {}", path.string(), std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const int reason = errno;
    ::close(fd);
    fail(ErrorCode::kIo, "cannot stat {}: {}", path.string(), std::strerror(reason));
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ErrorCode::kInvalidArgument, "cannot map {}: it is not a regular file", path.string());
  }
  std::shared_ptr<MappedFile> file(new MappedFile());
  file->path_ = path;
  file->size_ = static_cast<std::size_t>(info.st_size);
  if (file->size_ > 0) {
    void* data = ::mmap(nullptr, file->size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int reason = errno;
      ::close(fd);
      fail(ErrorCode::kIo, "cannot map {} ({} bytes): {}", path.string(), file->size_, std::strerror(reason));
    }
    file->data_ = data;
    file->guard_ = guard_map(data, file->size_, file->is_cut_);
  }
  ::close(fd);
  return file;
}

void MappedFile::check_whole() const {
  if (is_cut_.load())
    fail(ErrorCode::kCorrupt,
         "{}: it had {} bytes when it was opened, and a part of them could no longer be read: the file was cut short while it was in use, "
         "or "
         "its disk failed. Write a new file under another name and rename it into place",
         path_.string(), size_);
}

MappedFile::~MappedFile() {
  release_guard(guard_);
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace prl::io
