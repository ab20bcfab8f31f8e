#pragma once

#include <memory>
#include <vector>

#include "autograd/arena.hpp"
#include "device/host_link.hpp"

namespace prl::autograd {

/// Memory for what a backward pass needs, region by region, where all regions share a few places on the device: a region that loses its
/// place waits in host memory, and is back at the same addresses when the backward pass comes to it. Copies run beside the device's work.
///
/// One thread. Regions are entered and left with rising numbers, then fetched and released with falling ones; a forward pass without a
/// backward pass is fine.
class OffloadedRegions {
 public:
  /// `max_inflight` >= 1: how many regions may be on their way to the host while the next is in use. There is one place more than that.
  OffloadedRegions(const std::shared_ptr<DeviceRuntime>& runtime, std::shared_ptr<HostLink> link, int max_inflight);
  ~OffloadedRegions();
  OffloadedRegions(const OffloadedRegions&) = delete;
  OffloadedRegions& operator=(const OffloadedRegions&) = delete;

  /// Forgets everything; a pass of that many regions begins.
  void begin(std::size_t num_regions);
  /// The empty memory of region `i`. Work queued from now on waits until the region that had this place is in host memory. What the
  /// region before it holds stays readable until the next call.
  Arena& enter(std::size_t i);
  /// Region `i` is written, or will be by work that is queued. Its way to the host begins, if another one will want its place.
  void leave(std::size_t i);

  /// Work queued from now on finds region `i` as it was left.
  void fetch(std::size_t i);
  /// The work that reads region `i` is queued. The region that lost this place to it begins to come back.
  void release(std::size_t i);

  /// Everything ends; places keep what the largest pass so far took. Host memory stays.
  void fit();
  std::size_t num_places() const noexcept { return places_.size(); }
  /// Of host memory taken so far.
  std::size_t host_bytes() const noexcept;

 private:
  struct Region {
    std::vector<Arena::Span> spans;  ///< on the device
    std::shared_ptr<void> host;      ///< kept from pass to pass
    std::size_t host_bytes = 0;
    HostLink::Ticket out = 0, in = 0;
  };
  Arena& place_of(std::size_t i) { return *places_[i % places_.size()]; }
  /// Work queued from now on waits for all copies.
  void hold_work();
  /// Waits for the copies of a region and gives its host memory back.
  void forget_host(Region& region);

  std::shared_ptr<HostLink> link_;
  std::vector<std::unique_ptr<Arena>> places_;
  std::vector<Region> regions_;
  std::size_t num_regions_ = 0;
};

}  // namespace prl::autograd
