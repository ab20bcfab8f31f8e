#include "ops/cuda/few_rows_kernel.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

template <int kRows>
void launch_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, bool swiglu) {
  const auto run = [&]<bool kNorm, bool kSwiglu>() {
    few_rows::launch_kernel<kRows, Operands::kWidened>(
        ctx, p, a, ceil_div(p.M, kRows),
        few_rows::few_rows_kernel<kRows, __nv_bfloat16, kNorm, kSwiglu, AdapterPlace::kNone, false, Operands::kWidened>);
  };
  if constexpr (kRows <= kMaxNormRows)
    if (a.norm != nullptr) return swiglu ? run.template operator()<true, true>() : run.template operator()<true, false>();
  swiglu ? run.template operator()<false, true>() : run.template operator()<false, false>();
}

}  // namespace

CUtensorMap codes_map(const Product& p, int columns, int blocks, bool swiglu) {
  constexpr std::int64_t kWords = 8 * kBlock / 4;  // of 8 outputs
  const std::int64_t eights = p.N / 8;
  const auto num_eights = static_cast<std::uint64_t>(eights), blocks_of_K = static_cast<std::uint64_t>(p.K / kBlock);
  const auto box_blocks = static_cast<std::uint32_t>(blocks);
  if (!swiglu)
    return words_map(
        p.b_codes.codes,
        {{kWords, num_eights, blocks_of_K}, {kWords, kWords * eights}, {kWords, static_cast<std::uint32_t>(columns / 8), box_blocks}});
  constexpr std::int64_t kHalf = kWords / 2;
  return words_map_5(p.b_codes.codes, {{kHalf, 2, 2, num_eights / 2, blocks_of_K},
                                       {kHalf, kHalf * eights, kWords, kWords * eights},
                                       {kHalf, 2, 2, static_cast<std::uint32_t>(columns / 16), box_blocks}});
}

void launch_eight_bit_rows(const OpContext& ctx, const Product& p, const FewRowsArgs& a, int rows, bool swiglu) {
  switch (rows) {
    case 8: return launch_rows<8>(ctx, p, a, swiglu);
    case 16: return launch_rows<16>(ctx, p, a, swiglu);
    default: return launch_rows<32>(ctx, p, a, swiglu);
  }
}

}  // namespace prl::ops::cuda
