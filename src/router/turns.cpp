#include "router/turns.hpp"

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "net/async_result.hpp"

namespace prl::router {

struct Turns::State {
  using Ticket = net::AsyncResult<std::monostate>;

  void pass_on() {
    std::lock_guard lock(mutex);
    if (waiting.empty()) {
      is_taken = false;
      return;
    }
    const Ticket next = std::move(waiting.begin()->second);
    waiting.erase(waiting.begin());
    next.set_value({});
  }

  std::size_t max_waiting = 0;
  std::mutex mutex;
  bool is_taken = false;
  std::map<std::int64_t, Ticket> waiting;  ///< by arrival
  std::int64_t num_arrived = 0;
};

Turns::Turn::Turn(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

Turns::Turn::~Turn() {
  if (state_) state_->pass_on();
}

Turns::Turns(std::size_t max_waiting) : state_(std::make_shared<State>()) { state_->max_waiting = max_waiting; }

asio::awaitable<Turns::Turn> Turns::take(net::TimePoint deadline) const {
  const std::shared_ptr<State> state = state_;
  State::Ticket ticket;
  std::int64_t place = 0;
  {
    std::lock_guard lock(state->mutex);
    if (!std::exchange(state->is_taken, true)) co_return Turn(state);
    if (state->waiting.size() >= state->max_waiting)
      fail(ErrorCode::kOverloaded, "{} changes of the engines wait for their turn already", state->waiting.size());
    place = state->num_arrived++;
    state->waiting.emplace(place, ticket);
  }
  std::exception_ptr failure;
  try {
    auto waiting = ticket.wait(deadline, "the changes of the engines that came before");
    co_await std::move(waiting);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  if (!failure) co_return Turn(state);
  bool has_come = false;
  {
    std::lock_guard lock(state->mutex);
    has_come = state->waiting.erase(place) == 0;
  }
  if (has_come) state->pass_on();
  std::rethrow_exception(failure);
}

}  // namespace prl::router
