#pragma once

#include <cstring>
#include <list>

#include "device/host_link.hpp"

namespace prl {

/// On the CPU: copies run when they are waited for and not before, so that whoever forgets to wait, or overwrites what is still to be
/// copied, computes with the wrong values.
class LazyHostLink final : public HostLink {
 public:
  using HostLink::to_device, HostLink::to_host;
  explicit LazyHostLink(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    bytes_allocated_ += bytes;
    return {runtime_->allocate(bytes), [runtime = runtime_, bytes](void* memory) { runtime->deallocate(memory, bytes); }};
  }
  Ticket to_host(void* host, const void* source, std::size_t bytes) override { return add({host, source, bytes, 0, 0, false}); }
  Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket after) override {
    return add({destination, host, bytes, 0, after, true});
  }
  void hold_work(Ticket ticket) override { run_up_to(ticket); }
  void wait(Ticket ticket) override { run_up_to(ticket); }
  std::size_t num_copies() const noexcept { return num_copies_; }
  std::size_t num_pending() const noexcept { return pending_.size(); }
  std::size_t bytes_allocated() const noexcept { return bytes_allocated_; }

 private:
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    Ticket ticket, after;
    bool is_to_device;
  };
  Ticket add(Copy copy) {
    copy.ticket = ++num_copies_;
    pending_.push_back(copy);
    return copy.ticket;
  }
  /// The copy, those asked for before it in its direction, and what they come after.
  void run_up_to(Ticket ticket) {
    bool is_to_device = false, is_found = false;
    for (const Copy& copy : pending_)
      if (copy.ticket == ticket) is_to_device = copy.is_to_device, is_found = true;
    if (!is_found) return;
    for (auto it = pending_.begin(); it != pending_.end();) {
      if (it->is_to_device != is_to_device || it->ticket > ticket) {
        ++it;
        continue;
      }
      const Copy copy = *it;
      run_up_to(copy.after);
      std::memcpy(copy.to, copy.from, copy.bytes);
      it = pending_.erase(it);
    }
  }
  std::shared_ptr<DeviceRuntime> runtime_;
  std::list<Copy> pending_;
  Ticket num_copies_ = 0;
  std::size_t bytes_allocated_ = 0;
};

}  // namespace prl
