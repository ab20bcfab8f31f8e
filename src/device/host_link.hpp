#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/device.hpp"

namespace prl {

struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// Host memory (pinned, on GPUs) and asynchronous copies to and from a device that overlap with its work. One thread at a time, that of the
/// device's work; copies of one direction run in the order of the calls. Memory on either side must stay valid until its copy is done,
/// or until the device's work waits for it (hold_work).
class HostLink {
 public:
  /// Identifies a copy; 0: none.
  using Ticket = std::uint64_t;
  virtual ~HostLink() = default;  ///< waits for all copies

  /// 64-byte aligned, contents undefined; freed with its last owner, which may outlive the link. Error{kOutOfMemory}.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  /// Starts when the work enqueued on the device so far has run.
  virtual Ticket to_host(void* host, const void* source, std::size_t bytes) = 0;
  /// Starts when the work enqueued on the device so far has run and the copy `after` is done.
  virtual Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket after) = 0;
  /// Several pieces as one copy; none: 0. Cheaper than one call for each where pieces are small.
  virtual Ticket to_host(std::span<const HostCopy> pieces);
  virtual Ticket to_device(std::span<const HostCopy> pieces, Ticket after);
  /// Work enqueued on the device from now on waits for that copy and those before it.
  virtual void hold_work(Ticket ticket) = 0;
  /// Blocks the caller until that copy and those before it are done. Errors as copy_to_host.
  virtual void wait(Ticket ticket) = 0;
};

/// On a GPU copies have streams of their own, one for each direction, and overlap with other work only if memory is `page_locked`. On the
/// CPU copies are synchronous.
std::shared_ptr<HostLink> make_host_link(const std::shared_ptr<DeviceRuntime>& runtime, bool page_locked);

}  // namespace prl
