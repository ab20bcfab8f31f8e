#include "dashboard/page_server.hpp"

#include <fmt/core.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#include <boost/asio/post.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/utf8.hpp"
#include "dashboard/assets.hpp"
#include "dashboard/plan_view.hpp"
#include "dashboard/query.hpp"
#include "dashboard/run_view.hpp"
#include "net/http_server.hpp"
#include "net/request_guard.hpp"
#include "net/signal.hpp"
#include "net/worker_pool.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
using net::HttpRequest;
using net::HttpResponse;
namespace {

using Clock = std::chrono::steady_clock;
/// Between two looks at the files, and at least between two pieces of news: rows that come meanwhile are one message.
constexpr auto kRound = std::chrono::milliseconds(500);
/// Rollouts are looked for in every so many-th of these rounds: lists of them are refreshed every two seconds.
constexpr int kRolloutRounds = 4;
constexpr const char* kThreadName = "page";
/// Without a request for so long the files are left alone; open event streams count as requests.
constexpr auto kIdle = std::chrono::seconds(30);
constexpr auto kAnswerTime = std::chrono::seconds(30);
constexpr auto kFirstRoundTime = std::chrono::milliseconds(1500);
constexpr auto kKeepAlive = std::chrono::seconds(15);
constexpr int kMaxEventStreams = 64;
/// Answers that are kept for other pages, and the longest that is.
constexpr std::size_t kMaxKeptAnswers = 16, kMaxKeptAnswerBytes = std::size_t{2} << 20;
constexpr std::uint64_t kRawPieceBytes = std::uint64_t{256} << 10;

/// The calling thread gives way to others; its name tells what it is in `top -H`. A system that refuses only makes it as important as they
/// are.
void become_page_thread(int niceness) {
  (void)::pthread_setname_np(::pthread_self(), kThreadName);
  if (niceness > 0) (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), ::getpriority(PRIO_PROCESS, 0) + niceness);
}

net::asio::awaitable<HttpResponse> serve(const Asset* asset) {
  HttpResponse response = HttpResponse::text(std::string(asset->bytes));
  response.content_type = asset->content_type;
  co_return response;
}

net::Fields page_headers() {
  // No script, style or connection but our own; nothing frames the page, and no rollout's link leaks where it was shown.
  return {{"Content-Security-Policy",
           "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
           "form-action 'none'; frame-ancestors 'none'"},
          {"X-Content-Type-Options", "nosniff"},
          {"Referrer-Policy", "no-referrer"},
          {"Cross-Origin-Resource-Policy", "same-origin"},
          {"Cache-Control", "no-store"}};
}

/// Names that tell the runs apart: the last part of the path, with more of it where that is not enough.
std::vector<std::string> names_of(const std::vector<fs::path>& folders) {
  std::vector<std::string> names;
  for (const fs::path& folder : folders) {
    const fs::path whole = fs::absolute(folder).lexically_normal();
    const fs::path path = whole.has_filename() ? whole : whole.parent_path();
    std::string name = path.filename().string();
    for (const fs::path& other : folders)
      if (&other != &folder && fs::absolute(other).lexically_normal().filename() == path.filename())
        name = (path.parent_path().filename() / path.filename()).string();
    for (int n = 2; std::find(names.begin(), names.end(), name) != names.end(); ++n) name = fmt::format("{} ({})", path.string(), n);
    names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

struct PageServer::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(Options given) : options(std::move(given)), workers({2, 64, kThreadName, options.niceness}) {
    const std::vector<std::string> names = names_of(options.runs);
    for (std::size_t i = 0; i < options.runs.size(); ++i) runs.push_back(std::make_unique<RunView>(options.runs[i], names[i]));
  }

  const Options options;
  std::vector<std::unique_ptr<RunView>> runs;
  net::WorkerPool workers;
  std::unique_ptr<net::HttpServer> http;
  std::thread reader;
  std::mutex mutex;
  std::condition_variable changed;  ///< somebody asked, a round ended, or stop
  bool is_stopping = false;
  bool is_idle = false;       ///< the reader waits for somebody to ask
  bool is_caught_up = false;  ///< the metrics that were there when the reader woke up have been read
  Clock::time_point last_request{};
  std::map<const void*, net::Signal> followers;  ///< of the event streams: told when a round brought something
  std::atomic<int> num_streams{0};
  std::mutex control_mutex;  ///< one order at a time

  struct KeptAnswer {
    Clock::time_point asked;
    std::mutex mutex;  ///< held while the text is made: who asks the same meanwhile waits for it
    std::optional<std::string> text;
  };
  /// What a round brought, for all pages that had seen the same before it.
  struct News {
    std::vector<RunView::Version> before, after;
    std::string text;
  };
  std::mutex kept_mutex;
  std::map<std::string, std::shared_ptr<KeptAnswer>> kept;  ///< by path, query and versions of the runs
  News news;

  void read_runs();
  void tell_followers(std::vector<RunView::Version>& told, Clock::time_point& told_at);
  std::vector<RunView::Version> versions() const;
  /// True if a run has more to read.
  bool read_each(RunView::Part part);
  void touch();
  void wait_for_first_round();
  RunView& run_of(const Query& query);
  std::string runs_json();
  /// What `make` gives, or what it gave another page for the same question in the last half second while no run changed: ten pages at the
  /// same view cost what one does.
  std::string shared_answer(const std::string& path, const net::Fields& fields,
                            const std::function<std::string(Impl&, const Query&)>& make);
  std::string news_since(std::vector<RunView::Version>& seen);
  net::asio::awaitable<HttpResponse> answer(HttpRequest request, std::function<std::string(Impl&, const Query&)> make);
  net::asio::awaitable<HttpResponse> events(HttpRequest request);
  net::asio::awaitable<HttpResponse> raw(HttpRequest request);
  void add_control_routes(net::RequestGuard& guard);
  void add_routes();
};

/// The thread that reads files: rounds of bounded length while somebody looks, none otherwise.
void PageServer::Impl::read_runs() {
  log::set_thread_role(kThreadName);
  become_page_thread(options.niceness);
  std::vector<RunView::Version> told = versions();
  Clock::time_point told_at{};
  bool has_more_rollouts = false;
  int round = 0;
  std::unique_lock lock(mutex);
  while (!is_stopping) {
    const auto is_looked_at = [&] { return !followers.empty() || last_request + kIdle >= Clock::now(); };
    if (!is_looked_at()) {
      is_caught_up = false;
      is_idle = true;
      changed.wait(lock, [&] { return is_stopping || is_looked_at(); });
      is_idle = false;
      round = 0;
      continue;
    }
    lock.unlock();
    // Curves are what is looked at first: nobody waits for the rollouts of a large run, of which a first piece is read.
    const bool has_more_metrics = read_each(RunView::Part::kMetrics);
    if (has_more_rollouts || round++ % kRolloutRounds == 0) has_more_rollouts = read_each(RunView::Part::kRollouts);
    tell_followers(told, told_at);
    lock.lock();
    if (!has_more_metrics) is_caught_up = true;
    changed.notify_all();
    if (!has_more_metrics && !has_more_rollouts) changed.wait_for(lock, kRound, [&] { return is_stopping; });
  }
}

std::vector<RunView::Version> PageServer::Impl::versions() const {
  std::vector<RunView::Version> out;
  for (const auto& run : runs) out.push_back(run->version());
  return out;
}

/// Wakes the event streams if something changed since they were told last, which is not just now: a file that is being caught up with
/// changes in every round, and the next one comes soon.
void PageServer::Impl::tell_followers(std::vector<RunView::Version>& told, Clock::time_point& told_at) {
  constexpr auto kLeast = kRound * 4 / 5;
  if (Clock::now() - told_at < kLeast) return;
  std::vector<RunView::Version> now = versions();
  if (now == told) return;
  told = std::move(now);
  told_at = Clock::now();
  std::lock_guard lock(mutex);
  for (const auto& [stream, signal] : followers) signal.notify();
}

bool PageServer::Impl::read_each(RunView::Part part) {
  bool has_more = false;
  for (const auto& run : runs) {
    try {
      has_more |= run->refresh(part);
    } catch (const std::exception& error) {
      log::warning("the page cannot read {}: {}", run->folder().string(), error.what());
    }
  }
  return has_more;
}

void PageServer::Impl::touch() {
  std::lock_guard lock(mutex);
  last_request = Clock::now();
  if (is_idle) changed.notify_all();
}

/// A first answer shows what there is, not an empty run; large runs are shown while they are read.
void PageServer::Impl::wait_for_first_round() {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, kFirstRoundTime, [&] { return is_stopping || is_caught_up; });
}

RunView& PageServer::Impl::run_of(const Query& query) {
  const auto number = query.integer("run", 0, static_cast<std::int64_t>(runs.size()) - 1).value_or(0);
  if (runs.empty()) fail(ErrorCode::kNotFound, "there is no run");
  return *runs[static_cast<std::size_t>(number)];
}

std::string PageServer::Impl::runs_json() {
  wait_for_first_round();
  std::string out = "{\"runs\":[";
  for (const auto& run : runs) {
    if (out.back() != '[') out += ',';
    out += run->summary();
  }
  return out + "]}";
}

net::asio::awaitable<HttpResponse> PageServer::Impl::answer(HttpRequest request, std::function<std::string(Impl&, const Query&)> make) {
  touch();
  auto work = [self = shared_from_this(), fields = request.query, make = std::move(make)] {
    std::string body = make(*self, Query(fields));
    // Files hold what models and environments wrote, bytes that are no text too; JSON is UTF-8.
    return is_valid_utf8(body) ? body : replace_invalid_utf8(body);
  };
  std::string what = "an answer for the page";
  co_return HttpResponse::json(co_await workers.run(std::move(work), kAnswerTime, std::move(what)));
}

std::string PageServer::Impl::shared_answer(const std::string& path, const net::Fields& fields,
                                            const std::function<std::string(Impl&, const Query&)>& make) {
  std::string key = path;
  for (const auto& [name, value] : fields) key += fmt::format("\n{}={}", name, value);
  for (const RunView::Version& version : versions()) key += fmt::format("\n{} {} {}", version.generation, version.rows, version.rollouts);
  std::shared_ptr<KeptAnswer> answer;
  {
    std::lock_guard lock(kept_mutex);
    // By the time of the question: files that are read for the answer may change meanwhile.
    const Clock::time_point now = Clock::now();
    std::erase_if(kept, [&](const auto& one) { return now - one.second->asked >= kRound; });
    const auto at = kept.find(key);
    answer = at != kept.end() ? at->second : std::make_shared<KeptAnswer>();
    if (at == kept.end()) answer->asked = now;
    if (at == kept.end() && kept.size() < kMaxKeptAnswers) kept.emplace(std::move(key), answer);
  }
  std::lock_guard lock(answer->mutex);
  if (answer->text) return *answer->text;
  std::string text = make(*this, Query(fields));  // after an error whoever comes next tries again
  if (text.size() <= kMaxKeptAnswerBytes) answer->text = text;
  return text;
}

/// One event per run that changed: its new rows, or that everything must be fetched again. Empty if nothing changed. Made once for all
/// pages that have seen the same.
std::string PageServer::Impl::news_since(std::vector<RunView::Version>& seen) {
  const std::vector<RunView::Version> now = versions();
  if (now == seen) return {};
  {
    std::lock_guard lock(kept_mutex);
    if (news.before == seen && news.after == now) {
      seen = now;
      return news.text;
    }
  }
  const std::vector<RunView::Version> before = seen;
  std::string out;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (now[i] == seen[i]) continue;
    const auto rows = now[i].generation == seen[i].generation ? runs[i]->rows_after(seen[i].rows) : std::nullopt;
    std::string event = fmt::format("{{\"run\":{},\"generation\":{},\"rollouts\":{},\"last_row\":{}", i, now[i].generation, now[i].rollouts,
                                    rows && !rows->empty() ? rows->back().number : now[i].rows);
    seen[i] = now[i];
    if (rows) {
      event += ",\"rows\":[";
      for (const SeriesStore::KeptRow& row : *rows) {
        if (event.back() != '[') event += ',';
        event += row.text;
      }
      event += ']';
      if (!rows->empty()) seen[i].rows = rows->back().number;
    } else {
      event += ",\"reset\":true";
    }
    out += "data: " + event + "}\n\n";
  }
  std::lock_guard lock(kept_mutex);
  news = {.before = before, .after = seen, .text = out};
  return out;
}

net::asio::awaitable<HttpResponse> PageServer::Impl::events(HttpRequest request) {
  if (num_streams.fetch_add(1) >= kMaxEventStreams) {
    --num_streams;
    throw net::HttpError(503, ErrorCode::kOverloaded, fmt::format("{} pages follow these runs already", kMaxEventStreams));
  }
  const net::Signal told;
  struct Follow {
    Impl& impl;
    Follow(Impl& owner, const net::Signal& signal) : impl(owner) {
      impl.touch();
      std::lock_guard lock(impl.mutex);
      impl.followers.emplace(this, signal);
    }
    Follow(const Follow&) = delete;
    Follow& operator=(const Follow&) = delete;
    ~Follow() {
      --impl.num_streams;
      impl.touch();
      std::lock_guard lock(impl.mutex);
      impl.followers.erase(this);
    }
  } const follow(*this, told);
  std::vector<RunView::Version> seen = versions();
  net::Fields headers;
  co_await request.stream->start(200, "text/event-stream", headers);
  std::string hello = "retry: 1000\n: hello\n\n";
  co_await request.stream->write(std::move(hello));
  Clock::time_point last_write = Clock::now();
  while (true) {
    std::string text = news_since(seen);
    if (text.empty()) {
      const bool has_news = co_await told.wait_until(last_write + kKeepAlive);
      if (has_news) continue;
      text = ": alive\n\n";
    }
    last_write = Clock::now();
    co_await request.stream->write(std::move(text));
  }
}

/// The line of a rollout as it is in the file, as a download: a browser never shows it as a page.
net::asio::awaitable<HttpResponse> PageServer::Impl::raw(HttpRequest request) {
  touch();
  auto looking = [self = shared_from_this(), fields = request.query] {
    const Query query(fields);
    return self->run_of(query).raw_line(query);
  };
  std::string wanted = "the place of a rollout";
  const RunView::RawLine line = co_await workers.run(std::move(looking), kAnswerTime, std::move(wanted));
  const net::Fields headers{{"Content-Disposition", "attachment; filename=\"rollout.json\""}};
  for (std::uint64_t at = 0; at < line.num_bytes; at += kRawPieceBytes) {
    auto work = [path = line.path, from = line.offset + at, size = std::min(kRawPieceBytes, line.num_bytes - at)] {
      return read_range(path, from, size);
    };
    std::string what = "a piece of a rollout";
    std::string piece = co_await workers.run(std::move(work), kAnswerTime, std::move(what));
    // A file that is gone is an error of its own only while the reply has not begun.
    if (at == 0) co_await request.stream->start(200, "application/octet-stream", headers);
    if (piece.empty()) break;
    co_await request.stream->write(std::move(piece));
  }
  co_await request.stream->finish();
  co_return HttpResponse::streamed();
}

void PageServer::Impl::add_control_routes(net::RequestGuard& guard) {
  guard.add_route("GET", "/api/control", net::Access::kApiKey);
  http->route("GET", "/api/control", [self = this](HttpRequest request) {
    return self->answer(std::move(request), [](Impl& impl, const Query&) {
      const auto& control = impl.options.control;
      return fmt::format("{{\"is_enabled\":{},\"is_paused\":{}}}", control.has_value(), control && control->is_paused());
    });
  });
  if (!options.control) return;
  const Control& control = *options.control;
  const std::pair<const char*, std::function<void()>> orders[] = {{"pause", [&control] { control.set_paused(true); }},
                                                                  {"resume", [&control] { control.set_paused(false); }},
                                                                  {"checkpoint", control.save},
                                                                  {"stop", control.stop}};
  for (const auto& [name, act] : orders) {
    const std::string path = std::string("/api/control/") + name;
    guard.add_route("POST", path, net::Access::kAdminKey);
    http->route("POST", path, [self = this, act = act, name = std::string(name)](HttpRequest request) {
      return self->answer(std::move(request), [act, name](Impl& impl, const Query&) {
        const std::lock_guard lock(impl.control_mutex);
        log::warning("the page asks for: {}", name);
        act();
        return std::string("{}");
      });
    });
  }
}

void PageServer::Impl::add_routes() {
  net::RequestGuard guard({.admin_api_key = options.control ? options.control->key : std::string(),
                           .host = options.host,
                           .origin_advice = "",
                           .host_advice = "; open it by its address or as localhost"});
  add_control_routes(guard);
  for (const Asset& asset : assets()) {
    // The page holds nothing of a run, and links to it from other pages must work.
    guard.add_route("GET", std::string(asset.path), net::Access::kOpen);
    http->route("GET", std::string(asset.path), [&asset](HttpRequest) { return serve(&asset); });
  }
  const auto api = [&](const char* name, std::function<std::string(Impl&, const Query&)> make) {
    const std::string path = std::string("/api/") + name;
    guard.add_route("GET", path, net::Access::kApiKey);
    http->route("GET", path, [self = this, make](HttpRequest request) { return self->answer(std::move(request), make); });
  };
  /// Of views that stay open and ask again with each event.
  const auto shared = [&](const char* name, const std::function<std::string(Impl&, const Query&)>& make) {
    const std::string path = std::string("/api/") + name;
    guard.add_route("GET", path, net::Access::kApiKey);
    http->route("GET", path, [self = this, path, make](HttpRequest request) {
      net::Fields fields = request.query;
      return self->answer(std::move(request), [path, fields = std::move(fields), make](Impl& impl, const Query&) {
        return impl.shared_answer(path, fields, make);
      });
    });
  };
  api("runs", [](Impl& self, const Query&) { return self.runs_json(); });
  shared("series", [](Impl& self, const Query& q) { return self.run_of(q).series(); });
  shared("metrics", [](Impl& self, const Query& q) { return self.run_of(q).metrics(q); });
  shared("timeline", [](Impl& self, const Query& q) { return self.run_of(q).timeline(q); });
  shared("rollouts", [](Impl& self, const Query& q) { return self.run_of(q).rollouts(q); });
  api("rollout", [](Impl& self, const Query& q) { return self.run_of(q).rollout(q); });
  api("tokens", [](Impl& self, const Query& q) { return self.run_of(q).tokens(q); });
  api("evals", [](Impl& self, const Query& q) { return self.run_of(q).evals(); });
  api("config", [](Impl& self, const Query& q) { return self.run_of(q).config(); });
  shared("logs", [](Impl& self, const Query& q) { return self.run_of(q).logs(q); });
  api("memory", [](Impl& self, const Query& q) { return plans_json(self.run_of(q).folder() / "memory"); });
  api("proofs", [](Impl& self, const Query& q) { return self.run_of(q).proofs(); });
  guard.add_route("GET", "/api/raw", net::Access::kApiKey);
  http->route("GET", "/api/raw", [self = this](HttpRequest request) { return self->raw(std::move(request)); });
  guard.add_route("GET", "/api/events", net::Access::kApiKey);
  http->route("GET", "/api/events", [self = this](HttpRequest request) { return self->events(std::move(request)); });
  http->set_gate(std::move(guard));
}

PageServer::PageServer(Options options) : impl_(std::make_shared<Impl>(std::move(options))) {
  net::HttpServer::Options http;
  http.host = impl_->options.host;
  http.port = impl_->options.port;
  http.num_io_threads = 1;
  http.backlog = 128;
  http.max_connections = 256;
  http.max_body_bytes = 1024;
  http.max_held_body_bytes = 64 * 1024;
  http.name = "page";
  http.headers = page_headers();
  impl_->http = std::make_unique<net::HttpServer>(std::move(http));
  impl_->add_routes();
}

PageServer::~PageServer() { stop(); }

void PageServer::start() {
  impl_->http->start();
  net::asio::post(impl_->http->executor(), [niceness = impl_->options.niceness] { become_page_thread(niceness); });  // there is one
  impl_->reader = std::thread([impl = impl_.get()] { impl->read_runs(); });
}

int PageServer::port() const noexcept { return impl_->http->port(); }

std::string PageServer::url() const {
  const std::string& host = impl_->options.host;
  const std::string shown = host == "0.0.0.0" || host.empty() ? "127.0.0.1" : host.find(':') != std::string::npos ? "[" + host + "]" : host;
  return fmt::format("http://{}:{}/", shown, port());
}

void PageServer::stop() {
  impl_->http->stop(std::chrono::milliseconds(0));
  {
    std::lock_guard lock(impl_->mutex);
    impl_->is_stopping = true;
    impl_->changed.notify_all();
  }
  if (impl_->reader.joinable()) impl_->reader.join();
  impl_->workers.stop();
}

}  // namespace prl::dashboard
