#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "net/asio.hpp"

namespace prl::router {

namespace asio = boost::asio;

/// Lets one coroutine at a time pass, in order of arrival. Any thread; copies share one state.
class Turns {
 public:
  struct State;  ///< of turns.cpp

  /// Held by whoever has its turn; the next one's begins when it is destroyed. Move only.
  class Turn {
   public:
    explicit Turn(std::shared_ptr<State> state) noexcept;
    Turn(Turn&&) noexcept = default;
    Turn& operator=(Turn&& other) noexcept {
      std::swap(state_, other.state_);
      return *this;
    }
    ~Turn();

   private:
    std::shared_ptr<State> state_;
  };

  explicit Turns(std::size_t max_waiting);
  /// Error{kOverloaded} if so many wait already, {kDeadline} if the turn has not come by then.
  asio::awaitable<Turn> take(net::TimePoint deadline) const;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace prl::router
