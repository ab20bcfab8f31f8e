#include "ops/cuda/few_rows_kernel.cuh"

namespace prl::ops::cuda {
namespace {

template <int kRows>
void launch_rows_of_codes(const OpContext& ctx, const Product& p, const FewRowsArgs& a, const FewRowsFusion& fusion) {
  const auto run = [&]<bool kSwiglu, bool kOfExperts>() {
    few_rows::launch_kernel<kRows, Operands::kCodes>(
        ctx, p, a, kOfExperts ? fusion.experts->num_tiles : ceil_div(p.M, kRows),
        few_rows::few_rows_kernel<kRows, __nv_bfloat16, false, kSwiglu, AdapterPlace::kNone, kOfExperts, Operands::kCodes>);
  };
  if (fusion.experts != nullptr) return fusion.swiglu ? run.template operator()<true, true>() : run.template operator()<false, true>();
  fusion.swiglu ? run.template operator()<true, false>() : run.template operator()<false, false>();
}

}  // namespace

void launch_code_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, int rows, const FewRowsFusion& fusion) {
  switch (rows) {
    case 8: return launch_rows_of_codes<8>(ctx, p, a, fusion);
    case 16: return launch_rows_of_codes<16>(ctx, p, a, fusion);
    case 32: return launch_rows_of_codes<32>(ctx, p, a, fusion);
    case 64: return launch_rows_of_codes<64>(ctx, p, a, fusion);
    default: return launch_rows_of_codes<128>(ctx, p, a, fusion);
  }
}

}  // namespace prl::ops::cuda
