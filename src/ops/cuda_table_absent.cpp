#include "ops/cuda_table.hpp"

namespace prl::ops {

const OpTable* cuda_op_table() { return nullptr; }

}  // namespace prl::ops
