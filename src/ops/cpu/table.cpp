#include "ops/cpu/table.hpp"

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "ops/cpu/bodies.hpp"

namespace prl::ops::cpu {
namespace {

constexpr std::array kKinds = {CpuKind::kPortable, CpuKind::kAvx2, CpuKind::kAvx512, CpuKind::kAvx512Bf16, CpuKind::kAmx};

Kernels kernels_of(CpuKind kind) {
#if defined(__x86_64__)
  if (kind == CpuKind::kAvx2) return kernels_avx2();
  if (kind == CpuKind::kPortable) return kernels_portable();
  Kernels k = kernels_avx512();
  if (kind == CpuKind::kAvx512Bf16) {
    k.gemm_bf16 = &gemm_bf16_avx512bf16();
    k.gemm_bf16_narrow = &gemm_bf16_narrow_avx512bf16();
    k.gemm_bf16_eight = &gemm_bf16_eight_avx512bf16();
  }
  if (kind == CpuKind::kAmx) {
    k.gemm_bf16 = &gemm_bf16_amx();
    k.gemm_bf16_eight = &gemm_bf16_eight_amx();
    k.attention_backward = attention_backward_amx;
    k.attention_backward_scratch_bytes = attention_backward_scratch_bytes_amx;
  }
  k.name = to_string(kind);
  return k;
#else
  PRL_CHECK(kind == CpuKind::kPortable);
  return kernels_portable();
#endif
}

/// One table per kind: the op bodies are shared, the kernels below them differ.
struct Tables {
  std::array<Kernels, kKinds.size()> kernels;
  std::array<std::string, kKinds.size()> names;
  std::array<OpTable, kKinds.size()> tables;

  Tables() {
    for (std::size_t i = 0; i < kKinds.size(); ++i) {
      if (!is_available(kKinds[i])) continue;
      kernels[i] = kernels_of(kKinds[i]);
      names[i] = std::string("cpu/") + to_string(kKinds[i]);
      tables[i] = OpTable{
          .name = names[i].c_str(),
          .bodies = &kernels[i],
#define PRL_OP(op) .op = op,
          PRL_FOR_EACH_OP(PRL_OP)
#undef PRL_OP
              .sum_squares = sum_squares,
          .finish_sample = finish_sample,
      };
    }
  }
};

}  // namespace

const char* to_string(CpuKind kind) {
  switch (kind) {
    case CpuKind::kPortable: return "portable";
    case CpuKind::kAvx2: return "avx2";
    case CpuKind::kAvx512: return "avx512";
    case CpuKind::kAvx512Bf16: return "avx512bf16";
    case CpuKind::kAmx: return "amx";
  }
  return "?";
}

bool is_available(CpuKind kind) {
  const CpuFeatures& f = cpu_features();
  switch (kind) {
    case CpuKind::kPortable: return true;
    case CpuKind::kAvx2: return f.avx2;
    case CpuKind::kAvx512: return f.avx512;
    case CpuKind::kAvx512Bf16: return f.avx512_bf16;
    case CpuKind::kAmx: return f.amx_bf16;
  }
  return false;
}

CpuKind chosen_kind() {
  if (const char* wanted = std::getenv("PRL_CPU"); wanted != nullptr && *wanted != '\0') {
    for (const CpuKind kind : kKinds) {
      if (std::string_view(wanted) != to_string(kind)) continue;
      if (!is_available(kind)) fail(ErrorCode::kInvalidArgument, "PRL_CPU={}: this CPU ({}) does not have it", wanted, cpu_features().name);
      return kind;
    }
    fail(ErrorCode::kInvalidArgument, "PRL_CPU={}: wanted one of portable, avx2, avx512, avx512bf16, amx", wanted);
  }
  CpuKind best = CpuKind::kPortable;
  for (const CpuKind kind : kKinds)
    if (is_available(kind)) best = kind;
  return best;
}

const OpTable& op_table(CpuKind kind) {
  static const Tables tables;
  PRL_CHECK(is_available(kind), "this CPU has no {}", to_string(kind));
  return tables.tables[static_cast<std::size_t>(kind)];
}

}  // namespace prl::ops::cpu
