#include "io/hub/hub_client.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "net/digest.hpp"
#include "net/percent.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace json = boost::json;
using Clock = std::chrono::steady_clock;
namespace {

constexpr std::size_t kMaxListingBytes = 256 << 20;
constexpr int kMaxRedirects = 10;
constexpr auto kProgressPause = std::chrono::seconds(3);
constexpr std::uint64_t kReadBytes = 1 << 20;

/// An ETag without its quotes and weakness mark; empty if it cannot name a file.
std::string plain_etag(std::string_view etag) {
  if (etag.starts_with("W/")) etag.remove_prefix(2);
  if (etag.size() >= 2 && etag.front() == '"' && etag.back() == '"') etag = etag.substr(1, etag.size() - 2);
  const bool is_name = !etag.empty() && etag.size() <= 200 && etag.front() != '.' && std::all_of(etag.begin(), etag.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  return is_name ? std::string(etag) : std::string();
}

std::optional<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// "scheme://host:port" of a URL.
std::string origin_of(const net::Url& url) { return fmt::format("{}://{}:{}", url.scheme, url.host, url.port); }

std::string absolute(const std::string& location, const net::Url& base) {
  if (location.find("://") != std::string::npos) return location;
  if (location.starts_with("//")) return base.scheme + ":" + location;
  const std::string host = base.host.find(':') == std::string::npos ? base.host : "[" + base.host + "]";
  if (location.starts_with('/')) return fmt::format("{}://{}:{}{}", base.scheme, host, base.port, location);
  const std::string path = base.target.substr(0, base.target.find_first_of("?#"));
  return fmt::format("{}://{}:{}{}{}", base.scheme, host, base.port, path.substr(0, path.rfind('/') + 1), location);
}

std::string megabytes(std::uint64_t bytes) {
  return bytes < 10'000'000 ? fmt::format("{:.2f} MB", static_cast<double>(bytes) / 1e6)
                            : fmt::format("{:.0f} MB", static_cast<double>(bytes) / 1e6);
}

std::uint64_t size_of_file(const fs::path& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  return error ? 0 : size;
}

/// A file that bytes are appended to.
class Appender {
 public:
  explicit Appender(const fs::path& path) : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail(ErrorCode::kIo, "cannot write {}: {}", path.string(), std::strerror(errno));
  }
  ~Appender() { ::close(fd_); }
  Appender(const Appender&) = delete;
  Appender& operator=(const Appender&) = delete;
  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t put = ::write(fd_, bytes.data(), bytes.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail(ErrorCode::kIo, "cannot write {}: {}", path_.string(), std::strerror(errno));
      bytes.remove_prefix(static_cast<std::size_t>(put));
    }
  }
  void truncate() {
    if (::ftruncate(fd_, 0) != 0) fail(ErrorCode::kIo, "cannot truncate {}: {}", path_.string(), std::strerror(errno));
  }
  void sync() {
    if (::fsync(fd_) != 0) fail(ErrorCode::kIo, "cannot sync {}: {}", path_.string(), std::strerror(errno));
  }

 private:
  fs::path path_;
  int fd_;
};

bool is_ours_to_retry(const Error& error) {
  // A damaged download has a rule of its own: it is removed and tried once more.
  return is_transient(error.code()) && error.code() != ErrorCode::kCorrupt;
}

}  // namespace

/// Lines about one repository's download.
class HubClient::Progress {
 public:
  Progress(std::string repo, std::size_t num_files) : repo_(std::move(repo)), num_files_(num_files), start_(Clock::now()), last_(start_) {}
  void begin_file(const std::string& file, std::optional<std::uint64_t> size) {
    file_ = file;
    size_ = size;
    ++index_;
    log::debug("{}: {} ({} of {})", repo_, file, index_, num_files_);
  }
  /// `at`: length of the file so far.
  void add(std::uint64_t bytes, std::uint64_t at) {
    num_bytes_ += bytes;
    const auto now = Clock::now();
    if (now - last_ < kProgressPause) return;
    const double speed = static_cast<double>(num_bytes_ - last_bytes_) / std::chrono::duration<double>(now - last_).count();
    last_ = now;
    last_bytes_ = num_bytes_;
    std::string left;
    if (size_ && *size_ > at && speed > 0) left = fmt::format(", {:.0f} s left", static_cast<double>(*size_ - at) / speed);
    log::info("{}: {} ({} of {}), {}{}, {}/s{}", repo_, file_, index_, num_files_, megabytes(at), size_ ? " of " + megabytes(*size_) : "",
              megabytes(static_cast<std::uint64_t>(speed)), left);
  }
  void finish() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (num_bytes_ > 0) log::success("{}: downloaded {} in {:.1f} s", repo_, megabytes(num_bytes_), seconds);
  }

 private:
  std::string repo_, file_;
  std::size_t num_files_, index_ = 0;
  std::optional<std::uint64_t> size_;
  std::uint64_t num_bytes_ = 0, last_bytes_ = 0;
  Clock::time_point start_, last_;
};

HubClient::HubClient(HubSettings settings)
    : settings_(std::move(settings)), cache_(settings_.cache_dir), deadline_(Clock::now() + settings_.total_timeout), http_([&] {
        net::HttpClient::Options options;
        options.connect_timeout = settings_.head_timeout;
        options.timeout = settings_.head_timeout;
        options.max_retries = 0;  // what is worth another attempt is decided here
        options.max_reply_bytes = kMaxListingBytes;
        return options;
      }()) {}

net::BodyStream HubClient::open(std::string method, std::string url, net::Fields headers) {
  const std::string home = origin_of(net::Url::parse(settings_.endpoint));
  for (int hop = 0; hop <= kMaxRedirects; ++hop) {
    if (Clock::now() > deadline_)
      fail(ErrorCode::kDeadline, "{}: the download took longer than {} s", url,
           std::chrono::duration_cast<std::chrono::seconds>(settings_.total_timeout).count());
    const net::Url at = net::Url::parse(url);
    net::HttpCall call;
    call.method = method;
    call.url = url;
    call.headers = headers;
    if (!settings_.token.empty() && origin_of(at) == home) call.bearer = settings_.token;
    net::BodyStream stream = http_.open_body(std::move(call));
    const net::HttpReply& head = stream.head();
    const std::string* location = head.headers.find("Location");
    if (head.status / 100 != 3 || location == nullptr) return stream;
    std::string next = absolute(*location, at);
    if (method == "HEAD" && origin_of(net::Url::parse(next)) != origin_of(at)) return stream;
    url = std::move(next);
  }
  fail(ErrorCode::kUnavailable, "{}: more than {} redirects", url, kMaxRedirects);
}

net::HttpReply HubClient::get(const std::string& url) {
  net::BodyStream stream = open("GET", url, {});
  net::HttpReply reply = stream.head();
  for (;;) {
    const std::string piece = http_.next_piece(stream, settings_.stall_timeout);
    if (piece.empty()) return reply;
    if (reply.body.size() + piece.size() > kMaxListingBytes)
      fail(ErrorCode::kCorrupt, "{}: a reply of more than {} bytes", url, kMaxListingBytes);
    reply.body += piece;
  }
}

void HubClient::raise(const net::HttpReply& reply, const HubRepo& repo, const std::string& file) const {
  const std::string_view code = reply.headers.get("X-Error-Code"), message = reply.headers.get("X-Error-Message");
  const std::string what = fmt::format("{} {}", to_string(repo.kind), repo.id);
  const std::string login = settings_.token.empty() ? "set HF_TOKEN if it is private" : "the token that is set may not see it";
  if (code == "GatedRepo" || (reply.status == 403 && code.empty()))
    fail(ErrorCode::kUnauthorized, "{} is gated on {}: accept its terms there, then set HF_TOKEN{}{}", what, settings_.endpoint,
         message.empty() ? "" : ": ", message);
  if (code == "RevisionNotFound") fail(ErrorCode::kNotFound, "{} on {} has no revision '{}'", what, settings_.endpoint, repo.revision);
  if (code == "EntryNotFound") fail(ErrorCode::kNotFound, "{} on {} has no file '{}'", what, settings_.endpoint, file);
  if (code == "RepoNotFound" || reply.status == 404 || (reply.status == 401 && message != "Invalid credentials in Authorization header"))
    fail(ErrorCode::kNotFound, "there is no {} on {}; {}", what, settings_.endpoint, login);
  reply.raise_for_status(fmt::format("{} on {}", what, settings_.endpoint));
  fail(ErrorCode::kUnavailable, "{} on {}: unexpected answer {}", what, settings_.endpoint, reply.status);
}

HubListing HubClient::list(const HubRepo& repo) {
  check_hub_path(repo.revision, fmt::format("revision of {}", repo.id));
  const std::string url = fmt::format("{}/api/{}s/{}/revision/{}", settings_.endpoint, to_string(repo.kind), repo.id,
                                      net::percent_encode(repo.revision, false));
  for (int attempt = 1;; ++attempt) {
    try {
      const net::HttpReply reply = get(url);
      if (!reply.is_ok()) raise(reply, repo, {});
      const auto bad = [&](std::string_view what) { fail(ErrorCode::kCorrupt, "GET {}: {}", url, what); };
      json::parse_options options;
      options.max_depth = 64;
      json::error_code error;
      const json::value value = json::parse(reply.body, error, json::storage_ptr(), options);
      const json::object* object = error ? nullptr : value.if_object();
      if (object == nullptr) bad("the answer is no JSON object");
      HubListing listing;
      const json::value* sha = object->if_contains("sha");
      if (sha == nullptr || !sha->is_string() || !is_commit(std::string_view(sha->get_string()))) bad("the answer names no commit ('sha')");
      listing.commit = sha->get_string().c_str();
      const json::value* siblings = object->if_contains("siblings");
      if (siblings == nullptr || !siblings->is_array()) bad("the answer lists no files ('siblings')");
      for (const json::value& sibling : siblings->get_array()) {
        const json::value* name = sibling.is_object() ? sibling.get_object().if_contains("rfilename") : nullptr;
        if (name == nullptr || !name->is_string()) bad("an entry of 'siblings' has no 'rfilename'");
        listing.files.emplace_back(std::string_view(name->get_string()));
        check_hub_path(listing.files.back(), "GET " + url);
      }
      return listing;
    } catch (const Error& error) {
      if (!is_ours_to_retry(error) || attempt >= std::min(settings_.max_attempts, 3)) throw;
      log::warning("{}; trying again", error.what());
      std::this_thread::sleep_for(settings_.first_pause * (1 << (attempt - 1)));
    }
  }
}

std::string HubClient::resolve_url(const HubRepo& repo, const std::string& commit, const std::string& file) const {
  return fmt::format("{}/{}{}/resolve/{}/{}", settings_.endpoint, repo.kind == HubKind::kDataset ? "datasets/" : "", repo.id,
                     net::percent_encode(commit, false), net::percent_encode(file, true));
}

HubClient::FileInfo HubClient::ask(const HubRepo& repo, const std::string& commit, const std::string& file) {
  const std::string url = resolve_url(repo, commit, file);
  net::BodyStream stream = open("HEAD", url, {{"Accept-Encoding", "identity"}});
  const net::HttpReply& head = stream.head();
  const bool is_redirect = head.status / 100 == 3;
  if (!head.is_ok() && !is_redirect) raise(head, repo, file);
  FileInfo info;
  info.url = url;
  const std::string* linked = head.headers.find("X-Linked-Etag");
  info.etag = plain_etag(linked != nullptr ? *linked : head.headers.get("ETag"));
  if (info.etag.empty()) fail(ErrorCode::kCorrupt, "HEAD {}: the answer has no usable ETag", url);
  info.size = number(head.headers.get("X-Linked-Size"));
  if (!info.size && !is_redirect) info.size = number(head.headers.get("Content-Length"));
  if (const std::string* got = head.headers.find("X-Repo-Commit"); got != nullptr && is_commit(commit) && *got != commit)
    fail(ErrorCode::kCorrupt, "HEAD {}: the answer is of commit {}, wanted {}", url, *got, commit);
  return info;
}

void HubClient::verify(const std::string& file, const FileInfo& info, const fs::path& path) const {
  const std::uint64_t size = size_of_file(path);
  if (info.size && size != *info.size) fail(ErrorCode::kCorrupt, "{}: {} bytes arrived, the hub promised {}", file, size, *info.size);
  const bool is_hex =
      std::all_of(info.etag.begin(), info.etag.end(), [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; });
  if (!is_hex || (info.etag.size() != 64 && info.etag.size() != 40)) return;  // an etag of another kind tells nothing
  // Large files are named by their SHA-256, small ones by git's hash of a blob.
  net::Digest digest(info.etag.size() == 64 ? net::DigestKind::kSha256 : net::DigestKind::kSha1);
  if (info.etag.size() == 40) digest.update(std::string_view(fmt::format("blob {}", size)));
  if (info.etag.size() == 40) digest.update(std::string_view("\0", 1));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(errno));
  std::string piece(kReadBytes, '\0');
  ssize_t got = 0;
  while ((got = ::read(fd, piece.data(), piece.size())) > 0)
    digest.update(std::string_view(piece).substr(0, static_cast<std::size_t>(got)));
  const int reason = errno;
  ::close(fd);
  if (got < 0) fail(ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(reason));
  if (const std::string found = digest.finish(); found != info.etag)
    fail(ErrorCode::kCorrupt, "{}: the bytes that arrived have the hash {}, the hub promised {}", file, found, info.etag);
}

void HubClient::receive(const HubRepo& repo, const std::string& file, const FileInfo& info, const fs::path& path, Progress& progress) {
  std::uint64_t at = size_of_file(path);
  net::Fields headers{{"Accept-Encoding", "identity"}};
  if (at > 0) headers.add("Range", fmt::format("bytes={}-", at));
  net::BodyStream stream = open("GET", info.url, std::move(headers));
  const net::HttpReply& head = stream.head();
  Appender out(path);
  if (at > 0 && head.status == 206) {
    const std::string_view range = head.headers.get("Content-Range");
    if (!range.starts_with(fmt::format("bytes {}-", at)))
      fail(ErrorCode::kCorrupt, "{}: asked for the bytes from {}, the answer holds '{}'", file, at, range);
  } else if (head.status == 200) {
    if (at > 0) out.truncate();  // the server does not know ranges
    at = 0;
  } else if (at > 0 && head.status == 416) {
    out.truncate();  // what is here is longer than the file: not a part of it
    fail(ErrorCode::kUnavailable, "{}: what was downloaded earlier is no part of it; starting over", file);
  } else {
    raise(head, repo, file);
  }
  for (;;) {
    const std::string piece = http_.next_piece(stream, settings_.stall_timeout);
    if (piece.empty()) break;
    if (info.size && at + piece.size() > *info.size) {
      out.truncate();
      fail(ErrorCode::kCorrupt, "{}: more than the {} bytes that the hub promised arrive", file, *info.size);
    }
    out.write(piece);
    at += piece.size();
    progress.add(piece.size(), at);
    if (Clock::now() > deadline_)
      fail(ErrorCode::kDeadline, "{}: the download took longer than {} s; it continues from {} when tried again", file,
           std::chrono::duration_cast<std::chrono::seconds>(settings_.total_timeout).count(), megabytes(at));
  }
  if (info.size && at < *info.size) fail(ErrorCode::kUnavailable, "{}: the connection ended after {} of {} bytes", file, at, *info.size);
  out.sync();
}

void HubClient::download(const HubRepo& repo, const std::string& file, const FileInfo& info, Progress& progress) {
  const fs::path final_path = cache_.blob(repo, info.etag);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
  const FileLock lock(cache_.lock_file(repo, info.etag), std::max(left, std::chrono::milliseconds(0)));
  std::error_code error;
  if (fs::is_regular_file(final_path, error)) return;  // another process was faster
  fs::create_directories(final_path.parent_path(), error);
  if (error) fail(ErrorCode::kIo, "cannot make the folder {}: {}", final_path.parent_path().string(), error.message());
  const fs::path partial = final_path.string() + ".incomplete";
  bool was_corrupt = false;
  for (int attempt = 1;; ++attempt) {
    const std::uint64_t before = size_of_file(partial);
    try {
      const bool is_whole = info.size && before == *info.size && before > 0;
      if (!is_whole) receive(repo, file, info, partial, progress);
      verify(file, info, partial);
      break;
    } catch (const Error& cause) {
      if (cause.code() == ErrorCode::kCorrupt) {
        fs::remove(partial, error);
        if (std::exchange(was_corrupt, true)) throw cause.with_context(fmt::format("{} {}", to_string(repo.kind), repo.id));
      } else if (!is_ours_to_retry(cause) || Clock::now() > deadline_) {
        throw;
      }
      if (size_of_file(partial) > before) attempt = 0;  // there was progress
      if (attempt >= settings_.max_attempts)
        throw cause.with_context(fmt::format("{} {}, after {} attempts", to_string(repo.kind), repo.id, attempt));
      log::warning("{}; trying again", cause.what());
      std::this_thread::sleep_for(settings_.first_pause * (1 << std::max(attempt - 1, 0)));
    }
  }
  fs::rename(partial, final_path, error);
  if (error) fail(ErrorCode::kIo, "cannot rename {}: {}", partial.string(), error.message());
}

fs::path HubClient::fetch(const HubRepo& repo, const std::string& commit, const std::vector<std::string>& files) {
  const std::string subject = fmt::format("{} {}", to_string(repo.kind), repo.id);
  Progress progress(subject, files.size());
  for (const std::string& file : files) {
    check_hub_path(file, subject);
    if (cache_.has_file(repo, commit, file)) {
      progress.begin_file(file, std::nullopt);
      continue;
    }
    FileInfo info;
    for (int attempt = 1;; ++attempt) {
      try {
        info = ask(repo, commit, file);
        break;
      } catch (const Error& error) {
        if (!is_ours_to_retry(error) || attempt >= settings_.max_attempts) throw;
        log::warning("{}; trying again", error.what());
        std::this_thread::sleep_for(settings_.first_pause * (1 << (attempt - 1)));
      }
    }
    progress.begin_file(file, info.size);
    std::error_code error;
    if (!fs::is_regular_file(cache_.blob(repo, info.etag), error)) download(repo, file, info, progress);
    cache_.link(repo, commit, file, info.etag);
  }
  cache_.set_ref(repo, commit);
  progress.finish();
  return cache_.snapshot(repo, commit);
}

}  // namespace prl::io
