#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/device.hpp"

namespace prl {

/// Host memory beside a device, and copies between the two that run while the device works. One thread at a time, that of the device's
/// work; copies of one direction run in the order in which they were asked for. Memory on either side must stay until its copy is done,
/// or until the device's work has been held for it.
class HostLink {
 public:
  /// Names a copy; 0 names none.
  using Ticket = std::uint64_t;
  virtual ~HostLink() = default;  ///< waits for its copies

  /// 64-byte aligned, contents undefined; ends with its last owner, not with the link. Error{kOutOfMemory}.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  /// Starts when the work queued on the device so far has run.
  virtual Ticket to_host(void* host, const void* source, std::size_t bytes) = 0;
  /// Starts when the work queued on the device so far has run and the copy `after` is done.
  virtual Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket after) = 0;
  /// Work queued on the device from now on begins when that copy, and those asked for before it, are done.
  virtual void hold_work(Ticket ticket) = 0;
  /// The caller waits for that copy, and for those asked for before it. Errors as copy_to_host.
  virtual void wait(Ticket ticket) = 0;
};

/// A GPU's copies have streams of their own, one each way, and want `page_locked` memory to overlap with anything. On the CPU copies
/// are done when the call returns.
std::shared_ptr<HostLink> make_host_link(const std::shared_ptr<DeviceRuntime>& runtime, bool page_locked);

}  // namespace prl
