#include "server/engine_backend.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::server {

EngineBackend::EngineBackend(engine::Engine& engine, WeightLoader loader, std::chrono::milliseconds timeout)
    : engine_(&engine), loader_(std::move(loader)), timeout_(timeout), base_weights_(engine.weights()) {}

engine::WeightProof Backend::proof_of(const std::string& adapter) {
  fail(ErrorCode::kNotFound, "there is no adapter '{}': none are served", adapter);
}

void Backend::set_tenant(const std::string&, const engine::TenantOptions&) {
  fail(ErrorCode::kNotImplemented, "this backend has no runs that share it");
}
void Backend::remove_tenant(const std::string&) { fail(ErrorCode::kNotImplemented, "this backend has no runs that share it"); }
std::int64_t Backend::cancel_tenant(const std::string&) { fail(ErrorCode::kNotImplemented, "this backend has no runs that share it"); }
std::vector<engine::TenantStats> Backend::tenants() { return {}; }

void EngineBackend::serve_adapters(AdapterBook::Loader adapter_loader, std::size_t max_in_memory) {
  adapters_.emplace(engine_->adapters(), std::move(adapter_loader), max_in_memory);
}

engine::WeightProof EngineBackend::proof_of(const std::string& adapter) {
  if (adapters_) adapters_->require(adapter);
  return engine_->proof_of(adapter, timeout_);
}

std::int64_t EngineBackend::max_model_len() const { return engine_->options().max_model_len; }
std::int64_t EngineBackend::vocab_size() const { return engine_->model_config().vocab_size; }
std::int64_t EngineBackend::max_open_requests() const { return engine_->options().max_queued_requests + engine_->options().max_num_seqs; }
RequestId EngineBackend::submit(wire::GenerateRequest request, engine::EventSink sink, const std::string& adapter) {
  return engine_->submit(std::move(request), std::move(sink), adapter);
}
void EngineBackend::cancel(RequestId id) { engine_->cancel(id); }
void EngineBackend::stop(RequestId id, std::string stop_string) { engine_->stop(id, std::move(stop_string)); }
engine::EngineStats EngineBackend::stats() const { return engine_->stats(); }
bool EngineBackend::is_alive(std::chrono::milliseconds max_age) const { return engine_->is_alive(max_age); }

engine::WeightProof EngineBackend::update_weights(WeightSource source, std::optional<PolicyVersion> version, bool may_go_back) {
  const nn::WeightsPtr previous = engine_->weights();
  if (!version) {
    const std::int64_t step = parse_step_dir(source.folder.filename().string());
    version = PolicyVersion{step >= 0 ? step : previous->version.value + 1};
  }
  if (*version < previous->version && !may_go_back)
    fail(ErrorCode::kAlreadyExists,
         "policy version {} is older than {}, which is in use; send \"force\": true to go back, or POST /reload_weights for the first "
         "weights",
         version->value, previous->version.value);
  return engine_->update_weights(loader_(source, *version, previous), timeout_);
}

engine::WeightProof EngineBackend::reload_weights() {
  const nn::WeightsPtr base =
      base_weights_ != nullptr ? base_weights_ : loader_({.folder = base_folder_, .store = ""}, PolicyVersion{0}, engine_->weights());
  return engine_->update_weights(base, timeout_);
}
engine::WeightProof EngineBackend::proof() { return engine_->proof(timeout_); }
void EngineBackend::pause() { engine_->pause(timeout_); }
void EngineBackend::resume() { engine_->resume(); }
void EngineBackend::set_tenant(const std::string& name, const engine::TenantOptions& options) { engine_->set_tenant(name, options); }
void EngineBackend::remove_tenant(const std::string& name) { engine_->remove_tenant(name); }
std::int64_t EngineBackend::cancel_tenant(const std::string& name) { return engine_->cancel_tenant(name); }
std::vector<engine::TenantStats> EngineBackend::tenants() { return engine_->tenants(timeout_); }
void EngineBackend::reset_prefix_cache() { engine_->reset_prefix_cache(); }

}  // namespace prl::server
