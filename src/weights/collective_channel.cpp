#include "weights/collective_channel.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/communicator.hpp"
#include "comm/store.hpp"
#include "weights/transfer.hpp"

namespace prl::weights {
namespace {

std::shared_ptr<WeightChannel> announcements_in(std::filesystem::path folder, std::int64_t keep_versions) {
  return make_file_channel({.folder = std::move(folder), .keep_versions = keep_versions, .keep_interval = {}});
}

/// A folder that holds no tensors.
void announce(WeightChannel& files, Publication publication) {
  publication.save = [](const std::filesystem::path& folder) { std::filesystem::create_directories(folder); };
  files.publish(std::move(publication));
}

class Channel final : public CollectiveChannel {
 public:
  explicit Channel(CollectiveChannelOptions options)
      : where_(broadcast_address(options.server.host, options.server.port)),
        files_(announcements_in(std::move(options.folder), options.server.keep_versions)),
        server_(std::move(options.server)) {}

  void publish(Publication publication) override {
    PRL_CHECK(publication.flat != nullptr, "a publication to engines over a group needs the values");
    const std::int64_t version = publication.manifest.version.value;
    if (publication.is_adapter) {
      server_.versions().hold_adapter(version, publication.flat());
    } else if (!publication.ranges) {
      server_.versions().hold(version, publication.flat(), std::move(publication.others));
    } else {
      std::int64_t num_all = num_values(*publication.ranges);
      for (const Share& share : publication.others) num_all += num_values(share.ranges);
      server_.versions().hold(version, publication.flat(), std::move(*publication.ranges), num_all, std::move(publication.others));
    }
    announce(*files_, std::move(publication));
  }
  std::optional<PublishedWeights> latest() override { return files_->latest(); }
  std::shared_ptr<VersionFeed> follow() override { return files_->follow(); }
  std::string describe() const override { return "weights from " + where_; }
  void wait_until_released(std::stop_token stop) override { server_.wait_until_released(std::move(stop)); }
  std::string address() override { return server_.address(); }

 private:
  std::string where_;
  std::shared_ptr<WeightChannel> files_;
  WeightServer server_;
};

class AdapterChannel final : public WeightChannel {
 public:
  AdapterChannel(std::filesystem::path folder, std::shared_ptr<WeightServer> server, std::string name, std::int64_t keep_versions)
      : files_(announcements_in(std::move(folder), keep_versions)),
        server_(std::move(server)),
        name_(std::move(name)),
        versions_(server_->versions_of(name_, keep_versions)) {}

  void publish(Publication publication) override {
    PRL_CHECK(publication.is_adapter && publication.flat != nullptr, "of several policies each is an adapter");
    versions_->hold_adapter(publication.manifest.version.value, publication.flat());
    announce(*files_, std::move(publication));
  }
  std::optional<PublishedWeights> latest() override { return files_->latest(); }
  std::shared_ptr<VersionFeed> follow() override { return files_->follow(); }
  std::string describe() const override { return fmt::format("adapter '{}' from {}", name_, server_->address()); }

 private:
  std::shared_ptr<WeightChannel> files_;
  std::shared_ptr<WeightServer> server_;
  std::string name_;
  std::shared_ptr<HeldVersions> versions_;
};

[[noreturn]] void fail_without_gloo() {
  fail(ErrorCode::kUnavailable, "weight_broadcast.type = \"nccl\" needs a build with Gloo (libgloo-dev)");
}

}  // namespace

std::string broadcast_address(const std::string& host, int port) { return fmt::format("tcp://{}:{}", bind_host(host), port); }

std::shared_ptr<CollectiveChannel> make_collective_channel(CollectiveChannelOptions options) {
  if (!comm::has_gloo()) fail_without_gloo();
  return std::make_shared<Channel>(std::move(options));
}

std::shared_ptr<WeightChannel> make_adapter_channel(std::filesystem::path folder, std::shared_ptr<WeightServer> server, std::string name,
                                                    std::int64_t keep_versions) {
  if (!comm::has_gloo()) fail_without_gloo();
  return std::make_shared<AdapterChannel>(std::move(folder), std::move(server), std::move(name), keep_versions);
}

void release_weights(const std::string& address) noexcept {
  try {
    comm::make_store(address, std::chrono::milliseconds(1000))->set(kReleased, "1");
  } catch (const std::exception& error) {
    log::debug("the trainer at {} is not there any more: {}", address, error.what());
  }
}

}  // namespace prl::weights
