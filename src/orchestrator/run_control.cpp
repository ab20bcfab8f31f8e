#include "orchestrator/run_control.hpp"

#include "net/errors.hpp"

namespace prl::orchestrator {

void RunControl::begin(std::stop_token stop) {
  stop_ = std::move(stop);
  on_stop_.emplace(stop_, [this] { wake(); });
}

void RunControl::check_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void RunControl::check() const {
  if (is_stopped()) fail(ErrorCode::kCancelled, "stopped");
  check_failure();
}

asio::awaitable<void> RunControl::guard(asio::awaitable<void> role) {
  try {
    co_await std::move(role);
  } catch (const std::exception&) {
    const bool is_shutdown = is_finished_ && net::to_error(std::current_exception()).code() == ErrorCode::kCancelled;
    if (!failure_ && !is_shutdown) failure_ = std::current_exception();
    wake();
  }
}

}  // namespace prl::orchestrator
