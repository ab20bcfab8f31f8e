#pragma once

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.hpp"
#include "net/off_thread.hpp"
#include "orchestrator/policy_source.hpp"
#include "router/fleet.hpp"
#include "router/weight_updater.hpp"
#include "weights/weight_channel.hpp"

namespace prl::launch {

/// Largest difference seen between the trainer's and an engine's probe, over all updates; for the run's summary.
struct ProofLog {
  std::int64_t num_updates = 0;
  double max_probe_difference = 0;
  std::filesystem::path file;  ///< one line per proof is appended there; empty: nowhere
};
/// Of the file of proofs in a run's folder (docs/run-folder.md).
inline constexpr const char* kProofFile = "logs/weight_proofs.jsonl";

/// Engine and trainer in one process: the weights object changes hands, and the engine proves what it holds.
class LocalPolicySource final : public orchestrator::PolicySource {
 public:
  LocalPolicySource(std::shared_ptr<weights::VersionFeed> feed, engine::Engine& engine);
  orchestrator::asio::awaitable<std::optional<PolicyVersion>> wait_newer(PolicyVersion than, net::TimePoint deadline) override;
  orchestrator::asio::awaitable<void> apply(PolicyVersion version, net::TimePoint deadline) override;
  std::optional<PolicyVersion> newest() const override { return feed_->newest(); }
  std::string describe() const override { return "in-process trainer"; }
  void keep_versions(std::size_t count) override { feed_->keep(count); }
  /// Any thread.
  ProofLog proofs() const;
  /// Before the first update.
  void record_proofs_in(std::filesystem::path file);

 private:
  std::shared_ptr<weights::VersionFeed> feed_;
  engine::Engine& engine_;
  std::optional<weights::PublishedWeights> newest_;
  mutable std::mutex mutex_;
  ProofLog proofs_;
  // The engine answers an update only between two steps; a thread of its own waits for that, not the orchestrator's.
  net::OffThread thread_;
};

/// Engines behind HTTP, weights through folders: waits for a stable broadcast, has the updater tell every engine to load it, and compares
/// each engine's proof with the trainer's manifest.
class HttpPolicySource final : public orchestrator::PolicySource {
 public:
  struct Options {
    std::filesystem::path proof_file = {};  ///< ProofLog::file
    std::string store = {};                 ///< engines get the tensors from the trainer there; empty: from the folders
    std::string adapter = {};               ///< versions are of the adapter of this name; empty: of the model
  };
  HttpPolicySource(std::shared_ptr<weights::WeightChannel> channel, std::shared_ptr<router::Fleet> fleet,
                   std::shared_ptr<router::WeightUpdater> updater, Options options);
  orchestrator::asio::awaitable<std::optional<PolicyVersion>> wait_newer(PolicyVersion than, net::TimePoint deadline) override;
  orchestrator::asio::awaitable<void> apply(PolicyVersion version, net::TimePoint deadline) override;
  std::optional<PolicyVersion> newest() const override { return feed_ ? feed_->newest() : std::nullopt; }
  std::string describe() const override;
  std::string describe_engines() const override;
  void keep_versions(std::size_t count) override;
  /// Any thread.
  ProofLog proofs() const;

 private:
  /// Proofs come on several threads, and an engine's may come after this is gone.
  struct Proofs {
    mutable std::mutex mutex;
    ProofLog log;
  };
  std::shared_ptr<weights::WeightChannel> channel_;
  std::shared_ptr<weights::VersionFeed> feed_;  ///< from the first wait on: until then an earlier run's versions may still go
  std::shared_ptr<router::Fleet> fleet_;
  std::shared_ptr<router::WeightUpdater> updater_;
  const std::string store_, adapter_;
  std::optional<weights::PublishedWeights> newest_;
  std::size_t num_kept_ = 1;
  std::shared_ptr<Proofs> proofs_;
};

}  // namespace prl::launch
