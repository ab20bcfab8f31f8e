#pragma once

#include "autograd/functions.hpp"
#include "ops/fused.hpp"

namespace prl::autograd {

/// `linear` and its neighbours in one pass. Undefined, and nothing is done, where the frame has a tape or the device has no such pass.
Var fused_linear(Frame& frame, const Var& x_TK, const LinearParameter& p, const ops::LinearFusion& fusion, TensorView out = {});

}  // namespace prl::autograd
