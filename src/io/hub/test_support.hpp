#pragma once

#include <atomic>
#include <boost/json.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "net/digest.hpp"
#include "net/http_server.hpp"

/// A hub of one repository on this machine; shared by the tests of io/ only.
namespace prl::io::testing_support {

inline constexpr const char* kCommit = "0123456789abcdef0123456789abcdef01234567";

inline std::string hex_digest(net::DigestKind kind, const std::string& bytes) {
  net::Digest digest(kind);
  digest.update(bytes);
  return digest.finish();
}
inline std::string git_hash(const std::string& bytes) {
  return hex_digest(net::DigestKind::kSha1, "blob " + std::to_string(bytes.size()) + std::string(1, '\0') + bytes);
}

struct Seen {
  std::string method, path, range, bearer;
};

/// What the handlers of a fake hub share.
struct HubState {
  std::string needed_token;
  std::atomic<int> num_breaks{0};
  std::atomic<bool> knows_ranges{true};
  std::atomic<bool> corrupt{false};
  std::atomic<int> cdn_port{0};
  std::vector<std::string> files;
  std::mutex mutex;
  std::vector<Seen> seen;  // guarded by mutex

  void note(const net::HttpRequest& request) {
    std::lock_guard lock(mutex);
    seen.push_back({request.method, request.path, std::string(request.headers.get("Range")), std::string(request.bearer())});
  }
};
using StatePtr = std::shared_ptr<HubState>;
using Reply = net::asio::awaitable<net::HttpResponse>;

/// Any fixed answer, unless the token is wrong.
inline Reply answer(StatePtr state, net::HttpResponse response, net::HttpRequest request) {
  state->note(request);
  if (state->needed_token.empty() || request.bearer() == state->needed_token) co_return response;
  net::HttpResponse denied = net::HttpResponse::json(R"({"error":"Repository not found"})", 401);
  denied.headers = {{"X-Error-Code", "RepoNotFound"}, {"X-Error-Message", "Repository not found"}};
  co_return denied;
}

/// A large file, in parts if asked; some connections break in the middle.
inline Reply large_file(StatePtr state, std::string bytes, net::HttpRequest request) {
  state->note(request);
  std::size_t begin = 0;
  const std::string range(request.headers.get("Range"));
  if (state->knows_ranges && range.starts_with("bytes=")) begin = std::stoul(range.substr(6));
  if (begin > bytes.size()) co_return net::HttpResponse::text("", 416);
  net::Fields headers;
  if (begin > 0) headers.add("Content-Range", fmt::format("bytes {}-{}/{}", begin, bytes.size() - 1, bytes.size()));
  const int status = begin > 0 ? 206 : 200;
  std::string part = state->corrupt ? std::string(bytes.size() - begin, '?') : bytes.substr(begin);
  if (state->num_breaks > 0) {
    --state->num_breaks;
    auto starting = request.stream->start(status, "application/octet-stream", headers);
    co_await std::move(starting);
    std::string half = part.substr(0, part.size() / 2);
    auto writing = request.stream->write(std::move(half));
    co_await std::move(writing);
    fail(ErrorCode::kUnavailable, "the test breaks this connection");
  }
  net::HttpResponse response = net::HttpResponse::text(part, status);
  response.headers = headers;
  co_return response;
}

inline Reply redirect_to_cdn(StatePtr state, std::string name, net::HttpResponse response, net::HttpRequest request) {
  response.headers.add("Location", fmt::format("http://127.0.0.1:{}/blob/{}?signature=x", state->cdn_port.load(), name));
  auto answering = answer(state, std::move(response), std::move(request));
  co_return co_await std::move(answering);
}

inline Reply listing(StatePtr state, net::HttpRequest request) {
  boost::json::array siblings;
  for (const std::string& name : state->files) siblings.push_back(boost::json::object{{"rfilename", name}});
  net::HttpResponse response =
      net::HttpResponse::json(boost::json::serialize(boost::json::object{{"sha", kCommit}, {"siblings", siblings}}));
  auto answering = answer(state, std::move(response), std::move(request));
  co_return co_await std::move(answering);
}

/// Speaks the hub's routes for one repository; large files lie on a second server, as on the real hub's CDN.
class FakeHub {
 public:
  FakeHub() : hub_(options()), cdn_(options()) {}

  /// Small files are served by the hub itself, under git's hash; large ones by the CDN, under their SHA-256.
  void add(const std::string& name, const std::string& bytes, bool is_large = false) {
    state->files.push_back(name);
    const std::string etag = is_large ? hex_digest(net::DigestKind::kSha256, bytes) : git_hash(bytes);
    const std::string path = prefix_ + "/resolve/" + kCommit + "/" + name;
    net::HttpResponse response = net::HttpResponse::text(bytes);
    response.headers = {{"ETag", "\"" + etag + "\""}, {"X-Repo-Commit", kCommit}};
    if (is_large) {
      response = net::HttpResponse::text("redirecting", 302);
      response.headers = {{"ETag", "\"not-the-etag\""},
                          {"X-Repo-Commit", kCommit},
                          {"X-Linked-Etag", "\"" + etag + "\""},
                          {"X-Linked-Size", std::to_string(bytes.size())}};
      cdn_.route("GET", "/blob/" + name,
                 [state = state, bytes](net::HttpRequest request) { return large_file(state, bytes, std::move(request)); });
      hub_.route("GET", path, [state = state, name, response](net::HttpRequest request) {
        return redirect_to_cdn(state, name, response, std::move(request));
      });
      return;
    }
    hub_.route("GET", path, [state = state, response](net::HttpRequest request) { return answer(state, response, std::move(request)); });
  }
  void route(const std::string& path, int status, net::Fields headers, const std::string& body = "{}") {
    net::HttpResponse response = net::HttpResponse::json(body, status);
    response.headers = std::move(headers);
    hub_.route("GET", path, [state = state, response](net::HttpRequest request) { return answer(state, response, std::move(request)); });
  }
  void start(const std::string& id = "org/tiny", const std::string& kind = "models") {
    hub_.route("GET", "/api/" + kind + "/" + id + "/revision/main",
               [state = state](net::HttpRequest request) { return listing(state, std::move(request)); });
    cdn_.start();
    state->cdn_port = cdn_.port();
    hub_.start();
  }
  void set_prefix(const std::string& prefix) { prefix_ = prefix; }
  std::string endpoint() const { return "http://127.0.0.1:" + std::to_string(hub_.port()); }
  std::vector<Seen> seen() const {
    std::lock_guard lock(state->mutex);
    return state->seen;
  }
  std::size_t count(const std::string& method, const std::string& part) const {
    std::size_t n = 0;
    for (const Seen& s : seen()) n += s.method == method && s.path.find(part) != std::string::npos;
    return n;
  }

  StatePtr state = std::make_shared<HubState>();

 private:
  static net::HttpServer::Options options() {
    net::HttpServer::Options o;
    o.num_io_threads = 1;
    return o;
  }

  net::HttpServer hub_, cdn_;
  std::string prefix_ = "/org/tiny";
};

}  // namespace prl::io::testing_support
