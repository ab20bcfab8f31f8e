#include "ops/cuda/attention/forward_hopper.cuh"

// One file per size of head, so that they compile side by side.

namespace prl::ops::cuda::hopper {

template void launch_forward<64>(const ForwardParams&, bool, bool, int, int, cudaStream_t);

}  // namespace prl::ops::cuda::hopper
