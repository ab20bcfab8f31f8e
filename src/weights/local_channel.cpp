#include <mutex>
#include <vector>

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
    std::erase_if(feeds_, [](const auto& feed) { return feed.expired(); });
    for (const auto& feed : feeds_)
      if (const auto alive = feed.lock()) alive->push(*latest_);
  }
  std::optional<PublishedWeights> latest() override {
    std::lock_guard lock(mutex_);
    return latest_;
  }
  std::shared_ptr<VersionFeed> follow() override {
    std::lock_guard lock(mutex_);
    const auto feed = std::make_shared<VersionFeed>(describe());
    if (latest_) feed->push(*latest_);
    feeds_.push_back(feed);
    return feed;
  }
  std::string describe() const override { return "weights within the process"; }

 private:
  std::mutex mutex_;
  std::optional<PublishedWeights> latest_;
  std::vector<std::weak_ptr<VersionFeed>> feeds_;
};

}  // namespace

std::shared_ptr<WeightChannel> make_local_channel() { return std::make_shared<LocalChannel>(); }

}  // namespace prl::weights
