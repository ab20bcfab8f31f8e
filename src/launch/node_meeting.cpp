#include "launch/node_meeting.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"

namespace prl::launch {
namespace {

/// For the other nodes to come, as batch systems start them one after another.
constexpr std::chrono::milliseconds kMeetingTime{600'000};
/// Node 0 keeps the store open for as long after its own processes have ended.
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

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

std::optional<int> number_of(const char* name) {
  const char* text = variable(name);
  if (text == nullptr) return std::nullopt;
  const std::string_view view = text;
  int number = 0;
  const auto [at, error] = std::from_chars(view.data(), view.data() + view.size(), number);
  if (error != std::errc() || at != view.data() + view.size() || number < 0)
    fail(ErrorCode::kInvalidArgument, "[{}] is '{}', a whole number from 0 on is wanted", name, view);
  return number;
}

/// The number at the end of the pod's name; nullopt if it has none.
std::optional<int> pod_ordinal() {
  const char* name = variable("POD_NAME");
  if (name == nullptr) return std::nullopt;
  const std::string_view view = name;
  const std::size_t dash = view.rfind('-');
  int number = 0;
  if (dash == std::string_view::npos || dash + 1 == view.size()) return std::nullopt;
  const auto [at, error] = std::from_chars(view.data() + dash + 1, view.data() + view.size(), number);
  return error == std::errc() && at == view.data() + view.size() ? std::optional<int>(number) : std::nullopt;
}

/// Of the first source that knows.
std::optional<int> first_of(std::initializer_list<std::optional<int>> sources) {
  for (const auto& source : sources)
    if (source) return source;
  return std::nullopt;
}

std::string own_name() {
  char name[256] = {};
  (void)::gethostname(name, sizeof name - 1);
  return fmt::format("{} pid {}", name, ::getpid());
}

std::string come_key(int node) { return fmt::format("launch/come/{}", node); }
std::string host_key(int node) { return fmt::format("launch/host/{}", node); }
std::string gone_key(int node) { return fmt::format("launch/gone/{}", node); }

/// Waits for a key of every node, which they set when they `verb`; false after a stop.
template <typename Key>
bool wait_for(comm::Store& store, const NodePlace& place, Key key_of, const char* verb, std::chrono::milliseconds limit,
              const std::stop_token& stop) {
  int node = 0;
  Waiting waiting({.who = fmt::format("prl launch on node {}", place.rank),
                   .what = fmt::format("all {} nodes to {}", place.num_nodes, verb),
                   .limit = limit,
                   .detail = [&node] { return fmt::format("node {} is missing", node); }});
  for (; node < place.num_nodes; ++node)
    while (!store.get(key_of(node))) {
      if (stop.stop_requested()) return false;
      if (waiting.is_expired())
        fail(ErrorCode::kDeadline, "[launch] node {} of {} did not {} within {} s", node, place.num_nodes, verb, limit.count() / 1000);
      waiting.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  return true;
}

}  // namespace

NodePlace find_node(const config::LaunchConfig& config, const NodesWanted& wanted) {
  const bool is_step = variable("SLURM_STEP_ID") != nullptr;
  const std::optional<int> pod = pod_ordinal();
  NodePlace place;
  place.num_nodes =
      first_of({config.nnodes, wanted.num_nodes, number_of("PRL_NUM_NODES"), is_step ? number_of("SLURM_STEP_NUM_NODES") : std::nullopt,
                pod ? number_of("STATEFUL_REPLICAS") : std::nullopt})
          .value_or(1);
  if (wanted.num_nodes && place.num_nodes != *wanted.num_nodes)
    fail(ErrorCode::kInvalidArgument, "[nnodes] is {}, but the deployment has {} nodes", place.num_nodes, *wanted.num_nodes);
  place.per_node = first_of({config.nproc_per_node, wanted.per_node}).value_or(1);
  if (wanted.per_node && place.per_node != *wanted.per_node)
    fail(ErrorCode::kInvalidArgument, "[nproc_per_node] is {}, but deployment.gpus_per_node is {}", place.per_node, *wanted.per_node);
  const std::optional<int> rank =
      first_of({config.node_rank, number_of("PRL_NODE_RANK"), is_step ? number_of("SLURM_NODEID") : std::nullopt, pod});
  if (!rank && place.num_nodes > 1)
    fail(ErrorCode::kInvalidArgument,
         "[node_rank] which of the {} nodes is this? --node-rank says it, or PRL_NODE_RANK, or SLURM_NODEID in a step of srun, or POD_NAME",
         place.num_nodes);
  place.rank = rank.value_or(0);
  if (place.num_nodes == 1 && !config.node_rank) place.rank = 0;
  if (place.rank >= place.num_nodes)
    fail(ErrorCode::kInvalidArgument, "[node_rank] is {}, it must be below the number of nodes, which is {}", place.rank, place.num_nodes);
  place.run_id = config.rdzv_id;
  place.endpoint = config.rdzv_endpoint;
  if (const char* endpoint = variable("PRL_RDZV_ENDPOINT"); endpoint != nullptr && !place.endpoint) place.endpoint = endpoint;
  if (place.num_nodes > 1 && !place.endpoint)
    fail(ErrorCode::kInvalidArgument,
         "[rdzv_endpoint] is needed with several nodes, or PRL_RDZV_ENDPOINT: the host:port of node 0, and a port that is free there");
  place.host = config.node_host;
  if (const char* host = variable("PRL_NODE_HOST"); host != nullptr && !place.host) place.host = host;
  return place;
}

std::string own_address_towards(const std::string& text) {
  const Endpoint endpoint = parse_endpoint(text);
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

NodeMeeting::NodeMeeting(NodePlace place) : place_(std::move(place)) {
  if (place_.endpoint) {
    const Endpoint endpoint = parse_endpoint(*place_.endpoint);
    if (place_.rank == 0) server_ = std::make_unique<comm::StoreServer>(endpoint.host, endpoint.port);
    address_ = fmt::format("tcp://{}", *place_.endpoint);
    host_ = place_.host ? *place_.host : own_address_towards(*place_.endpoint);
  } else {
    server_ = std::make_unique<comm::StoreServer>();
    address_ = server_->address();
  }
  store_ = make_store();
}

std::shared_ptr<comm::Store> NodeMeeting::make_store() const { return comm::make_store(address_, kMeetingTime); }

bool NodeMeeting::meet(std::stop_token stop) {
  const std::string mine = fmt::format("{} {} {}", place_.run_id, place_.num_nodes, place_.per_node);
  if (place_.rank == 0) store_->set("launch/run", mine);  // node 0 decides, whoever comes first
  if (const std::string first = store_->wait("launch/run", kMeetingTime, "node 0"); first != mine)
    fail(ErrorCode::kInvalidArgument,
         "[rdzv_id] at {} nodes meet for another run: rdzv_id, nnodes and nproc_per_node are '{}' there, '{}' here",
         place_.endpoint.value_or("this node"), first, mine);
  if (store_->set_once(come_key(place_.rank), own_name()) != own_name())
    fail(ErrorCode::kInvalidArgument, "[node_rank] another node is {} already", place_.rank);
  store_->set(host_key(place_.rank), host_);
  if (!wait_for(*store_, place_, host_key, "come", kMeetingTime, stop)) return false;
  hosts_.clear();
  for (int node = 0; node < place_.num_nodes; ++node) hosts_.push_back(store_->get(host_key(node)).value_or(""));
  return true;
}

bool NodeMeeting::are_others_gone(comm::Store& store) const {
  for (int node = 0; node < place_.num_nodes; ++node)
    if (node != place_.rank && !store.get(gone_key(node))) return false;
  return true;
}

void NodeMeeting::leave(std::stop_token stop) noexcept {
  try {
    store_->set(gone_key(place_.rank), "gone");
    if (place_.rank == 0) wait_for(*store_, place_, gone_key, "end", kLeavingTime, stop);
  } catch (const std::exception& error) {
    log::warning("{}", error.what());
  }
}

}  // namespace prl::launch
