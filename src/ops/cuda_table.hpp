#pragma once

#include <memory>
#include <span>

#include "ops/op_table.hpp"
#include "ops/shard_group.hpp"

namespace prl::ops {

/// The bodies of NVIDIA GPUs, nullptr in a build without CUDA.
const OpTable* cuda_op_table();

/// make_shard_group() of GPUs.
std::unique_ptr<ShardGroup> make_cuda_shard_group(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes);

}  // namespace prl::ops
