#pragma once

#include "autograd/functions.hpp"
#include "ops/fused.hpp"

namespace prl::autograd {

/// `linear` fused with the ops around it. Undefined, with nothing done, if the frame has a tape or the device has no such kernel.
Var fused_linear(Frame& frame, const Var& x_TK, const LinearParameter& p, ops::LinearFusion fusion, TensorView out = {});

}  // namespace prl::autograd
