#include "launch/node_agent.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/format.h>

#include <charconv>
#include <memory>
#include <optional>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/store.hpp"
#include "launch/rank_launch.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

/// For the other nodes to come, as batch systems start them one after another.
constexpr std::chrono::milliseconds kMeetingTime{600'000};
/// Node 0 keeps the store open for as long after its own ranks have ended.
constexpr std::chrono::milliseconds kLeavingTime{60'000};

struct Endpoint {
  std::string host;
  int port = 0;
};

Endpoint parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  Endpoint endpoint;
  const char* end = text.data() + text.size();
  if (colon != std::string::npos && colon > 0) {
    endpoint.host = text.substr(0, colon);
    if (endpoint.host.size() > 2 && endpoint.host.front() == '[') endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
    const auto [at, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
    if (error == std::errc() && at == end && endpoint.port > 0 && endpoint.port < 65536) return endpoint;
  }
  fail(ErrorCode::kInvalidArgument, "[rdzv_endpoint] is '{}', wanted host:port", text);
}

/// The address of this machine that packets to `endpoint` leave from; nothing is sent.
std::string own_address(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (const int error = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &list); error != 0)
    fail(ErrorCode::kUnavailable, "[rdzv_endpoint] cannot resolve '{}': {}", endpoint.host, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, ::freeaddrinfo);
  std::string found;
  for (const addrinfo* at = list; at != nullptr && found.empty(); at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    char name[NI_MAXHOST];
    if (::connect(fd, at->ai_addr, at->ai_addrlen) == 0 && ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), size, name, sizeof name, nullptr, 0, NI_NUMERICHOST) == 0)
      found = name;
    ::close(fd);
  }
  if (found.empty()) fail(ErrorCode::kUnavailable, "[rdzv_endpoint] no way leads to {}; set node_host", endpoint.host);
  return found;
}

/// Nodes of one run, at the store of node 0.
class Nodes {
 public:
  Nodes(const config::LaunchConfig& config, comm::Store& store) : config_(config), store_(store) {}

  /// Waits until all have come, and that they agree.
  void meet(std::stop_token stop) {
    const std::string mine = fmt::format("{} {} {}", config_.rdzv_id, config_.nnodes, config_.nproc_per_node);
    if (config_.node_rank == 0) store_.set("launch/run", mine);  // node 0 decides, whoever comes first
    if (const std::string first = store_.wait("launch/run", kMeetingTime, "node 0"); first != mine)
      fail(ErrorCode::kInvalidArgument,
           "[rdzv_id] at {} nodes meet for another run: rdzv_id, nnodes and nproc_per_node are '{}' there, '{}' here",
           config_.rdzv_endpoint.value_or("this node"), first, mine);
    if (store_.set_once(come_key(config_.node_rank), own_name()) != own_name())
      fail(ErrorCode::kInvalidArgument, "[node_rank] another node is {} already", config_.node_rank);
    wait_for([this](int node) { return come_key(node); }, "come", kMeetingTime, stop);
  }

  /// Says that this node has ended; node 0 waits for the others.
  void leave(std::stop_token stop) {
    try {
      store_.set(gone_key(config_.node_rank), "gone");
      if (config_.node_rank == 0) wait_for([this](int node) { return gone_key(node); }, "end", kLeavingTime, stop);
    } catch (const Error& error) {
      log::warning("{}", error.what());
    }
  }

 private:
  static std::string come_key(int node) { return fmt::format("launch/come/{}", node); }
  static std::string gone_key(int node) { return fmt::format("launch/gone/{}", node); }
  static std::string own_name() {
    char name[256] = {};
    (void)::gethostname(name, sizeof name - 1);
    return fmt::format("{} pid {}", name, ::getpid());
  }

  template <typename Key>
  void wait_for(Key key_of, const char* verb, std::chrono::milliseconds limit, const std::stop_token& stop) {
    int node = 0;
    Waiting waiting({.who = fmt::format("prl launch on node {}", config_.node_rank),
                     .what = fmt::format("all {} nodes to {}", config_.nnodes, verb),
                     .limit = limit,
                     .detail = [&node] { return fmt::format("node {} is missing", node); }});
    for (; node < config_.nnodes; ++node)
      while (!store_.get(key_of(node))) {
        if (stop.stop_requested()) return;
        if (waiting.is_expired())
          fail(ErrorCode::kDeadline, "[launch] node {} of {} did not {} within {} s", node, config_.nnodes, verb, limit.count() / 1000);
        waiting.check();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
  }

  const config::LaunchConfig& config_;
  comm::Store& store_;
};

}  // namespace

int run_node(const config::LaunchConfig& config, const NodeWork& work, std::stop_token stop) {
  RankLayout layout;
  layout.num_nodes = config.nnodes;
  layout.node_rank = config.node_rank;
  layout.ranks_per_node = config.nproc_per_node;
  layout.uses_gpus = work.uses_gpus;
  layout.healing = work.healing;
  std::optional<comm::StoreServer> server;
  if (config.rdzv_endpoint) {
    const Endpoint endpoint = parse_endpoint(*config.rdzv_endpoint);
    if (config.node_rank == 0) server.emplace(endpoint.host, endpoint.port);
    layout.store = fmt::format("tcp://{}", *config.rdzv_endpoint);
    layout.host = config.node_host ? *config.node_host : own_address(endpoint);
  } else {
    server.emplace();
    layout.store = server->address();
  }
  const std::shared_ptr<comm::Store> store = comm::make_store(layout.store, kMeetingTime);
  Nodes nodes(config, *store);
  nodes.meet(stop);
  if (stop.stop_requested()) return 0;
  const fs::path logs = config.log_dir.value_or(work.output_dir / "logs" / work.command);
  ChildSpec base;
  base.name = work.command;
  base.argv = {fs::read_symlink("/proc/self/exe").string(), work.command};
  base.argv.insert(base.argv.end(), work.args.begin(), work.args.end());
  base.log_file = logs / "rank_0.log";
  base.echo = true;
  log::info("node {} of {}: {} of {} ranks, meeting at {}", config.node_rank, config.nnodes, config.nproc_per_node, layout.num_ranks(),
            layout.store);
  std::optional<std::string> failure;
  {
    Supervisor supervisor;
    for (ChildSpec& child : rank_children(layout, base, logs)) supervisor.start(std::move(child));
    failure = supervisor.run(stop);
    if (failure) log::error("{}: {}{}", work.command, *failure, stop.stop_requested() ? "" : ". Ending the other ranks of this node");
    supervisor.terminate_all(std::chrono::seconds(20));
  }
  nodes.leave(stop);
  return failure ? 1 : 0;
}

}  // namespace prl::launch
