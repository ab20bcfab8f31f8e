#pragma once

#include "ops/context.hpp"

namespace prl::ops {

/// What this machine reaches with our own kernels and all threads of the context, measured, not computed: the base of MFU and
/// of the bandwidth lines of `prl doctor`.
struct MachinePeak {
  double f32_flops = 0;              ///< floating-point operations per second of large fp32 products
  double bf16_flops = 0;             ///< of large bf16 products
  double read_bytes_per_second = 0;  ///< reading memory far larger than the caches
};

/// Floating-point operations per second of large products of `dtype`. Takes about `seconds`; not to be called while the device does other
/// work.
double measure_flops(OpContext& ctx, DType dtype, double seconds = 0.15);

/// Bytes per second of reading memory far larger than the caches, the best of what fits into `seconds`. Not to be called while the device
/// does other work.
double measure_read(OpContext& ctx, double seconds = 0.2);

/// Takes about `seconds` in all (default: half a second). Not to be called while the device does other work.
MachinePeak measure_machine(OpContext& ctx, double seconds = 0.5);

}  // namespace prl::ops
