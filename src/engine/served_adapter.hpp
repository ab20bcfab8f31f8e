#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/ids.hpp"
#include "engine/kv/block_pool.hpp"
#include "nn/peft.hpp"

namespace prl::engine {

/// An adapter's weights where they are: ready to compute with, and in host memory, from which they come back to a device that they left.
struct AdapterWeights {
  nn::AdapterPtr ready;         ///< nullptr: to be made of `stored` when it is first used
  nn::StoredAdapterPtr stored;  ///< nullptr: `ready` stays
  std::uint64_t hash = 0;       ///< of its values; 0: not known
};

/// An adapter that requests may name. Who holds it may go on with it after its name is gone. `name` and `id` never change; the rest is the
/// engine thread's, which changes it between two steps.
struct ServedAdapter {
  std::string name;
  std::uint64_t id = 0;           ///< never 0, never that of another adapter
  PolicyVersion version;          ///< what tokens carry
  std::uint64_t num_updates = 0;  ///< keys prefix blocks: a version may come twice with other weights
  AdapterWeights weights;
  std::uint64_t last_use = 0;  ///< the step, counted

  AdapterKey key() const noexcept { return {id, PolicyVersion{static_cast<std::int64_t>(num_updates)}}; }
};
using ServedAdapterPtr = std::shared_ptr<ServedAdapter>;

}  // namespace prl::engine
