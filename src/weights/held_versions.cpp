#include "weights/held_versions.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"

namespace prl::weights {
namespace {

constexpr std::chrono::milliseconds kPoll{2};

}  // namespace

Tensor in_host_memory(const Tensor& values, DeviceRuntime& stream) {
  if (values.runtime()->device().kind == DeviceKind::kCpu) return values;
  const Tensor host = Tensor::empty(make_cpu_runtime(), values.shape(), values.dtype());
  stream.copy_to_host(host.data(), values.data(), values.num_bytes());
  return host;
}

HeldVersions::HeldVersions(std::int64_t num_kept, std::shared_ptr<DeviceRuntime> device, std::chrono::milliseconds timeout)
    : num_kept_(num_kept), device_(std::move(device)), timeout_(timeout) {
  if (device_ == nullptr) return;
  link_ = make_host_link(device_, /*page_locked=*/true);
  thread_ = std::jthread([this](const std::stop_token& stop) { copy_to_host(stop); });
}

HeldVersions::~HeldVersions() = default;

void HeldVersions::hold(std::int64_t version, Tensor values, std::vector<Share> others) {
  const std::int64_t num_all = values.num_elements();
  hold(version, Held{.values = std::move(values), .num_all = num_all, .ranges = {{0, num_all}}, .others = std::move(others)});
}

void HeldVersions::hold(std::int64_t version, Tensor values, ValueRanges ranges, std::int64_t num_all, std::vector<Share> others) {
  PRL_CHECK(num_values(ranges) == values.num_elements(), "{} values of ranges of {}", values.num_elements(), num_values(ranges));
  hold(version, Held{.values = std::move(values), .num_all = num_all, .ranges = std::move(ranges), .others = std::move(others)});
}

void HeldVersions::hold_adapter(std::int64_t version, Tensor image) {
  const std::int64_t num_bytes = image.num_elements();
  PRL_CHECK(image.dtype() == DType::kU8 && num_bytes > 0, "an adapter of {} values of {}", num_bytes, to_string(image.dtype()));
  hold(version, Held{.values = std::move(image), .num_all = num_bytes, .ranges = {{0, num_bytes}}, .others = {}, .is_adapter = true});
}

void HeldVersions::hold(std::int64_t version, Held given) {
  auto held = std::make_shared<Held>(std::move(given));
  const std::shared_ptr<DeviceRuntime> runtime = held->values.runtime();
  held->is_on_device = device_ != nullptr && runtime->device() == device_->device();
  if (held->is_on_device)
    runtime->synchronize();
  else
    held->values = in_host_memory(held->values, *runtime);
  Waiting waiting({.who = "the trainer", .what = "engines to have taken the former weights from its device", .limit = timeout_});
  while (!is_device_free()) {
    if (waiting.is_expired()) {
      log::warning("former weights are still on the device after {} s: engines take them slowly", timeout_.count() / 1000);
      break;
    }
    waiting.check();
    std::this_thread::sleep_for(kPoll);
  }
  const std::lock_guard lock(mutex_);
  if (!held_.empty() && held_.rbegin()->second->is_on_device) on_device_.push_back(held_.rbegin()->second);
  held_[version] = std::move(held);
  for (; static_cast<std::int64_t>(held_.size()) > num_kept_; held_.erase(held_.begin())) {
    if (device_ == nullptr || held_.begin()->second->is_on_device) continue;
    spares_.assign(1, std::move(held_.begin()->second));
  }
  has_more_.notify_one();
}

bool HeldVersions::is_device_free() {
  const std::lock_guard lock(mutex_);
  std::erase_if(on_device_, [](const std::weak_ptr<const Held>& held) { return held.expired(); });
  return on_device_.empty();
}

std::shared_ptr<const HeldVersions::Held> HeldVersions::find(std::int64_t version) const {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(version);
  return found == held_.end() ? nullptr : found->second;
}

std::int64_t HeldVersions::newest() const {
  const std::lock_guard lock(mutex_);
  return held_.empty() ? -1 : held_.rbegin()->first;
}

HeldVersions::Entry HeldVersions::former_on_device() {
  if (held_.empty()) return held_.end();
  const Entry newest = std::prev(held_.end());
  const Entry found = std::find_if(held_.begin(), newest, [](const auto& entry) { return entry.second->is_on_device; });
  return found == newest ? held_.end() : found;
}

Tensor HeldVersions::take_spare(const Tensor& like) {
  const std::vector<std::shared_ptr<const Held>> spares = std::exchange(spares_, {});
  // An engine may still be getting it.
  if (!spares.empty() && spares.front().use_count() == 1 && spares.front()->values.shape() == like.shape() &&
      spares.front()->values.dtype() == like.dtype())
    return spares.front()->values;
  return {};
}

Tensor HeldVersions::new_memory(const Tensor& like) {
  const std::shared_ptr<DeviceRuntime> host = make_cpu_runtime();
  if (link_ != nullptr) {
    try {
      const std::shared_ptr<void> memory = link_->allocate(like.num_bytes());
      return Tensor::borrow(host, memory, memory.get(), like.shape(), like.dtype());
    } catch (const Error& error) {
      log::warning("former weights are copied to ordinary host memory, which takes longer: {}", error.what());
      link_ = nullptr;
    }
  }
  return Tensor::empty(host, like.shape(), like.dtype());
}

void HeldVersions::copy_to_host(std::stop_token stop) {
  std::unique_lock lock(mutex_);
  while (has_more_.wait(lock, stop, [this] { return former_on_device() != held_.end(); })) {
    const std::int64_t version = former_on_device()->first;
    std::shared_ptr<const Held> from = former_on_device()->second;
    auto copy = std::make_shared<Held>(*from);
    copy->is_on_device = false;
    copy->values = take_spare(from->values);
    lock.unlock();
    try {
      if (!copy->values.defined()) copy->values = new_memory(from->values);
      if (link_ != nullptr)
        link_->wait(link_->to_host(copy->values.data(), from->values.data(), from->values.num_bytes()));
      else
        device_->copy_to_host(copy->values.data(), from->values.data(), from->values.num_bytes());
    } catch (const std::exception& error) {
      log::warning("policy v{} is not held for engines that lag: {}", version, error.what());
      copy.reset();
    }
    from.reset();
    lock.lock();
    const auto entry = held_.find(version);
    if (entry == held_.end()) continue;
    if (copy != nullptr)
      entry->second = std::move(copy);
    else
      held_.erase(entry);
  }
}

}  // namespace prl::weights
