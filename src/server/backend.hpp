#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "engine/engine.hpp"
#include "server/adapter_book.hpp"
#include "server/weight_source.hpp"
#include "transfer/kv_gate.hpp"

namespace prl::server {

/// The engine as the HTTP server sees it. One implementation drives engine::Engine (EngineBackend); tests script another.
/// All methods may be called from any thread; those that take long say so and are called from worker threads only.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::int64_t max_model_len() const = 0;
  /// Prompt ids must be below it.
  virtual std::int64_t vocab_size() const = 0;
  /// Requests, running and waiting, beyond which submit() is kOverloaded.
  virtual std::int64_t max_open_requests() const = 0;
  /// As engine::Engine::submit: kOverlong, kInvalidArgument, kOverloaded, kUnavailable.
  virtual RequestId submit(wire::GenerateRequest request, engine::EventSink sink, const std::string& adapter) = 0;
  virtual void cancel(RequestId id) = 0;
  virtual void stop(RequestId id, std::string stop_string) = 0;
  virtual engine::EngineStats stats() const = 0;
  virtual bool is_alive(std::chrono::milliseconds max_age) const = 0;

  /// Loads weights and swaps them in between two steps. Slow. Error{kNotFound, kCorrupt, kShape, kDeadline}, and PeerLost of a trainer.
  /// Without `version`: from a folder name step_<n>, else the current version plus one; weights of a trainer need one. A version below the
  /// current one is Error{kAlreadyExists} unless `may_go_back`. After any error the former weights are in use.
  virtual engine::WeightProof update_weights(WeightSource source, std::optional<PolicyVersion> version, bool may_go_back) = 0;
  /// Goes back to the weights the server started with. Slow.
  virtual engine::WeightProof reload_weights() = 0;
  /// What the engine holds now. Slow.
  virtual engine::WeightProof proof() = 0;
  /// Slow: waits for the step in progress.
  virtual void pause() = 0;
  virtual void resume() = 0;
  virtual void reset_prefix_cache() = 0;
  /// As the engine's, in which tenants are runs. Those of a backend without tenants fail with Error{kNotImplemented}.
  virtual void set_tenant(const std::string& name, const engine::TenantOptions& options);
  virtual void remove_tenant(const std::string& name);
  virtual std::int64_t cancel_tenant(const std::string& name);
  /// Slow.
  virtual std::vector<engine::TenantStats> tenants();
  /// nullptr: no adapters are served.
  virtual AdapterBook* adapters() { return nullptr; }
  /// nullptr: the engine exchanges no key-value blocks with others.
  virtual transfer::KvGate* kv() { return nullptr; }
  /// As proof(), of the model with that adapter. Slow. Error{kNotFound}.
  virtual engine::WeightProof proof_of(const std::string& adapter);
};

}  // namespace prl::server
