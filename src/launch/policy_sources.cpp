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

/// An update that fails ends the run, so a server that is busy for some seconds is asked more often than a client does by itself.
constexpr int kUpdateRetries = 5;

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

HttpPolicySource::HttpPolicySource(std::shared_ptr<weights::WeightChannel> channel, std::shared_ptr<net::HttpClient> client,
                                   Options options)
    : channel_(std::move(channel)), client_(std::move(client)), options_(std::move(options)) {
  proofs_.file = options_.proof_file;
}

asio::awaitable<std::optional<PolicyVersion>> HttpPolicySource::wait_newer(PolicyVersion than, net::TimePoint deadline) {
  if (!feed_) feed_ = channel_->follow();
  return wait_for(feed_, than, deadline, &newest_);
}

/// The client compares each reply's run id: a server that is not the run's own ends it here, before anything is written to it.
asio::awaitable<void> HttpPolicySource::verify_servers() {
  if (!options_.verify_identity || is_verified_) co_return;
  for (const std::string& url : options_.admin_urls) {
    net::HttpCall call;
    call.url = url + "/health";
    auto calling = client_->call(std::move(call));
    const net::HttpReply reply = co_await std::move(calling);
    reply.raise_for_status(fmt::format("health of {}", url));
  }
  is_verified_ = true;
}

asio::awaitable<void> HttpPolicySource::apply(PolicyVersion version, net::TimePoint deadline) {
  PRL_CHECK(newest_ && newest_->manifest.version == version, "apply of a version that wait_newer did not answer");
  const weights::PublishedWeights published = *newest_;
  auto verifying = verify_servers();
  co_await std::move(verifying);
  for (const std::string& url : options_.admin_urls) {
    updating_ = url;
    net::HttpCall call;
    call.method = "POST";
    call.url = url + "/update_weights";
    call.body = boost::json::serialize(
        boost::json::object{{"weight_dir", std::filesystem::absolute(published.folder).string()},
                            {"version", version.value},
                            // A server that outlived an earlier run may hold a later version: the run that begins takes it over.
                            {"force", proofs_.num_updates < static_cast<std::int64_t>(options_.admin_urls.size())}});
    call.timeout = time_left(deadline);
    call.max_retries = kUpdateRetries;
    if (!options_.api_key.empty()) call.bearer = options_.api_key;
    auto calling = client_->call(std::move(call));
    const net::HttpReply reply = co_await std::move(calling);
    reply.raise_for_status(fmt::format("weight update of {}", url));
    record(proofs_, published.manifest, weights::parse_proof(reply.body, url), url);
  }
  updating_.clear();
}

std::string HttpPolicySource::describe_engines() const {
  return updating_.empty() ? fmt::format("{}", fmt::join(options_.admin_urls, ", ")) : updating_;
}

std::string HttpPolicySource::describe() const { return channel_->describe(); }

}  // namespace prl::launch
