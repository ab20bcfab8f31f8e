#include "ops/test_support.hpp"

// The CPU's side of test_support.hpp; that of the GPU is cuda/kinds_test.cpp.

namespace prl::ops::testing {

Kind default_kind() { return cpu::chosen_kind(); }

std::vector<Kind> available_kinds() {
  std::vector<Kind> out;
  for (const auto kind :
       {cpu::CpuKind::kPortable, cpu::CpuKind::kAvx2, cpu::CpuKind::kAvx512, cpu::CpuKind::kAvx512Bf16, cpu::CpuKind::kAmx})
    if (cpu::is_available(kind)) out.push_back(kind);
  return out;
}

std::shared_ptr<DeviceRuntime> make_runtime(Kind) { return make_cpu_runtime(); }
const OpTable& table_of(Kind kind) { return cpu::op_table(kind.cpu); }

}  // namespace prl::ops::testing
