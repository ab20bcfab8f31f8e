#include "engine/kv_keys.hpp"

#include <fmt/format.h>

#include <utility>

namespace prl::engine {

KvKeys::KvKeys(std::unique_ptr<BlockExchange> exchange, Scheduler& scheduler, ModelRunner& runner, AdapterSet& adapters,
               std::function<void()> deliver)
    : exchange_(std::move(exchange)), scheduler_(scheduler), runner_(runner), adapters_(adapters), deliver_(std::move(deliver)) {}

KvIdentity KvKeys::identity(const std::string& adapter) {
  if (!checksum_) {
    deliver_();
    checksum_ = runner_.prove().checksum;
  }
  KvIdentity identity;
  identity.version = runner_.weights()->version;
  identity.checksum = *checksum_;
  identity.adapter = adapter;
  if (adapter.empty()) return identity;
  const ServedAdapterPtr served = find_adapter(adapter);
  identity.adapter_version = served->version;
  identity.adapter_hash = served->weights.hash;
  return identity;
}

BlockHash KvKeys::root(const std::string& cache_salt, const std::string& adapter) {
  return scheduler_.root_of(adapter.empty() ? AdapterKey{} : find_adapter(adapter)->key(), cache_salt);
}

ServedAdapterPtr KvKeys::find_adapter(const std::string& name) {
  if (adapters_.has_news()) {
    deliver_();
    adapters_.apply_news();
  }
  return adapters_.find(name);
}

std::string KvKeys::layout() const {
  const nn::WeightsPtr weights = runner_.weights();
  const nn::ModelConfig& model = weights->config;
  return fmt::format("{}; {} with {} layers, {} key-value heads of {}{}; {} in blocks of {} tokens and {} bytes on {} devices",
                     runner_.kernels(), model.model_type, model.num_layers, model.num_kv_heads, model.head_dim,
                     model.attends_to_latents ? " as latents" : "", to_string(weights->compute), exchange_->block_size(),
                     exchange_->block_bytes(), weights->others.size() + 1);
}

}  // namespace prl::engine
