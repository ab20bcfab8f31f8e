#pragma once

#include "ops/cpu/kernels.hpp"
#include "ops/op_table.hpp"

namespace prl::ops::cpu {

/// Which instructions the bodies use. Results of two kinds may differ in their last bits; a process uses one.
enum class CpuKind : std::uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

/// The best kind of this CPU, or what PRL_CPU=portable|avx2|avx512|avx512bf16|amx asks for.
/// Error{kInvalidArgument} if the variable names none or the CPU lacks it. Read at each call.
CpuKind chosen_kind();
bool is_available(CpuKind kind);
const char* to_string(CpuKind kind);

/// The op bodies of a kind that is available.
const OpTable& op_table(CpuKind kind);
inline const Kernels& kernels(const OpContext& ctx) { return *static_cast<const Kernels*>(ctx.table->bodies); }

}  // namespace prl::ops::cpu
