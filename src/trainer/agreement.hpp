#pragma once

#include <functional>

#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace prl::trainer {

/// An error that every rank of a group throws at the same point of its work: none waits for another, and the group is as good as before.
class SharedError : public Error {
 public:
  using Error::Error;
  explicit SharedError(const Error& error) : Error(error) {}
};

/// Work that one rank may fail at, and that makes no calls of the group. All ranks call it. If the work of any fails they all throw a
/// SharedError: a rank its own error, the others one that quotes the lowest rank's. Each waits for the others' work. PeerLost.
void agree(comm::Communicator& ranks, const std::function<void()>& work);

/// Work that every rank does alike and so fails at alike, with nothing said between them: its errors become SharedError.
void fail_alike(const std::function<void()>& work);

}  // namespace prl::trainer
