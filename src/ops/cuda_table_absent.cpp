#include "base/error.hpp"
#include "ops/cuda_table.hpp"

namespace prl::ops {

const OpTable* cuda_op_table() { return nullptr; }

std::unique_ptr<ShardGroup> make_cuda_shard_group(std::span<const std::shared_ptr<DeviceRuntime>>, std::size_t) {
  fail(ErrorCode::kNotImplemented, "this build has no CUDA");
}

}  // namespace prl::ops
