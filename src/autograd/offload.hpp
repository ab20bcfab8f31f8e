#pragma once

#include <memory>
#include <vector>

#include "autograd/arena.hpp"
#include "device/host_link.hpp"

namespace prl::autograd {

/// Offloads saved activations: regions (one per layer) share a few buffers on the device. A region whose buffer is reused is copied to host
/// memory, and copied back to the same addresses before the backward pass reads it. Copies overlap with the device's work.
///
/// One thread. Forward: enter and leave regions in rising order. Backward: fetch and release them in falling order. A forward pass without
/// a backward pass is allowed.
class OffloadedRegions {
 public:
  /// `max_inflight` >= 1: regions that may be copied to the host while the next one is in use. There is one buffer more than that.
  OffloadedRegions(const std::shared_ptr<DeviceRuntime>& runtime, std::shared_ptr<HostLink> link, int max_inflight);
  ~OffloadedRegions();
  OffloadedRegions(const OffloadedRegions&) = delete;
  OffloadedRegions& operator=(const OffloadedRegions&) = delete;

  /// Discards everything and begins a pass of that many regions.
  void begin(std::size_t num_regions);
  /// The empty memory of region `i`. Work enqueued from now on waits until the former region of this buffer is in host memory. The
  /// region before `i` stays readable until the next call.
  Arena& enter(std::size_t i);
  /// Region `i` is written, or will be by work that is enqueued. Starts its copy to the host if a later region needs its buffer.
  void leave(std::size_t i);

  /// Work enqueued from now on sees region `i` as it was left.
  void fetch(std::size_t i);
  /// The work that reads region `i` is enqueued. Starts prefetching the region that had this buffer before.
  void release(std::size_t i);

  /// Discards everything; buffers keep the size of the largest pass so far. Host memory stays allocated.
  void fit();
  std::size_t num_places() const noexcept { return places_.size(); }
  /// Host memory allocated so far.
  std::size_t host_bytes() const noexcept;

 private:
  struct Region {
    std::vector<Arena::Span> spans;  ///< on the device
    std::shared_ptr<void> host;      ///< kept from pass to pass
    std::size_t host_bytes = 0;
    HostLink::Ticket out = 0, in = 0;
  };
  Arena& place_of(std::size_t i) { return *places_[i % places_.size()]; }
  /// Work enqueued from now on waits for all copies.
  void hold_work();
  /// Waits for the copies of a region and gives its host memory back.
  void forget_host(Region& region);

  std::shared_ptr<HostLink> link_;
  std::vector<std::unique_ptr<Arena>> places_;
  std::vector<Region> regions_;
  std::size_t num_regions_ = 0;
};

}  // namespace prl::autograd
