#include "launch/rl_nodes.hpp"

#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "base/log.hpp"
#include "launch/engine_pools.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/orchestrator_setup.hpp"
#include "launch/rank_launch.hpp"
#include "launch/role_children.hpp"
#include "launch/run_identity.hpp"
#include "launch/run_spans.hpp"
#include "launch/step_console.hpp"
#include "launch/supervisor.hpp"
#include "launch/visible_gpus.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
using std::chrono::milliseconds;
namespace {

constexpr const char* kStartWord = "rl/start";  ///< of node 0: kBegins, kNothingToDo, or why it could not prepare the run
constexpr const char* kFailed = "rl/failed";    ///< the first failure of any node
constexpr const char* kAttempt = "rl/attempt";  ///< the folder of its logs
constexpr const char* kIdentity = "rl/identity";
constexpr const char* kBegins = "go";
constexpr const char* kNothingToDo = "nothing to do";
constexpr milliseconds kStartTime{3'600'000};  ///< node 0 downloads the model
constexpr milliseconds kLook{200};
/// For the roles of a node to end after the run has ended elsewhere.
constexpr milliseconds kGrace{20'000};

std::string done_key(int node) { return fmt::format("rl/done/{}", node); }

/// Looks at what the other nodes say: whether the run is over or has failed.
class RunWatch {
 public:
  RunWatch(const NodeMeeting& meeting, const RlNodes& nodes)
      : thread_([this, store = meeting.make_store(), nodes](std::stop_token end) { watch(*store, nodes, std::move(end)); }) {}

  /// Requested when this node's roles are to end.
  std::stop_token end() const { return end_.get_token(); }
  /// Requested when the ranks of some node have ended well.
  std::stop_token ranks_gone() const { return ranks_gone_.get_token(); }
  /// The failure of another node, after the thread has seen it.
  std::optional<std::string> failure() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
    return failure_;
  }

 private:
  void watch(comm::Store& store, const RlNodes& nodes, std::stop_token end) {
    try {
      while (!end.stop_requested()) {
        if (std::optional<std::string> failed = store.get(kFailed)) {
          failure_ = std::move(failed);
          break;
        }
        if (is_over(store, nodes)) break;
        std::this_thread::sleep_for(kLook);
      }
    } catch (const std::exception& error) {
      failure_ = fmt::format("node 0 is lost: {}", error.what());
    }
    end_.request_stop();
  }

  /// All nodes that end by themselves have. Ranks end together: once those of one node have, nobody can join them any more.
  bool is_over(comm::Store& store, const RlNodes& nodes) {
    int num_done = 0;
    for (int node = nodes.master(); node < nodes.size(); ++node) num_done += store.get(done_key(node)) ? 1 : 0;
    if (num_done > 0) ranks_gone_.request_stop();
    return num_done == nodes.num_train && store.get(done_key(nodes.orchestrator()));
  }

  std::stop_source end_, ranks_gone_;
  std::optional<std::string> failure_;
  std::jthread thread_;  ///< last: it uses the others
};

/// NAME.log, a link to the log of the role's first node.
void link_log(const fs::path& output_dir, const std::string& name) {
  const fs::path link = log_file(output_dir, fmt::format("{}.log", name));
  std::error_code ignored;
  if (fs::is_regular_file(fs::symlink_status(link, ignored))) return;
  fs::remove(link, ignored);
  fs::create_symlink(fs::path(name) / "node_0.log", link, ignored);
}

fs::path log_of(const fs::path& logs, int node, int number) {
  return logs / (number == 0 ? fmt::format("node_{}.log", node) : fmt::format("node_{}_rank_{}.log", node, number));
}

void start_engines(const config::RlConfig& config, const RlNodes& nodes, const NodeMeeting& meeting, const RoleChildren& roles,
                   Supervisor& supervisor) {
  const int node = meeting.place().rank;
  const bool uses_gpus = device_kind(config.inference->compute) == DeviceKind::kCuda;
  for (int number = 0; number < nodes.engines_per_node; ++number) {
    ChildSpec engine = roles.engine({.number = number,
                                     .first = node * nodes.engines_per_node,
                                     .num_here = nodes.engines_per_node,
                                     .host = meeting.host(),
                                     .name = fmt::format("inference_{}", node * nodes.engines_per_node + number),
                                     .log_file = log_of(log_file(config.output_dir, "inference"), node, number)});
    if (uses_gpus) engine.env["CUDA_VISIBLE_DEVICES"] = visible_devices_of(gpus_of_engine(*config.inference, number));
    supervisor.start(std::move(engine));
  }
  if (node == 0) link_log(config.output_dir, "inference");
}

void start_ranks(const config::RlConfig& config, const RlNodes& nodes, const NodeMeeting& meeting, const RoleChildren& roles,
                 Supervisor& supervisor) {
  RankLayout layout;
  layout.num_nodes = nodes.num_train;
  layout.node_rank = meeting.place().rank - nodes.master();
  layout.ranks_per_node = nodes.per_node;
  layout.store = meeting.address();
  layout.host = meeting.host();
  layout.uses_gpus = device_kind(config.trainer.compute) == DeviceKind::kCuda;
  layout.healing = config.trainer.healing;
  const fs::path logs = log_file(config.output_dir, "trainer");
  std::vector<ChildSpec> ranks = rank_children(layout, roles.trainer(), logs);
  for (std::size_t number = 0; number < ranks.size(); ++number) {
    ranks[number].log_file = log_of(logs, layout.node_rank, static_cast<int>(number));
    supervisor.start(std::move(ranks[number]));
  }
  if (layout.node_rank == 0) link_log(config.output_dir, "trainer");
}

/// Node 0 prepares the run for all; false if there is nothing to do.
bool begin(config::RlConfig& config, NodeMeeting& meeting, const std::function<bool(config::RlConfig&)>& prepare) {
  comm::Store& store = meeting.store();
  if (meeting.place().rank == 0) {
    try {
      const bool goes_on = prepare(config);
      store.set(kAttempt, log_folder(config.output_dir).filename().string());
      store.set(kIdentity, new_run_identity());
      store.set(kStartWord, goes_on ? kBegins : kNothingToDo);
      return goes_on;
    } catch (const std::exception& error) {
      store.set(kStartWord, std::string_view(error.what()).substr(0, 4096));
      throw;
    }
  }
  const std::string word = store.wait(kStartWord, kStartTime, "node 0");
  if (word != kBegins && word != kNothingToDo) fail(ErrorCode::kUnavailable, "[launch] node 0 could not prepare the run: {}", word);
  enter_attempt(config.output_dir, store.wait(kAttempt, kGrace, "node 0"));
  return word == kBegins;
}

int run_roles(const config::RlConfig& config, const RlNodes& nodes, NodeMeeting& meeting, std::stop_token stop) {
  const int node = meeting.place().rank;
  std::map<std::string, std::string> variables = identity_env(meeting.store().wait(kIdentity, kGrace, "node 0"), own_servers(config));
  if (config.trainer.trace_path) variables[kTraceVariable] = fs::absolute(*config.trainer.trace_path).string();
  const RoleChildren roles(config, std::move(variables));
  RunWatch watch(meeting, nodes);
  const fs::path metrics = config.output_dir / config.trainer.file_monitor.path;
  std::optional<StepConsole> steps;
  if (node == 0) steps.emplace(metrics, end_of_file(metrics), config.trainer.max_steps, orchestrator_resume_step(config.orchestrator));
  Supervisor supervisor;
  supervisor.set_others_gone(watch.ranks_gone());
  if (nodes.is_inference(node)) start_engines(config, nodes, meeting, roles, supervisor);
  if (node == nodes.orchestrator()) supervisor.start(roles.orchestrator());
  if (!nodes.is_inference(node)) start_ranks(config, nodes, meeting, roles, supervisor);
  const bool has_ends = !nodes.is_inference(node) || node == nodes.orchestrator();
  std::optional<std::string> failure = supervisor.run(stop, /*until_stopped=*/!has_ends, watch.end());
  const bool is_own_failure = failure.has_value() && !watch.end().stop_requested();
  if (is_own_failure) {
    log::error("rl: node {}: {}. Ending the roles of all nodes", node, *failure);
    meeting.store().set_once(kFailed, fmt::format("node {}: {}", node, *failure).substr(0, 4096));
  } else if (has_ends && !failure && !watch.end().stop_requested()) {
    meeting.store().set(done_key(node), "done");
    // Engines of this node serve the orchestrator until the run is over.
    if (nodes.is_inference(node)) (void)supervisor.run(stop, /*until_stopped=*/true, watch.end());
  }
  if (const auto elsewhere = watch.failure(); elsewhere && !is_own_failure) {
    log::error("rl: {}", *elsewhere);
    failure = elsewhere;
  }
  supervisor.terminate_all(kGrace);
  return failure ? 1 : 0;
}

}  // namespace

RlNodes::RlNodes(const config::RlConfig& config) {
  const auto& deployment = std::get<config::MultiNodeDeployment>(*config.deployment);
  num_infer = config.inference ? deployment.num_infer_nodes.value_or(1) : 0;
  num_train = deployment.num_train_nodes;
  per_node = deployment.gpus_per_node;
  if (config.inference) engines_per_node = config::num_engines_on(*config.inference, per_node);
  orchestrator_on_inference = deployment.orchestrator_on_inference;
}

config::RlConfig with_addresses(config::RlConfig config, const std::vector<std::string>& hosts) {
  const RlNodes nodes(config);
  PRL_CHECK(static_cast<int>(hosts.size()) == nodes.size(), "{} hosts for {} nodes", hosts.size(), nodes.size());
  const auto host_of = [&](int node) -> const std::string& { return hosts[static_cast<std::size_t>(node)]; };
  const auto in_url = [](const std::string& host) { return host.find(':') == std::string::npos ? host : fmt::format("[{}]", host); };
  if (config.inference) {
    std::vector<std::string>& urls = config.orchestrator.student.client.base_url;
    std::vector<std::string>& prefill_urls = config.orchestrator.prefill.base_url;
    urls.clear();
    prefill_urls.clear();
    const auto pools = pools_of(*config.inference, nodes.engines_per_node);
    for (int node = 0; node < nodes.num_infer; ++node)
      for (int number = 0; number < nodes.engines_per_node; ++number)
        (pools && pools->is_prefill(node * nodes.engines_per_node + number) ? prefill_urls : urls)
            .push_back(fmt::format("http://{}:{}/v1", in_url(host_of(node)), config.inference->server.port + number));
  }
  const auto set_store = [&](config::WeightBroadcast& broadcast) {
    if (auto* nccl = std::get_if<config::NcclBroadcast>(&broadcast)) nccl->host = host_of(nodes.master());
  };
  set_store(config.trainer.weight_broadcast);
  set_store(config.orchestrator.weight_broadcast);
  if (config.inference) set_store(config.inference->weight_broadcast);
  for (config::RolloutTransport* transport : {&config.trainer.rollout_transport, &config.orchestrator.rollout_transport})
    if (auto* zmq = std::get_if<config::ZmqRollouts>(transport)) zmq->host = host_of(nodes.orchestrator());
  return config;
}

int run_rl_node(const config::RlConfig& given, const NodePlace& place, const std::function<bool(config::RlConfig&)>& prepare,
                std::stop_token stop) {
  const RlNodes nodes(given);
  NodeMeeting meeting(place);
  if (!meeting.meet(stop)) return 0;
  config::RlConfig config = with_addresses(given, meeting.hosts());
  log::info("node {} of {} at {}: {}{}", place.rank, place.num_nodes, meeting.host(),
            nodes.is_inference(place.rank) ? "inference" : "trainer", place.rank == nodes.orchestrator() ? " and orchestrator" : "");
  // Emptied before any node begins, merged when all have left.
  const TraceOfProcesses trace(place.rank == 0 ? config.trainer.trace_path : std::nullopt);
  int status = 0;
  if (begin(config, meeting, prepare)) status = run_roles(config, nodes, meeting, stop);
  meeting.leave(stop);
  return status;
}

}  // namespace prl::launch
