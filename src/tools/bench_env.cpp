#include "tools/bench_env.hpp"

#include <dirent.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "net/deadline.hpp"
#include "net/io_runtime.hpp"
#include "net/task_group.hpp"

namespace prl::tools {
namespace {

namespace asio = boost::asio;
namespace json = boost::json;

/// Arguments that fit a tool's schema: 1 for numbers, "a" for texts.
json::object arguments_for(const json::value& tool) {
  json::object arguments;
  boost::system::error_code ec;
  const json::value* properties = tool.find_pointer("/function/parameters/properties", ec);
  if (properties == nullptr || !properties->is_object()) return arguments;
  for (const auto& property : properties->get_object()) {
    const json::value* type = property.value().find_pointer("/type", ec);
    const std::string name = type != nullptr && type->is_string() ? std::string(type->get_string()) : "string";
    if (name == "integer" || name == "number")
      arguments[property.key()] = 1;
    else if (name == "boolean")
      arguments[property.key()] = true;
    else if (name == "array")
      arguments[property.key()] = json::array{};
    else
      arguments[property.key()] = "a";
  }
  return arguments;
}

std::int64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

class SteadyModel final : public env::ChatClient {
 public:
  /// `cpu_ns` counts what making the replies takes.
  SteadyModel(const BenchEnvOptions& options, std::atomic<std::int64_t>& cpu_ns) : options_(options), cpu_ns_(cpu_ns) {}

  asio::awaitable<env::ChatTurn> complete(const env::ChatRequest& request) override {
    if (options_.latency.count() > 0) co_await net::sleep_for(options_.latency);
    const std::int64_t begin = thread_cpu_ns();
    env::ChatTurn turn = reply_to(request);
    cpu_ns_ += thread_cpu_ns() - begin;
    co_return turn;
  }

 private:
  env::ChatTurn reply_to(const env::ChatRequest& request) {
    env::ChatTurn turn;
    turn.message = json::object{{"role", "assistant"}};
    const bool calls_tool = !request.tools.empty() && num_calls_++ == 0;
    if (calls_tool)
      turn.message["content"] = nullptr;
    else
      turn.message["content"] = json::string(static_cast<std::size_t>(options_.reply_chars), 'x');
    if (calls_tool) {
      boost::system::error_code ec;
      const json::value* name = request.tools.front().find_pointer("/function/name", ec);
      json::object function;
      function["name"] = name != nullptr ? *name : json::value("");
      function["arguments"] = json::serialize(arguments_for(request.tools.front()));
      json::object call{{"id", "call_1"}, {"type", "function"}};
      call["function"] = std::move(function);
      json::array calls;
      calls.push_back(std::move(call));
      turn.message["tool_calls"] = std::move(calls);
    }
    turn.finish_reason = calls_tool ? "tool_calls" : "stop";
    turn.num_prompt_tokens = 1;
    turn.num_completion_tokens = std::max<std::int64_t>(1, options_.reply_chars / 4);
    return turn;
  }

  const BenchEnvOptions& options_;
  std::atomic<std::int64_t>& cpu_ns_;
  int num_calls_ = 0;
};

struct Usage {
  double cpu_s = 0;
  double memory_mb = 0;
};

/// Processor time and resident memory of this process's children.
Usage usage_of_children() {
  Usage usage;
  const double tick = 1.0 / static_cast<double>(::sysconf(_SC_CLK_TCK));
  const double page_mb = static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), &::closedir);
  if (!folder) return usage;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    std::stringstream text;
    text << std::ifstream(std::string("/proc/") + entry->d_name + "/stat").rdbuf();
    const std::string line = text.str();
    const std::size_t end = line.rfind(')');  // of the program's name, which may hold anything
    if (end == std::string::npos) continue;
    std::istringstream fields(line.substr(end + 2));
    std::string field;
    std::vector<std::string> values;
    while (fields >> field) values.push_back(field);
    constexpr std::size_t kParent = 1, kUser = 11, kSystem = 12, kPages = 21;  // proc(5), counted from the state
    if (values.size() <= kPages || std::atoi(values[kParent].c_str()) != ::getpid()) continue;
    usage.cpu_s += tick * (std::atof(values[kUser].c_str()) + std::atof(values[kSystem].c_str()));
    usage.memory_mb += page_mb * std::atof(values[kPages].c_str());
  }
  return usage;
}

double own_cpu_s() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// What the coroutines of one measurement share.
struct Round {
  const BenchEnvOptions* options = nullptr;
  env::Split split = env::Split::kTrain;
  std::int64_t num_tasks = 0;
  std::int64_t num_rollouts = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> num_failed{0};
  std::atomic<std::int64_t> num_calls{0};
  std::atomic<std::int64_t> model_cpu_ns{0};
  std::mutex mutex;
  std::string failure;  ///< the last one; guarded by mutex
};

asio::awaitable<void> play_some(Round* round) {
  const BenchEnvOptions& options = *round->options;
  for (std::int64_t i = round->next++; i < round->num_rollouts; i = round->next++) {
    SteadyModel model(options, round->model_cpu_ns);
    env::RolloutContext context;
    context.client = &model;
    context.open_conversation = [round](const std::string&) { return std::make_unique<SteadyModel>(*round->options, round->model_cpu_ns); };
    context.trajectory_id = fmt::format("bench-{}", i);
    context.group_id = context.trajectory_id;
    context.seed = static_cast<std::uint64_t>(i);
    context.deadline = net::Clock::now() + options.limit;
    auto fetching = options.environment->fetch_task(round->split, i % round->num_tasks);
    env::Task task = co_await std::move(fetching);
    auto running = options.environment->run(std::move(task), std::move(context));
    std::vector<env::Episode> group(1);
    group[0] = co_await std::move(running);
    if (options.environment->scores_groups()) {
      auto scoring = options.environment->score_group(group);
      co_await std::move(scoring);
    }
    round->num_calls += group[0].num_turns();
    if (!group[0].error) continue;
    ++round->num_failed;
    std::lock_guard lock(round->mutex);
    round->failure = group[0].error->type + ": " + group[0].error->message;
  }
}

void play(Round& round) {
  net::IoRuntime io(1, "bench");
  net::TaskGroup group(io.executor(), "bench");
  for (std::int64_t i = 0; i < std::min(round.options->num_at_once, round.num_rollouts); ++i) group.spawn("rollouts", play_some(&round));
  if (!group.join_blocking(round.options->limit))
    fail(ErrorCode::kDeadline, "the benchmark did not end in {} s", round.options->limit.count() / 1000);
}

}  // namespace

std::string bench_environment(const BenchEnvOptions& options) {
  options.environment->prepare();
  Round warm;
  warm.options = &options;
  warm.num_rollouts = options.num_warm;
  warm.num_tasks = options.environment->num_tasks(warm.split);
  if (warm.num_tasks == 0) {
    warm.split = env::Split::kEval;
    warm.num_tasks = options.environment->num_tasks(warm.split);
  }
  if (warm.num_tasks == 0) fail(ErrorCode::kInvalidArgument, "environment {} has no tasks", options.environment->name());
  play(warm);
  Round round;
  round.options = &options;
  round.split = warm.split;
  round.num_tasks = warm.num_tasks;
  round.num_rollouts = options.num_rollouts;
  const Usage before = usage_of_children();
  const double own_before = own_cpu_s();
  const auto begin = std::chrono::steady_clock::now();
  play(round);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const double own = own_cpu_s() - own_before;  // looking for the workers takes some of it
  const Usage after = usage_of_children();
  const auto count = static_cast<double>(options.num_rollouts);
  json::object out;
  out["environment"] = options.environment->name();
  out["rollouts"] = options.num_rollouts;
  out["at_once"] = options.num_at_once;
  out["seconds"] = seconds;
  out["rollouts_per_s"] = count / seconds;
  out["calls_per_rollout"] = static_cast<double>(round.num_calls.load()) / count;
  // What stands in for the model is part of `here`.
  out["cpu_ms_per_rollout"] = json::object{{"here", 1e3 * own / count},
                                           {"stand_in_model", 1e-6 * static_cast<double>(round.model_cpu_ns.load()) / count},
                                           {"workers", 1e3 * (after.cpu_s - before.cpu_s) / count}};
  out["memory_mb_of_workers"] = after.memory_mb;
  out["failed"] = round.num_failed.load();
  if (!round.failure.empty()) out["last_failure"] = round.failure;
  return json::serialize(out);
}

}  // namespace prl::tools
