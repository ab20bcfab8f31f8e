#include "launch/metric_services.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/files.hpp"
#include "base/log.hpp"
#include "launch/run_folder.hpp"
#include "net/http_client.hpp"
#include "net/http_server.hpp"

namespace prl::launch {
namespace {

constexpr std::chrono::seconds kHeartbeatTimeout{1};

}  // namespace

/// A GET request for each step of whoever calls note(), one after the other on a thread of its own.
class Heartbeat {
 public:
  explicit Heartbeat(std::string url) : url_(std::move(url)), thread_([this](const std::stop_token& stop) { beat(stop); }) {}

  void note() {
    std::lock_guard lock(mutex_);
    is_due_ = true;
    changed_.notify_all();
  }

 private:
  void beat(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    // A request that is due when the run ends is made all the same.
    while (changed_.wait(lock, stop, [this] { return is_due_; }) || is_due_) {
      is_due_ = false;
      lock.unlock();
      call();
      lock.lock();
    }
  }

  void call() {
    try {
      net::BlockingHttpClient client({});
      net::HttpCall call;
      call.url = url_;
      call.timeout = kHeartbeatTimeout;
      call.max_retries = 0;
      const net::HttpReply reply = client.call(std::move(call));
      if (reply.status != 200) log::warning("heartbeat: {} answered with status {}", url_, reply.status);
    } catch (const std::exception& error) {
      log::warning("heartbeat: {}", error.what());
    }
  }

  const std::string url_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool is_due_ = false;
  std::jthread thread_;
};

namespace {

class HeartbeatSink final : public monitor::Sink {
 public:
  explicit HeartbeatSink(std::shared_ptr<Heartbeat> heartbeat) : heartbeat_(std::move(heartbeat)) {}
  void write(const monitor::Row&) override { heartbeat_->note(); }
  void finish() override { heartbeat_.reset(); }

 private:
  std::shared_ptr<Heartbeat> heartbeat_;
};

struct Gauge {
  const char* name;
  const char* metric;
  const char* help;
};
constexpr Gauge kGauges[] = {
    {"trainer_loss", "loss/mean", "loss of the newest step"},
    {"trainer_throughput_tokens_per_sec", "perf/throughput", "tokens per second"},
    {"trainer_grad_norm", "optim/grad_norm", "L2 norm of all gradients before clipping"},
    {"trainer_peak_memory_gib", "perf/peak_memory", "most memory in use"},
    {"trainer_learning_rate", "optim/lr", "learning rate"},
    {"trainer_mfu_percent", "perf/mfu", "share of the measured peak"},
    {"trainer_entropy", "entropy/all/mean", "mean entropy of trained tokens in nats"},
    {"trainer_mismatch_kl", "mismatch_kl/all/mean", "mean mismatch between trainer and sampler"},
    {"trainer_kl_ent_ratio", "kl_ent_ratio/mean", "mismatch divided by entropy"},
};

}  // namespace

class MetricsServer {
 public:
  explicit MetricsServer(const config::MetricsServerConfig& config)
      : server_({.host = config.host, .port = config.port, .num_io_threads = 1, .max_connections = 64, .name = "trainer metrics"}) {
    server_.route("GET", "/metrics", [this](net::HttpRequest) -> net::asio::awaitable<net::HttpResponse> { co_return page(); });
    server_.route("GET", "/health",
                  [](net::HttpRequest) -> net::asio::awaitable<net::HttpResponse> { co_return net::HttpResponse::text("ok\n"); });
    server_.start();
    log::info("trainer metrics: http://{}:{}/metrics", config.host, server_.port());
  }
  ~MetricsServer() { server_.stop(std::chrono::milliseconds(0)); }
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  void put(const std::string& run, NewestStep newest) {
    std::lock_guard lock(mutex_);
    runs_[run] = std::move(newest);
  }
  void forget(const std::string& run) {
    std::lock_guard lock(mutex_);
    runs_.erase(run);
  }

 private:
  net::HttpResponse page() {
    std::lock_guard lock(mutex_);
    net::HttpResponse response = net::HttpResponse::text(trainer_gauges(runs_));
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    return response;
  }

  std::mutex mutex_;
  std::map<std::string, NewestStep> runs_;
  net::HttpServer server_;
};

namespace {

class MetricsServerSink final : public monitor::Sink {
 public:
  MetricsServerSink(std::shared_ptr<MetricsServer> server, std::string run) : server_(std::move(server)), run_(std::move(run)) {
    server_->put(run_, {});
  }
  ~MetricsServerSink() override { MetricsServerSink::finish(); }  // a run that failed before its first step is not finished
  void write(const monitor::Row& row) override { server_->put(run_, {row.step, row.unix_time, row.metrics}); }
  void finish() override {
    if (server_ != nullptr) server_->forget(run_);
    server_.reset();
  }

 private:
  std::shared_ptr<MetricsServer> server_;
  const std::string run_;
};

/// The label of a run; empty for a run without a name.
std::string label_of(const std::string& run) {
  if (run.empty()) return {};
  std::string text = "{run=\"";
  for (const char c : run) {
    if (c == '\n') {
      text += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + "\"}";
}

class BenchSink : public monitor::Sink {
 public:
  explicit BenchSink(std::shared_ptr<trainer::BenchTable> table) : table_(std::move(table)) {}
  void write(const monitor::Row& row) override {
    if (row.role == kOrchestratorRows) table_->add(row.step, row.metrics);
  }

 private:
  std::shared_ptr<trainer::BenchTable> table_;
};

}  // namespace

OrchestratorBench::OrchestratorBench(monitor::Monitor& monitor, const std::optional<config::BenchModeConfig>& config) {
  if (!config || !config->output_json) return;
  path_ = *config->output_json;
  table_ = std::make_shared<trainer::BenchTable>(0);
  monitor.add_sink(std::make_unique<BenchSink>(table_));
}

void OrchestratorBench::write() const {
  if (path_) write_file_atomic(*path_, table_->to_json());
}

std::string trainer_gauges(const std::map<std::string, NewestStep>& runs) {
  std::string text;
  const auto put = [&](const char* name, const char* help, const auto& value_of) {
    const std::size_t begin = text.size();
    for (const auto& [run, newest] : runs) {
      const std::optional<double> value = value_of(newest);
      if (!value) continue;
      if (text.size() == begin) text += fmt::format("# HELP {0} {1}\n# TYPE {0} gauge\n", name, help);
      const std::string number = std::isnan(*value)   ? "NaN"
                                 : std::isinf(*value) ? (*value > 0 ? "+Inf" : "-Inf")
                                                      : fmt::format("{}", *value);
      text += fmt::format("{}{} {}\n", name, label_of(run), number);
    }
  };
  using Value = std::optional<double>;
  put("trainer_step", "newest step", [](const NewestStep& newest) -> Value { return static_cast<double>(newest.step); });
  put("trainer_last_step_timestamp_seconds", "when it ended, in seconds since 1970",
      [](const NewestStep& newest) -> Value { return newest.unix_time; });
  for (const Gauge& gauge : kGauges)
    put(gauge.name, gauge.help, [&](const NewestStep& newest) -> Value {
      const auto it = newest.metrics.find(gauge.metric);
      return it == newest.metrics.end() ? Value() : it->second;
    });
  return text;
}

StepServices::StepServices(const std::optional<config::HeartbeatConfig>& heartbeat,
                           const std::optional<config::MetricsServerConfig>& metrics_server) {
  if (heartbeat && !heartbeat->url.empty()) heartbeat_ = std::make_shared<Heartbeat>(heartbeat->url);
  if (metrics_server) metrics_server_ = std::make_shared<MetricsServer>(*metrics_server);
}

void StepServices::follow(monitor::Monitor& monitor, const std::string& run) const {
  if (heartbeat_ != nullptr) monitor.add_sink(std::make_unique<HeartbeatSink>(heartbeat_));
  if (metrics_server_ != nullptr) monitor.add_sink(std::make_unique<MetricsServerSink>(metrics_server_, run));
}

void add_heartbeat(monitor::Monitor& monitor, const std::optional<config::HeartbeatConfig>& config) {
  StepServices(config, std::nullopt).follow(monitor);
}

void add_metrics_server(monitor::Monitor& monitor, const std::optional<config::MetricsServerConfig>& config) {
  StepServices(std::nullopt, config).follow(monitor);
}

}  // namespace prl::launch
