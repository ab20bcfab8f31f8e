#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace prl::net::detail {

/// Operations of coroutines give their error code back instead of throwing it.
constexpr auto kToken = boost::asio::as_tuple(boost::asio::use_awaitable);

}  // namespace prl::net::detail
