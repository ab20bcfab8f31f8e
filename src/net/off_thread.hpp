#pragma once

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>

#include <exception>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "net/async_result.hpp"
#include "net/errors.hpp"

namespace prl::net {

/// One thread for calls that block (files, queues), so that the I/O thread never does.
class OffThread {
 public:
  OffThread() : pool_(1) {}
  /// Finishes what was started.
  ~OffThread() { pool_.join(); }
  OffThread(const OffThread&) = delete;
  OffThread& operator=(const OffThread&) = delete;

  /// Runs `work` there and returns its value or throws its Error. Error{kDeadline} naming `what` when `deadline` passes
  /// first; the work then still runs to its end, so it must own or outlive what it uses.
  template <typename T>
  asio::awaitable<T> run(std::function<T()> work, TimePoint deadline, std::string what) {
    AsyncResult<T> result;
    auto job = [work = std::move(work), result] {
      try {
        result.set_value(work());
      } catch (const std::exception&) {
        result.set_error(to_error(std::current_exception()));
      }
    };
    boost::asio::post(pool_, std::move(job));
    auto waiting = result.wait(deadline, std::move(what));
    co_return co_await std::move(waiting);
  }

 private:
  boost::asio::thread_pool pool_;
};

}  // namespace prl::net
