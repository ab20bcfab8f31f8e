#include "env/python/worker_link.hpp"

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "net/deadline.hpp"

namespace prl::env::python {

namespace json = boost::json;

namespace {

constexpr auto kQuietly = asio::as_tuple(asio::use_awaitable);
constexpr std::size_t kMaxLineBytes = 16 << 10;
constexpr std::size_t kReadBytes = 64 << 10;  ///< asked for at once, and written at once where frames are small
constexpr std::size_t kKeptBytes = 1 << 20;   ///< of a buffer that is empty

}  // namespace

struct WorkerLink::State {
  State(asio::any_io_executor executor, std::shared_ptr<WorkerLog> worker_log, std::string link_name, Limits link_limits,
        LinkEvents link_events)
      : socket(executor),
        output(executor),
        log(std::move(worker_log)),
        name(std::move(link_name)),
        limits(link_limits),
        events(std::make_shared<const LinkEvents>(std::move(link_events))) {}

  asio::generic::stream_protocol::socket socket;
  asio::posix::stream_descriptor output;
  std::optional<ChildProcess> child;
  std::shared_ptr<WorkerLog> log;
  std::string name;
  Limits limits;
  std::shared_ptr<const LinkEvents> events;  ///< null once closed; held while one of them runs, which may close the link
  std::deque<std::string> unsent;
  std::size_t num_unsent_bytes = 0;
  net::Signal has_unsent;
  std::string last_line;  ///< of the output, for the reason of an end
  bool is_connected = false;
  bool is_closed = false;
};

WorkerLink::WorkerLink(asio::any_io_executor executor, ChildProcess child, std::shared_ptr<WorkerLog> log, std::string name, Limits limits,
                       LinkEvents events)
    : state_(std::make_shared<State>(executor, std::move(log), name, limits, std::move(events))), tasks_(executor, name) {
  State& state = *state_;
  state.child.emplace(std::move(child));
  state.socket.assign(asio::generic::stream_protocol(AF_UNIX, 0), state.child->release_connection());
  state.output.assign(state.child->release_output());
  state.is_connected = true;
  tasks_.spawn("output", read_output(state_));
  start();
}

WorkerLink::WorkerLink(asio::any_io_executor executor, std::string address, net::TimePoint deadline, std::shared_ptr<WorkerLog> log,
                       std::string name, Limits limits, LinkEvents events)
    : state_(std::make_shared<State>(executor, std::move(log), name, limits, std::move(events))), tasks_(executor, name) {
  tasks_.spawn("connecting", connect(state_, std::move(address), deadline));
}

WorkerLink::~WorkerLink() { close(); }

void WorkerLink::start() {
  tasks_.spawn("frames in", read_frames(state_));
  tasks_.spawn("frames out", write_frames(state_));
}

asio::awaitable<void> WorkerLink::connect(std::shared_ptr<State> state, std::string address, net::TimePoint deadline) {
  std::string problem;
  try {
    const std::size_t colon = address.rfind(':');
    if (colon == std::string::npos) fail(ErrorCode::kInvalidArgument, "wanted host:port");
    const auto executor = co_await asio::this_coro::executor;
    asio::ip::tcp::resolver resolver(executor);
    asio::ip::tcp::socket socket(executor);
    auto resolving = resolver.async_resolve(address.substr(0, colon), address.substr(colon + 1), asio::use_awaitable);
    auto bounded = net::with_deadline(std::move(resolving), deadline, "the address");
    const auto endpoints = co_await std::move(bounded);
    auto connecting = asio::async_connect(socket, endpoints, kQuietly);
    auto bounded_connect = net::with_deadline(std::move(connecting), deadline, "the connection");
    const auto connected = co_await std::move(bounded_connect);
    // An exception of Asio's would tell a line of its source as well.
    if (const auto& error = std::get<0>(connected)) fail(ErrorCode::kUnavailable, "{}", error.message());
    if (is_connected_to_itself(socket.native_handle())) fail(ErrorCode::kUnavailable, "connection refused");
    socket.set_option(asio::ip::tcp::no_delay(true));
    state->socket = asio::generic::stream_protocol::socket(std::move(socket));
    state->is_connected = true;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty()) {
    end(state, fmt::format("{} cannot be reached: {}", address, problem));
    co_return;
  }
  using namespace asio::experimental::awaitable_operators;
  auto both = read_frames(state) && write_frames(state);
  co_await std::move(both);
}

void WorkerLink::end(const std::shared_ptr<State>& state, const std::string& reason) {
  if (std::exchange(state->is_closed, true)) return;
  const std::shared_ptr<const LinkEvents> events = std::exchange(state->events, nullptr);
  state->has_unsent.notify();
  boost::system::error_code ignored;
  state->socket.close(ignored);
  if (events) events->on_end(reason);
}

/// Hands on the messages of all whole frames in `bytes` and removes them. Error{kCorrupt}.
void WorkerLink::take_frames(const std::shared_ptr<State>& state, std::string& bytes) {
  std::size_t begin = 0;
  while (!state->is_closed && bytes.size() - begin >= kFrameHeaderBytes) {
    FrameHeader header{};
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(begin), header.size(), header.begin());
    const std::size_t size = decode_header(header, state->limits.max_frame_bytes);
    if (bytes.size() - begin - kFrameHeaderBytes < size) break;
    json::object message = decode_payload(std::string_view(bytes).substr(begin + kFrameHeaderBytes, size));
    begin += kFrameHeaderBytes + size;
    if (const auto events = state->events) events->on_message(std::move(message));
  }
  bytes.erase(0, begin);
}

asio::awaitable<void> WorkerLink::read_frames(std::shared_ptr<State> state) {
  std::string problem;
  std::string bytes;  // not yet handed on: less than a frame
  std::vector<char> room(kReadBytes);
  while (!state->is_closed) {
    const auto [error, size] = co_await state->socket.async_read_some(asio::buffer(room), kQuietly);
    if (error) {
      const bool is_end = error == asio::error::eof || error == asio::error::connection_reset;
      problem = !is_end ? error.message() : bytes.empty() ? "it closed the connection" : "it closed the connection within a frame";
      break;
    }
    bytes.append(room.data(), size);
    try {
      take_frames(state, bytes);
    } catch (const Error& broken) {
      problem = broken.what();
      break;
    }
    if (bytes.empty() && bytes.capacity() > kKeptBytes) bytes.shrink_to_fit();
  }
  end(state, problem);
}

asio::awaitable<void> WorkerLink::write_frames(std::shared_ptr<State> state) {
  std::string frames;  // its room is used again: giving 64 KiB back each time makes the heap tidy itself up
  while (!state->is_closed) {
    if (state->unsent.empty()) {
      co_await state->has_unsent.wait_until(net::Clock::now() + std::chrono::hours(1));
      continue;
    }
    frames.clear();
    while (!state->unsent.empty() && (frames.empty() || frames.size() + state->unsent.front().size() <= kReadBytes)) {
      frames += state->unsent.front();
      state->unsent.pop_front();
    }
    const auto [error, size] = co_await asio::async_write(state->socket, asio::buffer(frames), kQuietly);
    static_cast<void>(size);
    state->num_unsent_bytes -= frames.size();
    if (error) break;  // the reader says why
    if (frames.capacity() > kKeptBytes) frames = std::string();
  }
}

asio::awaitable<void> WorkerLink::read_output(std::shared_ptr<State> state) {
  std::array<char, 4096> buffer{};
  std::string line;
  for (;;) {
    const auto [error, size] = co_await state->output.async_read_some(asio::buffer(buffer), kQuietly);
    if (error) break;
    for (std::size_t i = 0; i < size; ++i) {
      // A bar of progress redraws its line.
      const bool is_end = buffer[i] == '\n' || buffer[i] == '\r' || line.size() >= kMaxLineBytes;
      if (!is_end) {
        line += buffer[i];
        continue;
      }
      if (!line.empty()) state->log->write(state->name, line);
      if (!line.empty()) state->last_line = std::exchange(line, {});
      if (buffer[i] != '\n' && buffer[i] != '\r') line = buffer[i];
    }
  }
  if (!line.empty()) state->log->write(state->name, line);
}

std::size_t WorkerLink::max_frame_bytes() const { return state_->limits.max_frame_bytes; }

void WorkerLink::send(std::string frame) {
  if (state_->is_closed) return;
  state_->num_unsent_bytes += frame.size();
  state_->unsent.push_back(std::move(frame));
  if (state_->num_unsent_bytes > state_->limits.max_unsent_bytes)
    end(state_, fmt::format("it does not read: {} bytes are unsent", state_->num_unsent_bytes));
  else
    state_->has_unsent.notify();
}

bool WorkerLink::send_with(const std::string& frame, std::span<const int> descriptors) {
  constexpr std::size_t kMostDescriptors = 4;
  if (state_->is_closed || state_->num_unsent_bytes > 0 || descriptors.size() > kMostDescriptors) return false;
  iovec bytes{const_cast<char*>(frame.data()), frame.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  const ssize_t sent = ::sendmsg(state_->socket.native_handle(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent == static_cast<ssize_t>(frame.size());
}

void WorkerLink::close() {
  if (!std::exchange(state_->is_closed, true)) {
    state_->events = nullptr;
    boost::system::error_code ignored;
    state_->socket.close(ignored);
  }
  if (state_->child) state_->child->kill();
  tasks_.cancel();
}

bool WorkerLink::is_gone() { return !state_->child || state_->child->status().has_value(); }

std::string WorkerLink::describe_end() const {
  const std::optional<int> status = state_->child ? state_->child->status() : std::nullopt;
  std::string text = status ? describe_status(*status) : std::string();
  if (!state_->last_line.empty()) text += fmt::format("{}last output: {}", text.empty() ? "" : "; ", state_->last_line.substr(0, 300));
  return text;
}

std::optional<pid_t> WorkerLink::pid() const { return state_->child ? std::optional(state_->child->pid()) : std::nullopt; }

}  // namespace prl::env::python
