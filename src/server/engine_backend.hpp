#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <utility>

#include "server/backend.hpp"

namespace prl::server {

/// Makes weights that the engine can use; `previous` lends what versions share.
using WeightLoader = std::function<nn::WeightsPtr(const WeightSource& source, PolicyVersion version, const nn::WeightsPtr& previous)>;

/// Backend over an engine of this process, which it borrows.
class EngineBackend final : public Backend {
 public:
  /// `timeout` bounds each wait for the engine thread.
  EngineBackend(engine::Engine& engine, WeightLoader loader, std::chrono::milliseconds timeout = std::chrono::minutes(10));
  /// The first weights, for reload_weights(), are read again from `folder` when they are wanted: kept, they would take as much memory as
  /// those that are served.
  void reload_from(std::filesystem::path folder) {
    base_folder_ = std::move(folder);
    base_weights_ = nullptr;
  }
  /// From now on requests may name adapters; at most `max_in_memory` stay in memory. Before the first request.
  void serve_adapters(AdapterBook::Loader adapter_loader, std::size_t max_in_memory);
  /// Requests may exchange key-value blocks with other engines over `gate`, which is borrowed. Before the first request.
  void exchange_blocks(transfer::KvGate* gate) noexcept { gate_ = gate; }

  std::int64_t max_model_len() const override;
  std::int64_t vocab_size() const override;
  std::int64_t max_open_requests() const override;
  RequestId submit(wire::GenerateRequest request, engine::EventSink sink, const std::string& adapter) override;
  void cancel(RequestId id) override;
  void stop(RequestId id, std::string stop_string) override;
  engine::EngineStats stats() const override;
  bool is_alive(std::chrono::milliseconds max_age) const override;
  engine::WeightProof update_weights(WeightSource source, std::optional<PolicyVersion> version, bool may_go_back) override;
  engine::WeightProof reload_weights() override;
  engine::WeightProof proof() override;
  void pause() override;
  void resume() override;
  void reset_prefix_cache() override;
  void set_tenant(const std::string& name, const engine::TenantOptions& options) override;
  void remove_tenant(const std::string& name) override;
  std::int64_t cancel_tenant(const std::string& name) override;
  std::vector<engine::TenantStats> tenants() override;
  transfer::KvGate* kv() override { return gate_; }
  AdapterBook* adapters() override { return adapters_ ? &*adapters_ : nullptr; }
  engine::WeightProof proof_of(const std::string& adapter) override;

 private:
  engine::Engine* engine_;
  WeightLoader loader_;
  std::chrono::milliseconds timeout_;
  nn::WeightsPtr base_weights_;  ///< nullptr: base_folder_ has them
  std::filesystem::path base_folder_;
  std::optional<AdapterBook> adapters_;
  transfer::KvGate* gate_ = nullptr;
};

}  // namespace prl::server
