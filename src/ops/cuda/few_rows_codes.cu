#include "ops/cuda/few_rows_kernel.cuh"

namespace prl::ops::cuda {
namespace {

template <int kRows>
void launch_rows_of_codes(const OpContext& ctx, const Product& p, const FewRowsArgs& a, bool swiglu) {
  const auto run = [&]<bool kSwiglu>() {
    few_rows::launch_kernel<kRows, Operands::kCodes>(
        ctx, p, a, ceil_div(p.M, kRows),
        few_rows::few_rows_kernel<kRows, __nv_bfloat16, false, kSwiglu, AdapterPlace::kNone, false, Operands::kCodes>);
  };
  swiglu ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace

void launch_code_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, int rows, bool swiglu) {
  switch (rows) {
    case 8: return launch_rows_of_codes<8>(ctx, p, a, swiglu);
    case 16: return launch_rows_of_codes<16>(ctx, p, a, swiglu);
    case 32: return launch_rows_of_codes<32>(ctx, p, a, swiglu);
    case 64: return launch_rows_of_codes<64>(ctx, p, a, swiglu);
    default: return launch_rows_of_codes<128>(ctx, p, a, swiglu);
  }
}

}  // namespace prl::ops::cuda
