#include "env/python/server.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <boost/json/object.hpp>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "env/python/private_folder.hpp"
#include "env/python/setup.hpp"
#include "env/python/worker_log.hpp"
#include "net/port_owner.hpp"

namespace prl::env::python {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// One worker that listens, and the next one after its end.
class Listener {
 public:
  Listener(ChildOptions child, WorkerLog& log, std::string name) : child_(std::move(child)), log_(&log), name_(std::move(name)) {}
  ~Listener() {
    if (output_ >= 0) ::close(output_);
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  void step() {
    if (!process_ && Clock::now() >= due_) {
      std::filesystem::create_directories(child_.folder);
      process_ = std::make_unique<ChildProcess>(ChildProcess::start(child_));
      output_ = process_->release_output();
      ::fcntl(output_, F_SETFL, O_NONBLOCK);
      started_ = Clock::now();
    }
    if (!process_) return;
    read_output();
    const auto status = process_->status();
    if (!status) return;
    read_output();
    log::info("{} {}", name_, describe_status(*status));
    ::close(std::exchange(output_, -1));
    process_.reset();
    // One that cannot even listen would be started again and again.
    due_ = Clock::now() + (Clock::now() - started_ < 5s ? 5s : 0s);
  }

 private:
  void read_output() {
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(output_, buffer, sizeof buffer)) > 0;)
      for (const char c : std::string_view(buffer, static_cast<std::size_t>(got))) {
        if (c != '\n') {
          if (line_.size() < (16 << 10)) line_ += c;
          continue;
        }
        if (line_.starts_with("listening on ")) log::info("{}: {}", name_, line_);
        log_->write(name_, std::exchange(line_, {}));
      }
  }

  ChildOptions child_;
  WorkerLog* log_;
  std::string name_;
  std::unique_ptr<ChildProcess> process_;
  int output_ = -1;
  std::string line_;
  Clock::time_point started_;
  Clock::time_point due_;
};

/// "::1" of "[::1]".
std::string without_brackets(const std::string& host) {
  return host.starts_with('[') && host.ends_with(']') ? host.substr(1, host.size() - 2) : host;
}

/// Runs say nothing about folders to workers elsewhere: modules are looked for in those of the server.
void add_paths(const boost::json::object& load, std::vector<std::string>& variables) {
  constexpr std::string_view kName = "PYTHONPATH=";
  const boost::json::value* const paths = load.if_contains("paths");
  if (paths == nullptr) return;
  std::string all(kName);
  for (const boost::json::value& path : paths->as_array()) all += std::string(path.as_string()) + ":";
  for (std::string& variable : variables)
    if (variable.starts_with(kName)) variable = all + variable.substr(kName.size());
}

}  // namespace

void serve(const ServerOptions& options, std::stop_token stop) {
  const std::size_t colon = options.address.rfind(':');
  const int port = colon == std::string::npos ? 0 : std::atoi(options.address.c_str() + colon + 1);
  if (port <= 0 || port + options.num_workers > 65'536)
    fail(ErrorCode::kInvalidArgument, "address = {}: wanted host:port with room for {} ports", options.address, options.num_workers);
  PythonSettings settings = options.settings;
  settings.sandbox = false;  // it listens
  settings.pass_env.emplace_back("PRL_ENV_TOKEN");
  const char* token = std::getenv("PRL_ENV_TOKEN");
  if (token == nullptr || *token == '\0') {
    if (!is_loopback(options.address.substr(0, colon)))
      fail(ErrorCode::kInvalidArgument,
           "address = {}: other machines reach it, and whoever does can run the environment: set PRL_ENV_TOKEN to the same secret here and "
           "in the run, or listen on 127.0.0.1",
           options.address);
    log::warning("PRL_ENV_TOKEN is not set: every user of this machine can run the environment at {}", options.address);
    settings.pass_env.pop_back();
  }
  // A worker would say it in its own log alone, again and again.
  for (int i = 0; i < options.num_workers; ++i) net::require_free_port(without_brackets(options.address.substr(0, colon)), port + i);
  const PythonOptions plan = plan_environment(options.id, short_name(options.id), {}, settings);
  WorkerLog log(plan.pool.log_file);
  // Python looks for modules in the folder that a worker starts in, so it is none in which others may write.
  const PrivateFolder folder;
  std::vector<std::unique_ptr<Listener>> listeners;
  for (int i = 0; i < options.num_workers; ++i) {
    ChildOptions child{.name = fmt::format("worker {}", i),
                       .argv = plan.pool.argv,
                       .env = plan.pool.env,
                       .folder = folder.path() / std::to_string(i),
                       .limits = plan.pool.limits};
    add_paths(plan.pool.load, child.env);
    child.env.push_back("PRL_TMPDIR=" + child.folder.string());
    child.argv = {plan.pool.argv[0], "-m", "prl_worker", "--listen", fmt::format("{}:{}", options.address.substr(0, colon), port + i)};
    listeners.push_back(std::make_unique<Listener>(std::move(child), log, fmt::format("worker {}", i)));
  }
  while (!stop.stop_requested()) {
    for (auto& listener : listeners) listener->step();
    std::this_thread::sleep_for(100ms);
  }
}

}  // namespace prl::env::python
