#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/adapter_set.hpp"
#include "engine/block_exchange.hpp"
#include "engine/model_runner.hpp"
#include "engine/scheduler.hpp"

namespace prl::engine {

/// What blocks of this engine are to other engines, and those on their way. The engine's thread.
class KvKeys {
 public:
  /// `deliver`: waits for the step in flight.
  KvKeys(std::unique_ptr<BlockExchange> exchange, Scheduler& scheduler, ModelRunner& runner, AdapterSet& adapters,
         std::function<void()> deliver);

  BlockExchange& exchange() noexcept { return *exchange_; }
  /// What the model as it is, or with that adapter, is now. Error{kNotFound}.
  KvIdentity identity(const std::string& adapter);
  /// The hash before the first block of a prompt that is computed so. Error{kNotFound}.
  BlockHash root(const std::string& cache_salt, const std::string& adapter);
  /// KvDesk::layout().
  std::string layout() const;
  /// The weights have changed; these have proven to be this.
  void set_checksum(std::uint64_t checksum) noexcept { checksum_ = checksum; }

 private:
  /// With what was ordered of adapters carried out.
  ServedAdapterPtr find_adapter(const std::string& name);

  std::unique_ptr<BlockExchange> exchange_;
  Scheduler& scheduler_;
  ModelRunner& runner_;
  AdapterSet& adapters_;
  std::function<void()> deliver_;
  std::optional<std::uint64_t> checksum_;  ///< of the weights in use, if it is known
};

}  // namespace prl::engine
