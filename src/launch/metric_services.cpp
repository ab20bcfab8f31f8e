#include "launch/metric_services.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <exception>
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

class HeartbeatSink final : public monitor::Sink {
 public:
  explicit HeartbeatSink(std::string url) : url_(std::move(url)), thread_([this](const std::stop_token& stop) { beat(stop); }) {}

  void write(const monitor::Row&) override {
    std::lock_guard lock(mutex_);
    is_due_ = true;
    changed_.notify_all();
  }
  void finish() override {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
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

class MetricsServerSink final : public monitor::Sink {
 public:
  explicit MetricsServerSink(const config::MetricsServerConfig& config)
      : server_({.host = config.host, .port = config.port, .num_io_threads = 1, .max_connections = 64, .name = "trainer metrics"}) {
    server_.route("GET", "/metrics", [this](net::HttpRequest) -> net::asio::awaitable<net::HttpResponse> { co_return page(); });
    server_.route("GET", "/health",
                  [](net::HttpRequest) -> net::asio::awaitable<net::HttpResponse> { co_return net::HttpResponse::text("ok\n"); });
    server_.start();
    log::info("trainer metrics: http://{}:{}/metrics", config.host, server_.port());
  }

  void write(const monitor::Row& row) override {
    std::string text = trainer_gauges(row.step, row.unix_time, row.metrics);
    std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  void finish() override { server_.stop(std::chrono::milliseconds(0)); }

 private:
  net::HttpResponse page() {
    std::lock_guard lock(mutex_);
    net::HttpResponse response = net::HttpResponse::text(text_);
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    return response;
  }

  std::mutex mutex_;
  std::string text_ = trainer_gauges(0, 0, {});
  net::HttpServer server_;
};

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

std::string trainer_gauges(std::int64_t step, double unix_time, const monitor::Metrics& metrics) {
  std::string text;
  const auto put = [&](const char* name, const char* help, double value) {
    const std::string number = std::isnan(value) ? "NaN" : std::isinf(value) ? (value > 0 ? "+Inf" : "-Inf") : fmt::format("{}", value);
    text += fmt::format("# HELP {0} {1}\n# TYPE {0} gauge\n{0} {2}\n", name, help, number);
  };
  put("trainer_step", "newest step", static_cast<double>(step));
  put("trainer_last_step_timestamp_seconds", "when it ended, in seconds since 1970", unix_time);
  for (const Gauge& gauge : kGauges)
    if (const auto it = metrics.find(gauge.metric); it != metrics.end()) put(gauge.name, gauge.help, it->second);
  return text;
}

void add_heartbeat(monitor::Monitor& monitor, const std::optional<config::HeartbeatConfig>& config) {
  if (config && !config->url.empty()) monitor.add_sink(std::make_unique<HeartbeatSink>(config->url));
}

void add_metrics_server(monitor::Monitor& monitor, const std::optional<config::MetricsServerConfig>& config) {
  if (config) monitor.add_sink(std::make_unique<MetricsServerSink>(*config));
}

}  // namespace prl::launch
