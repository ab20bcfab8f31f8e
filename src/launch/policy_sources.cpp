#include "launch/policy_sources.hpp"

#include <fmt/format.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <fstream>

#include "base/log.hpp"

namespace prl::launch {
namespace asio = orchestrator::asio;
using std::chrono::milliseconds;

namespace {

milliseconds time_left(net::TimePoint deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now());
  return std::max(left, milliseconds(1));
}

/// Waits for a newer version and keeps what was published of it for apply().
asio::awaitable<std::optional<PolicyVersion>> wait_for(std::shared_ptr<weights::VersionFeed> feed, PolicyVersion than,
                                                       net::TimePoint deadline, std::optional<weights::PublishedWeights>* newest) {
  auto waiting = feed->wait_newer(than, deadline);
  auto found = co_await std::move(waiting);
  if (!found) co_return std::nullopt;
  *newest = std::move(found);
  co_return (*newest)->manifest.version;
}

/// A file that cannot be written costs the page a line, never the run.
void write_proof(const std::filesystem::path& file, const weights::WeightManifest& manifest, const weights::WeightProof& proof,
                 const std::string& who, bool is_proven) {
  std::error_code ignored;
  std::filesystem::create_directories(file.parent_path(), ignored);
  boost::json::object line{{"version", manifest.version.value},
                           {"engine", who},
                           {"is_proven", is_proven},
                           {"published_checksum", fmt::format("{:016x}", manifest.checksum)},
                           {"engine_checksum", fmt::format("{:016x}", proof.checksum)},
                           {"num_probe_tokens", manifest.probe_logprobs.size()}};
  const double difference = weights::max_probe_difference(manifest.probe_logprobs, proof.probe_logprobs);
  line["probe_difference"] = std::isfinite(difference) ? boost::json::value(difference) : boost::json::value(nullptr);
  std::ofstream(file, std::ios::app) << boost::json::serialize(line) + "\n";
}

void record(ProofLog& log, const weights::WeightManifest& manifest, const weights::WeightProof& proof, const std::string& who) {
  ++log.num_updates;
  log.max_probe_difference =
      std::max(log.max_probe_difference, weights::max_probe_difference(manifest.probe_logprobs, proof.probe_logprobs));
  auto error = weights::verify_proof(manifest, proof);
  if (!log.file.empty()) write_proof(log.file, manifest, proof, who, !error);
  if (error) throw error->with_context(who);
  log::debug("{} proved policy version {} (checksum {:016x})", who, manifest.version.value, manifest.checksum);
}

}  // namespace

LocalPolicySource::LocalPolicySource(std::shared_ptr<weights::VersionFeed> feed, engine::Engine& engine)
    : feed_(std::move(feed)), engine_(engine) {}

asio::awaitable<std::optional<PolicyVersion>> LocalPolicySource::wait_newer(PolicyVersion than, net::TimePoint deadline) {
  return wait_for(feed_, than, deadline, &newest_);
}

asio::awaitable<void> LocalPolicySource::apply(PolicyVersion version, net::TimePoint deadline) {
  PRL_CHECK(newest_ && newest_->manifest.version == version, "apply of a version that wait_newer did not answer");
  const weights::PublishedWeights published = *newest_;
  std::function<wire::WeightProof()> work = [published, engine = &engine_, timeout = time_left(deadline)] {
    return engine->update_weights(std::static_pointer_cast<const nn::Weights>(published.handle), timeout);
  };
  auto proving = thread_.run<wire::WeightProof>(std::move(work), deadline, "the in-process engine to take new weights");
  const wire::WeightProof proof = co_await std::move(proving);
  std::lock_guard lock(mutex_);
  record(proofs_, published.manifest, proof, "in-process engine");
}

void LocalPolicySource::record_proofs_in(std::filesystem::path file) { proofs_.file = std::move(file); }

ProofLog LocalPolicySource::proofs() const {
  std::lock_guard lock(mutex_);
  return proofs_;
}

HttpPolicySource::HttpPolicySource(std::shared_ptr<weights::WeightChannel> channel, std::shared_ptr<router::Fleet> fleet,
                                   std::shared_ptr<router::WeightUpdater> updater, Options options)
    : channel_(std::move(channel)),
      fleet_(std::move(fleet)),
      updater_(std::move(updater)),
      store_(std::move(options.store)),
      adapter_(std::move(options.adapter)),
      proofs_(std::make_shared<Proofs>()) {
  proofs_->log.file = std::move(options.proof_file);
}

asio::awaitable<std::optional<PolicyVersion>> HttpPolicySource::wait_newer(PolicyVersion than, net::TimePoint deadline) {
  if (!feed_) {
    feed_ = channel_->follow();
    feed_->keep(num_kept_);
  }
  return wait_for(feed_, than, deadline, &newest_);
}

asio::awaitable<void> HttpPolicySource::apply(PolicyVersion version, net::TimePoint deadline) {
  PRL_CHECK(newest_ && newest_->manifest.version == version, "apply of a version that wait_newer did not answer");
  router::WeightUpdate update;
  update.version = version;
  update.store = store_;
  update.adapter = adapter_;
  if (store_.empty()) update.folder = std::filesystem::absolute(newest_->folder).string();
  update.holds = [manifest = newest_->manifest](const std::string& reply) {
    return !weights::verify_proof(manifest, weights::parse_proof(reply, "an engine that came back"));
  };
  update.verify = [proofs = proofs_, manifest = newest_->manifest](const std::string& reply, const std::string& url) {
    const weights::WeightProof proof = weights::parse_proof(reply, url);
    std::lock_guard lock(proofs->mutex);
    record(proofs->log, manifest, proof, url);
  };
  auto applying = updater_->apply(std::move(update), deadline);
  co_await std::move(applying);
}

void HttpPolicySource::keep_versions(std::size_t count) {
  num_kept_ = count;
  if (feed_) feed_->keep(count);
}

std::string HttpPolicySource::describe_engines() const {
  const std::string pending = updater_->describe_pending();
  if (!pending.empty()) return pending;
  std::string urls;
  for (const router::EngineView& engine : fleet_->engines()) urls += (urls.empty() ? "" : ", ") + engine.url;
  return urls;
}

ProofLog HttpPolicySource::proofs() const {
  std::lock_guard lock(proofs_->mutex);
  return proofs_->log;
}

std::string HttpPolicySource::describe() const { return channel_->describe(); }

}  // namespace prl::launch
