#include <condition_variable>
#include <mutex>

#include "weights/weight_channel.hpp"

namespace prl::weights {

namespace {

class LocalChannel final : public WeightChannel {
 public:
  void publish(Publication publication) override {
    std::lock_guard lock(mutex_);
    if (latest_ && publication.manifest == latest_->manifest) return;
    if (latest_ && publication.manifest.version <= latest_->manifest.version)
      fail(ErrorCode::kInvalidArgument, "[weights] version {} was published after version {}: versions only grow",
           publication.manifest.version.value, latest_->manifest.version.value);
    latest_ = PublishedWeights{std::move(publication.manifest), std::move(publication.handle), {}};
    changed_.notify_all();
  }
  std::optional<PublishedWeights> latest() override {
    std::lock_guard lock(mutex_);
    return latest_;
  }
  std::optional<PublishedWeights> wait_newer(PolicyVersion after, std::chrono::milliseconds timeout, std::stop_token stop) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, stop, timeout, [&] { return latest_ && latest_->manifest.version > after; })) return std::nullopt;
    return latest_;
  }
  std::string describe() const override { return "weights within the process"; }

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<PublishedWeights> latest_;
};

}  // namespace

std::shared_ptr<WeightChannel> make_local_channel() { return std::make_shared<LocalChannel>(); }

std::shared_ptr<WeightChannel> make_nccl_channel(const std::string& host, int port) {
  fail(ErrorCode::kNotImplemented,
       "[weight_broadcast] type 'nccl' ({}:{}) is not built: use 'filesystem', or 'local' when trainer and inference share a process", host,
       port);
}

}  // namespace prl::weights
