#include "ops/cuda/launch.hpp"

#include "device/cuda/cuda_runtime.hpp"

namespace prl::ops::cuda {

namespace {
::prl::cuda::CudaRuntime& runtime_of(const OpContext& ctx) { return ::prl::cuda::runtime_of(*ctx.runtime); }
}  // namespace

const cudaDeviceProp& properties_of(const OpContext& ctx) { return runtime_of(ctx).properties(); }
int num_multiprocessors(const OpContext& ctx) { return properties_of(ctx).multiProcessorCount; }
::prl::cuda::FaultWord* fault_word_of(const OpContext& ctx) { return runtime_of(ctx).fault_word(); }

const void* staged_bytes(const OpContext& ctx, const void* host, std::size_t bytes) { return runtime_of(ctx).stage(host, bytes); }

}  // namespace prl::ops::cuda
