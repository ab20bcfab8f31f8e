#pragma once

#include <cstdint>
#include <vector>

#include "nn/tensor_table.hpp"

// Devices that share the layers of a model: what each of them holds.

namespace prl::nn {

/// Error{kInvalidArgument} naming what does not divide, {kNotImplemented} naming what devices cannot share.
void check_shards(const ModelConfig& config, int size);
/// With the heads, those of linear attention too, and the width of the MLP that each of `size` devices has.
ModelConfig config_of_shard(const ModelConfig& config, int size);
/// Heads of keys and values that each of `size` devices has: one where there are fewer than devices, of which several have the same.
std::int64_t num_kv_heads_of_shard(const ModelConfig& config, int size) noexcept;
/// Which of the `num_rows` rows of a tensor that is shared a device holds. Rows of several kinds, as the queries, keys and values of one
/// matrix, are divided kind by kind, so that what a head or a channel needs is on one device.
std::vector<RowRun> held_rows(const ModelConfig& config, Slot slot, std::int64_t num_rows, Shard shard);

}  // namespace prl::nn
