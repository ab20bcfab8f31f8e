#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "engine/adapter_set.hpp"
#include "server/weight_source.hpp"

namespace prl::server {

/// What a server says of an adapter.
struct AdapterInfo {
  std::string name;
  WeightSource source;    ///< where it was loaded from
  PolicyVersion version;  ///< as it was said; else counts its loads, or the n of a folder step_<n>
};

/// The adapters that a server knows: their names, where they come from, and which of them are in host memory. All methods may be called
/// from any thread; those that load are slow.
class AdapterBook {
 public:
  /// Reads a folder, or asks a trainer for that version. Errors of nn::read_peft_adapter and weights::WeightReceiver::receive.
  using Loader = std::function<engine::AdapterWeights(const std::string& name, const WeightSource& source, PolicyVersion version)>;

  /// `set` is borrowed. At most `max_in_memory` adapters stay in memory; the least recently named one is loaded again when it is named.
  AdapterBook(engine::AdapterSet& set, Loader loader, std::size_t max_in_memory);

  /// Slow. Error{kAlreadyExists} for a name that is there, unless `may_replace`: the new weights then take effect between two steps. After
  /// any error nothing has changed.
  void load(const std::string& name, const WeightSource& source, bool may_replace, std::optional<PolicyVersion> version = {});
  /// Error{kNotFound}. Requests in flight go on.
  void unload(const std::string& name);
  /// Slow if it has left memory. Error{kNotFound} for an unknown name, those of the loader if it cannot be had any more.
  void require(const std::string& name);
  bool knows(const std::string& name) const;
  std::vector<AdapterInfo> list() const;

 private:
  struct Entry {
    WeightSource source;
    PolicyVersion version;
    std::uint64_t last_use = 0;
    bool is_in_memory = false;
  };
  /// Forgets the weights of those named least recently.
  void make_room();

  engine::AdapterSet* set_;
  Loader loader_;
  std::size_t max_in_memory_;
  std::mutex loading_;        ///< held while an adapter is loaded: one at a time
  mutable std::mutex mutex_;  ///< guards the fields below; never held while one is loaded
  std::map<std::string, Entry> entries_;
  std::uint64_t num_uses_ = 0;
};

}  // namespace prl::server
