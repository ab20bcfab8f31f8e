#include "engine/host_cache.hpp"

#include <utility>

#include "base/error.hpp"

namespace prl::engine {

HostCache::HostCache(std::shared_ptr<HostLink> link, const nn::KvCache& cache, std::int64_t num_layers, std::int64_t num_blocks)
    : link_(std::move(link)) {
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const ops::KvLayer layer = cache.layer(i);
    for (const TensorView& tensor : {layer.k, layer.v}) {
      tensors_.push_back(static_cast<std::byte*>(tensor.data));
      piece_bytes_ = static_cast<std::size_t>(tensor.shape.num_elements() / cache.num_blocks()) * size_of(tensor.dtype);
    }
  }
  const std::size_t num_bytes = static_cast<std::size_t>(num_blocks) * tensors_.size() * piece_bytes_;
  // What the system does not have it would hand out all the same, and end the process where it is touched.
  const std::size_t num_available = make_cpu_runtime()->bytes_available();
  if (num_bytes > num_available)
    fail(ErrorCode::kOutOfMemory, "{} KV blocks in host memory need {} bytes, {} are available: lower kv_cache_offload.cpu.num_bytes",
         num_blocks, num_bytes, num_available);
  memory_ = link_->allocate(num_bytes);
}

std::span<const HostCopy> HostCache::pieces_of(std::span<const BlockCopy> copies, bool to_host) {
  pieces_.clear();
  for (const BlockCopy& copy : copies) {
    std::byte* host = static_cast<std::byte*>(memory_.get()) + static_cast<std::size_t>(copy.host.value) * tensors_.size() * piece_bytes_;
    for (std::byte* tensor : tensors_) {
      std::byte* const device = tensor + static_cast<std::size_t>(copy.device.value) * piece_bytes_;
      pieces_.push_back(to_host ? HostCopy{host, device, piece_bytes_} : HostCopy{device, host, piece_bytes_});
      host += piece_bytes_;
    }
  }
  return pieces_;
}

void HostCache::carry_out(const BlockCopies& copies) {
  if (copies.empty()) return;
  const HostLink::Ticket saved = link_->to_host(pieces_of(copies.saves, true));
  const HostLink::Ticket restored = link_->to_device(pieces_of(copies.restores, false), saved);
  link_->hold_work(restored);
  link_->hold_work(saved);
}

}  // namespace prl::engine
