#include "trainer/optim/host_state.hpp"

#include <algorithm>
#include <cstring>

namespace prl::trainer {
namespace {

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

HostState::HostState(std::shared_ptr<DeviceRuntime> device, std::shared_ptr<HostLink> link)
    : device_(std::move(device)), host_(make_cpu_runtime()), link_(std::move(link)) {}

Tensor HostState::zeros(Shape shape, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(shape.num_elements()) * size_of(dtype);
  std::shared_ptr<void> memory = link_->allocate(bytes);
  std::memset(memory.get(), 0, bytes);
  return Tensor::borrow(host_, memory, memory.get(), shape, dtype);
}

void HostState::make_room(std::span<const Visit> visits) {
  std::size_t most = 0;
  for (const Visit& visit : visits) {
    std::size_t bytes = 0;
    for (const Tensor& tensor : visit.state) bytes += aligned(tensor.num_bytes());
    most = std::max(most, bytes);
  }
  for (Tensor& buffer : buffers_)
    if (!buffer.defined() || buffer.num_bytes() < most) buffer = Tensor::empty(device_, {static_cast<std::int64_t>(most)}, DType::kU8);
}

std::vector<TensorView> HostState::views_in(std::size_t buffer, const Visit& visit) const {
  std::vector<TensorView> views;
  auto* at = buffers_[buffer].as<std::byte>();
  for (const Tensor& tensor : visit.state) {
    views.push_back({at, tensor.shape(), tensor.dtype(), device_->device(), tensor.shape().num_cols()});
    at += aligned(tensor.num_bytes());
  }
  return views;
}

void HostState::run(std::span<const Visit> visits) {
  make_room(visits);
  const std::size_t n = visits.size();
  std::vector<HostLink::Ticket> in(n, 0), out(n, 0);
  const auto fetch = [&](std::size_t i) {
    const std::vector<TensorView> views = views_in(i % kNumBuffers, visits[i]);
    const HostLink::Ticket buffer_is_free = i >= kNumBuffers ? out[i - kNumBuffers] : 0;
    for (std::size_t k = 0; k < views.size(); ++k)
      in[i] = link_->to_device(views[k].data, visits[i].state[k].data(), visits[i].state[k].num_bytes(), buffer_is_free);
  };
  for (std::size_t i = 0; i < std::min<std::size_t>(n, 2); ++i) fetch(i);
  for (std::size_t i = 0; i < n; ++i) {
    const std::vector<TensorView> views = views_in(i % kNumBuffers, visits[i]);
    link_->hold_work(in[i]);
    visits[i].work(views);
    for (std::size_t k = 0; k < views.size(); ++k)
      out[i] = link_->to_host(visits[i].state[k].data(), views[k].data, visits[i].state[k].num_bytes());
    if (i + 2 < n) fetch(i + 2);
  }
  if (n > 0) link_->wait(out[n - 1]);
}

}  // namespace prl::trainer
