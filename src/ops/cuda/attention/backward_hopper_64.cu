#include "ops/cuda/attention/backward_hopper.cuh"

namespace prl::ops::cuda::hopper {

template void launch_backward<64>(const BackwardParams&, int, cudaStream_t);
template void launch_backward_kept<64>(const BackwardParams&, int, cudaStream_t);

}  // namespace prl::ops::cuda::hopper
