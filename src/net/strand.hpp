#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>

#include "net/asio.hpp"

namespace prl::net {

/// A strand around an executor of known type: it fits into an any_io_executor, and is copied and asked at every step of a coroutine without
/// the heap, which a strand around an any_io_executor needs each time.
using Strand = asio::strand<asio::io_context::executor_type>;

/// The io_context of an executor, which is of one, or a strand on one, as all of this project are.
inline asio::io_context& io_context_of(const asio::any_io_executor& executor) {
  return static_cast<asio::io_context&>(asio::query(executor, asio::execution::context));
}

/// A new strand; not around that which `executor` may be, as two would be asked at every step.
inline Strand new_strand(const asio::any_io_executor& executor) { return asio::make_strand(io_context_of(executor)); }

}  // namespace prl::net
