#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>

#include <chrono>

namespace prl::net {

namespace asio = boost::asio;
/// The clock of every deadline in this module.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

}  // namespace prl::net
