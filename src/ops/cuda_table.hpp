#pragma once

#include "ops/op_table.hpp"

namespace prl::ops {

/// The bodies of NVIDIA GPUs, nullptr in a build without CUDA.
const OpTable* cuda_op_table();

}  // namespace prl::ops
