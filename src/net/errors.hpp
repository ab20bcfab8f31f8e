#pragma once

#include <exception>

#include "base/error.hpp"

namespace prl::net {

/// Any caught exception as an Error: an Error stays as it is, an Asio abort becomes kCancelled, other system and file
/// system errors kIo, the rest kInternal.
Error to_error(const std::exception_ptr& exception) noexcept;

}  // namespace prl::net
