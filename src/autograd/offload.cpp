#include "autograd/offload.hpp"

#include "base/error.hpp"

namespace prl::autograd {

OffloadedRegions::OffloadedRegions(const std::shared_ptr<DeviceRuntime>& runtime, std::shared_ptr<HostLink> link, int max_inflight)
    : link_(std::move(link)) {
  if (max_inflight < 1) fail(ErrorCode::kInvalidArgument, "[offload] max_inflight_activations is {}, wanted at least 1", max_inflight);
  for (int i = 0; i <= max_inflight; ++i) places_.push_back(std::make_unique<Arena>(runtime));
}

OffloadedRegions::~OffloadedRegions() {
  // Places and host memory end now, so copies must have ended before.
  for (Region& region : regions_) forget_host(region);
}

void OffloadedRegions::hold_work() {
  for (Region& region : regions_) {
    link_->hold_work(region.out);
    link_->hold_work(region.in);
  }
}

void OffloadedRegions::begin(std::size_t num_regions) {
  hold_work();  // a pass that broke off left copies, and places are about to be written and merged
  for (const auto& place : places_) place->reset();
  if (regions_.size() < num_regions) regions_.resize(num_regions);
  for (Region& region : regions_) region.spans.clear();
  num_regions_ = num_regions;
}

Arena& OffloadedRegions::enter(std::size_t i) {
  PRL_CHECK(i < num_regions_, "region {} of {}", i, num_regions_);
  if (i >= places_.size()) link_->hold_work(regions_[i - places_.size()].out);
  Arena& place = place_of(i);
  place.release({});
  return place;
}

void OffloadedRegions::leave(std::size_t i) {
  if (i + places_.size() >= num_regions_) return;  // no later region takes its place
  Region& region = regions_[i];
  region.spans = place_of(i).spans();
  std::size_t bytes = 0;
  for (const Arena::Span& span : region.spans) bytes += span.size;
  if (region.host_bytes < bytes) {
    forget_host(region);
    region.host = link_->allocate(bytes);
    region.host_bytes = bytes;
  }
  auto* to = static_cast<std::byte*>(region.host.get());
  for (const Arena::Span& span : region.spans) {
    region.out = link_->to_host(to, span.data, span.size);
    to += span.size;
  }
}

void OffloadedRegions::fetch(std::size_t i) { link_->hold_work(regions_[i].in); }

void OffloadedRegions::release(std::size_t i) {
  if (i < places_.size()) return;
  Region& region = regions_[i - places_.size()];
  const auto* from = static_cast<const std::byte*>(region.host.get());
  for (const Arena::Span& span : region.spans) {
    region.in = link_->to_device(span.data, from, span.size, /*after=*/0);  // enter(i) has waited for its way out
    from += span.size;
  }
}

void OffloadedRegions::forget_host(Region& region) {
  link_->wait(region.out);
  link_->wait(region.in);
  region.host.reset();
  region.host_bytes = 0;
}

void OffloadedRegions::fit() {
  begin(0);
  for (const auto& place : places_) place->fit();
}

std::size_t OffloadedRegions::host_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Region& region : regions_) sum += region.host_bytes;
  return sum;
}

}  // namespace prl::autograd
