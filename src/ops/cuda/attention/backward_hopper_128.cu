#include "ops/cuda/attention/backward_hopper.cuh"

namespace prl::ops::cuda::hopper {

template void launch_backward<128>(const BackwardParams&, int, cudaStream_t);
template void launch_backward_kept<128>(const BackwardParams&, int, cudaStream_t);

}  // namespace prl::ops::cuda::hopper
