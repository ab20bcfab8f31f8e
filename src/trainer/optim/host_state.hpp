#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/host_link.hpp"
#include "tensor/tensor.hpp"

namespace prl::trainer {

/// Optimizer state that lives in host memory and visits the device piece by piece: while one piece is worked on, the next is on its way
/// in and the last on its way out. One thread, that of the device's work.
class HostState {
 public:
  HostState(std::shared_ptr<DeviceRuntime> device, std::shared_ptr<HostLink> link);

  /// Of the host, zero.
  Tensor zeros(Shape shape, DType dtype);

  /// Some state and the work over it, which gets the same tensors on the device and may change them.
  struct Visit {
    std::vector<Tensor> state;
    std::function<void(std::span<const TensorView> on_device)> work;
  };
  /// Returns when the last piece is back in host memory.
  void run(std::span<const Visit> visits);
  /// Buffers that take turns. Pieces are on their way in and out while one is worked on, so three are enough.
  static constexpr std::size_t kNumBuffers = 3;

 private:
  void make_room(std::span<const Visit> visits);
  std::vector<TensorView> views_in(std::size_t buffer, const Visit& visit) const;

  std::shared_ptr<DeviceRuntime> device_, host_;
  std::shared_ptr<HostLink> link_;
  Tensor buffers_[kNumBuffers];
};

}  // namespace prl::trainer
