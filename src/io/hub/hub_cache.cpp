#include "io/hub/hub_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/waiting.hpp"
#include "io/copy_file.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxRefBytes = 4096;
constexpr auto kLockPause = std::chrono::milliseconds(100);

std::string folder_name(const HubRepo& repo) {
  std::string name = std::string(to_string(repo.kind)) + "s--";
  for (const char c : repo.id) name += c == '/' ? std::string("--") : std::string(1, c);
  return name;
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail(ErrorCode::kIo, "cannot make the folder {}: {}", folder.string(), error.message());
}

}  // namespace

FileLock::FileLock(const fs::path& path, std::chrono::milliseconds timeout) {
  make_folders(path.parent_path());
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(ErrorCode::kIo, "cannot open the lock {}: {}", path.string(), std::strerror(errno));
  Waiting waiting({.who = "this process", .what = "another process that downloads the same file", .limit = timeout, .detail = [&path] {
                     return path.string();
                   }});
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    if ((reason != EWOULDBLOCK && reason != EINTR) || waiting.is_expired()) {
      ::close(fd_);
      if (reason != EWOULDBLOCK && reason != EINTR) fail(ErrorCode::kIo, "cannot lock {}: {}", path.string(), std::strerror(reason));
      fail(ErrorCode::kDeadline, "another process has held the lock {} for {} s", path.string(),
           std::chrono::duration_cast<std::chrono::seconds>(timeout).count());
    }
    waiting.check();
    std::this_thread::sleep_for(kLockPause);
  }
}

FileLock::~FileLock() {
  if (fd_ >= 0) ::close(fd_);
}

fs::path HubCache::repo_folder(const HubRepo& repo) const { return folder_ / folder_name(repo); }

std::optional<std::string> HubCache::commit_of(const HubRepo& repo) const {
  if (is_commit(repo.revision)) return repo.revision;
  const fs::path file = repo_folder(repo) / "refs" / repo.revision;
  std::error_code error;
  if (!fs::is_regular_file(file, error)) return std::nullopt;
  std::string text = read_file(file, kMaxRefBytes);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return is_commit(text) ? std::optional(text) : std::nullopt;
}

fs::path HubCache::snapshot(const HubRepo& repo, std::string_view commit) const { return repo_folder(repo) / "snapshots" / commit; }

bool HubCache::has_file(const HubRepo& repo, std::string_view commit, const std::string& file) const {
  std::error_code error;
  return fs::is_regular_file(snapshot(repo, commit) / file, error);  // follows the link
}

fs::path HubCache::blob(const HubRepo& repo, std::string_view etag) const { return repo_folder(repo) / "blobs" / etag; }

fs::path HubCache::lock_file(const HubRepo& repo, std::string_view etag) const {
  return folder_ / ".locks" / folder_name(repo) / (std::string(etag) + ".lock");
}

void HubCache::link(const HubRepo& repo, std::string_view commit, const std::string& file, std::string_view etag) const {
  const fs::path pointer = snapshot(repo, commit) / file;
  make_folders(pointer.parent_path());
  const fs::path target = fs::relative(blob(repo, etag), pointer.parent_path());
  std::error_code error;
  if (fs::is_regular_file(pointer, error)) return;
  const fs::path temporary = pointer.string() + ".tmp-" + std::to_string(::getpid());
  fs::remove(temporary, error);
  fs::create_symlink(target, temporary, error);
  if (error) {  // a file system without links: a copy does as well
    io::copy_file(blob(repo, etag), temporary);
  }
  fs::rename(temporary, pointer, error);
  if (error) fail(ErrorCode::kIo, "cannot link {}: {}", pointer.string(), error.message());
}

void HubCache::set_ref(const HubRepo& repo, std::string_view commit) const {
  if (is_commit(repo.revision)) return;
  const fs::path file = repo_folder(repo) / "refs" / repo.revision;
  make_folders(file.parent_path());
  write_file_atomic(file, commit);
}

bool is_commit(std::string_view text) noexcept {
  return text.size() == 40 && std::all_of(text.begin(), text.end(), [](char c) { return is_ascii_digit(c) || (c >= 'a' && c <= 'f'); });
}

void check_hub_path(std::string_view file, std::string_view subject) {
  bool is_good = !file.empty() && file.size() <= 1024 && file.find('\\') == std::string_view::npos &&
                 std::none_of(file.begin(), file.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; });
  for (std::size_t begin = 0; is_good && begin <= file.size();) {
    const std::size_t end = std::min(file.find('/', begin), file.size());
    const std::string_view part = file.substr(begin, end - begin);
    is_good = !part.empty() && part != "." && part != "..";
    begin = end + 1;
  }
  if (!is_good) fail(ErrorCode::kCorrupt, "{}: '{}' is no name of a file inside the repository", subject, file.substr(0, 200));
}

}  // namespace prl::io
