#include "ops/cuda/attention/decode_hopper.cuh"

namespace prl::ops::cuda::hopper {

template <>
void launch_decode<64>(const ForwardParams& p, int num_items, int num_multiprocessors, cudaStream_t stream) {
  launch_decoding<64>(p, num_items, num_multiprocessors, stream);
}

}  // namespace prl::ops::cuda::hopper
