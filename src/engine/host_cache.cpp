#include "engine/host_cache.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {

HostCache::HostCache(std::shared_ptr<HostLink> link, const nn::KvCache& cache, std::int64_t num_layers, std::int64_t num_blocks)
    : link_(std::move(link)) {
  const auto add = [&](void* data, std::size_t bytes_of_all) {
    tensors_.push_back({static_cast<std::byte*>(data), bytes_of_all / static_cast<std::size_t>(cache.num_blocks())});
    block_bytes_ += tensors_.back().bytes;
  };
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const ops::KvLayer layer = cache.layer(i);
    for (const TensorView& tensor : {layer.k, layer.v})
      if (tensor.data != nullptr) add(tensor.data, static_cast<std::size_t>(tensor.shape.num_elements()) * size_of(tensor.dtype));
  }
  // A block that comes back from elsewhere tells the experts of its tokens, too.
  if (const Tensor& log = cache.route_log(); log.defined()) add(log.data(), log.num_bytes());
  if (const Tensor& hidden = cache.hidden(); hidden.defined()) add(hidden.data(), hidden.slice(0, cache.num_slots()).num_bytes());
  const std::size_t num_bytes = static_cast<std::size_t>(num_blocks) * block_bytes_;
  // What the system does not have it would hand out all the same, and end the process where it is touched.
  const std::size_t num_available = make_cpu_runtime()->bytes_available();
  if (num_bytes > num_available)
    fail(ErrorCode::kOutOfMemory, "{} KV blocks in host memory need {} bytes, {} are available: lower kv_cache_offload.cpu.num_bytes",
         num_blocks, num_bytes, num_available);
  memory_ = link_->allocate(num_bytes);
  last_copied_.resize(static_cast<std::size_t>(num_blocks));
}

std::span<std::byte> HostCache::block(BlockId host) const noexcept {
  return {static_cast<std::byte*>(memory_.get()) + static_cast<std::size_t>(host.value) * block_bytes_, block_bytes_};
}

std::span<const HostCopy> HostCache::pieces_of(std::span<const BlockCopy> copies, bool to_host) {
  pieces_.clear();
  for (const BlockCopy& copy : copies) {
    std::byte* host = block(copy.host).data();
    last_copied_[static_cast<std::size_t>(copy.host.value)] = num_steps_;
    for (const Piece& piece : tensors_) {
      std::byte* const device = piece.tensor + static_cast<std::size_t>(copy.device.value) * piece.bytes;
      pieces_.push_back(to_host ? HostCopy{host, device, piece.bytes} : HostCopy{device, host, piece.bytes});
      host += piece.bytes;
    }
  }
  return pieces_;
}

void HostCache::carry_out(const BlockCopies& copies) {
  Step& step = steps_[++num_steps_ % steps_.size()];
  step = {};
  if (copies.empty()) return;
  const HostLink::Ticket saved = step.saved = link_->to_host(pieces_of(copies.saves, true));
  const HostLink::Ticket restored = step.restored = link_->to_device(pieces_of(copies.restores, false), saved);
  link_->hold_work(restored);
  link_->hold_work(saved);
}

void HostCache::open_files(DiskStoreOptions options) {
  options.block_bytes = block_bytes_;
  disk_.emplace(std::move(options));
}

void HostCache::wait_for(BlockId host) {
  const std::uint64_t number = last_copied_[static_cast<std::size_t>(host.value)];
  // Steps wait for their copies, and earlier ones than the last two are over.
  if (number == 0 || num_steps_ - number >= steps_.size()) return;
  const Step& step = steps_[number % steps_.size()];
  link_->wait(step.saved);
  link_->wait(step.restored);
}

void HostCache::fetch(std::span<const BlockCopy> copies) {
  for (const BlockCopy& copy : copies) wait_for(copy.host);
  Step& step = steps_[++num_steps_ % steps_.size()];
  step = {};
  if (copies.empty()) return;
  step.saved = link_->to_host(pieces_of(copies, true));
  link_->wait(step.saved);
}

void HostCache::add_parts(BlockId host, std::vector<std::span<std::byte>>& parts) {
  wait_for(host);
  parts.push_back(block(host));
}

bool HostCache::write(const DiskCopy& copy) {
  wait_for(copy.host);
  return disk_->write(copy.slot.value, block(copy.host));
}

std::vector<DiskRead> HostCache::read(std::span<const DiskCopy> copies) {
  std::vector<std::int64_t> slots;
  for (const DiskCopy& copy : copies) slots.push_back(copy.slot.value);
  return disk_->read(slots, [&](std::size_t i, std::span<const std::byte> bytes) {
    wait_for(copies[i].host);
    std::ranges::copy(bytes, block(copies[i].host).begin());
  });
}

}  // namespace prl::engine
