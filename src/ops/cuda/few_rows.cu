#include "ops/cuda/few_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "ops/cuda/few_rows_kernel.cuh"
#include "ops/cuda/tensor_map.hpp"

namespace prl::ops::cuda {
namespace {

using namespace few_rows;

/// Of a multiprocessor. Blocks of which each has one to itself take all; else two share it, and one computes while the other copies.
constexpr int kSharedBytes = 224 * 1024;

template <int kRows>
void launch(const OpContext& ctx, const Product& p, const FewRowsArgs& a, const FewRowsFusion& fusion, bool is_apart) {
  const bool swiglu = fusion.swiglu;
  using Bf16 = __nv_bfloat16;
  const std::int64_t row_tiles = fusion.experts != nullptr ? fusion.experts->num_tiles : ceil_div(p.M, kRows);
  const auto run = [&](auto kernel) { launch_kernel<kRows, Operands::kBf16>(ctx, p, a, row_tiles, kernel); };
  if (fusion.experts != nullptr) {
    constexpr AdapterPlace kNone = AdapterPlace::kNone;
    return swiglu ? run(few_rows_kernel<kRows, Bf16, false, true, kNone, true>)
                  : run(few_rows_kernel<kRows, Bf16, false, false, kNone, true>);
  }
  if (p.out_dtype == DType::kF32) return run(few_rows_kernel<kRows, float, false, false, AdapterPlace::kNone>);
  const auto of = [&]<bool kNorm>() {
    using enum AdapterPlace;
    if (a.adapter == nullptr)
      return swiglu ? run(few_rows_kernel<kRows, Bf16, kNorm, true, kNone>) : run(few_rows_kernel<kRows, Bf16, kNorm, false, kNone>);
    if (swiglu) return run(few_rows_kernel<kRows, Bf16, kNorm, true, kApart>);
    is_apart ? run(few_rows_kernel<kRows, Bf16, kNorm, false, kApart>) : run(few_rows_kernel<kRows, Bf16, kNorm, false, kBehind>);
  };
  if constexpr (kRows <= kMaxNormRows)
    if (a.norm != nullptr) return of.template operator()<true>();
  of.template operator()<false>();
}

/// The weights of gate and up, 8 columns of each in turns, and `more_rows` behind them.
CUtensorMap gate_up_map(const Product& p, std::int64_t more_rows, int box_columns, int box_blocks) {
  const auto eights = static_cast<std::uint64_t>((p.N / 2 + more_rows) / 8);
  return tensor_map_5(p.b,
                      MapShapeOf<5>{{kBlock, 8, 2, eights, static_cast<std::uint64_t>(p.K / kBlock)},
                                    {p.b_stride, p.N / 2 * p.b_stride, 8 * p.b_stride, kBlock},
                                    {kBlock, 8, 2, static_cast<std::uint32_t>(box_columns / 16), static_cast<std::uint32_t>(box_blocks)}});
}

/// Steps along K that fit into a block's share of shared memory.
int slots_of(const FewRowsTile& t, std::int64_t K, int shared_bytes, Operands operands = Operands::kBf16) {
  const int blocks = blocks_per_slot(t.rows, operands), slot_bytes = blocks * (t.rows + t.columns + t.ranks) * kRowBytes + 16;
  const std::int64_t room = (shared_bytes - kSpan * kRowBytes - (t.ranks > 0 ? adapter_bytes(t.rows) + 16 : 0)) / slot_bytes;
  return static_cast<int>(std::clamp<std::int64_t>(room, 1, ceil_div(K, blocks * kBlock)));
}

/// The same where weights are codes: few slots of what has been widened, which only what widens and what computes wait for, and all others
/// of codes, which come from memory. Sets the tile's, even numbers of both; false if there is no room for them.
bool fit_codes(FewRowsTile& t, std::int64_t K, bool has_norm, int shared_bytes) {
  const int blocks = blocks_per_slot(t.rows, Operands::kWidened), row_bytes = blocks * t.rows * kRowBytes,
            code_bytes = blocks * t.columns * kBlock + 16;
  const int steps = static_cast<int>(ceil_div(K, blocks * kBlock));
  const auto even = [&](int most) { return steps == 1 ? 1 : most / 2 * 2; };
  for (int slots = even(std::min(8, steps)); slots >= even(2); slots -= 2) {
    const int of_rows = std::max((has_norm ? steps : slots) * row_bytes, (kSpan - t.columns) * kRowBytes);
    const int room = (shared_bytes - slots * (blocks * t.columns * kRowBytes + 16) - of_rows) / code_bytes;
    if (room < std::min(steps, slots > 2 ? 4 : 2)) continue;
    t.slots = slots;
    t.code_slots = even(std::min(room, steps));
    return true;
  }
  return false;
}

/// A product of codes as copies see it: two by two as numbers of 16 bits.
Product as_pairs(const Product& p) {
  if (p.in_dtype != DType::kU8) return p;
  Product pairs = p;
  pairs.in_dtype = DType::kBF16;
  for (std::int64_t* count : {&pairs.K, &pairs.a_stride, &pairs.b_stride}) *count /= 2;
  return pairs;
}

/// Nanoseconds, by the bytes that the copies load: a from the second-level cache once the earlier kernels have ended; b about half before
/// that.
double copy_time(const Product& p, int rows, int columns, int ranks, bool eight, int processors) {
  constexpr double kCacheBytes = 5500.0, kProcessorBytes = 112.0;  // per nanosecond, of the device and of one multiprocessor; measured
  const std::int64_t blocks = ceil_div(p.M, rows) * ceil_div(p.N, columns);
  const double block_bytes = (2 * rows + columns / (eight ? 2.0 : 1.0) + ranks) * static_cast<double>(p.K);
  return std::max(static_cast<double>(blocks) * block_bytes / kCacheBytes,
                  static_cast<double>(ceil_div(blocks, processors)) * block_bytes / kProcessorBytes);
}

LoraParts parts_of(const LoraWeight& w) {
  LoraParts out{};
  out.num_parts = static_cast<int>(w.parts.size());
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    out.first_output[i] = static_cast<int>(w.parts[i].first_output);
    out.num_outputs[i] = static_cast<int>(w.parts[i].num_outputs);
    out.first_rank[i] = static_cast<int>(w.parts[i].first_rank);
    out.rank[i] = static_cast<int>(w.parts[i].rank);
  }
  return out;
}
/// Rows of A that a block of such a tile needs at most; nothing if they find no room.
std::optional<int> ranks_of_tile(const Product& p, const FewRowsFusion& fusion, int rows, int columns) {
  if (fusion.lora == nullptr) return 0;
  const LoraParts parts = parts_of(*fusion.lora->single);
  const auto padded_ranks = [&](auto&& counts) {
    int sum = 0;
    for (int part = 0; part < parts.num_parts; ++part) sum += counts(part) ? padded_rank(parts.rank[part]) : 0;
    return sum;
  };
  // Parts do not overlap, so that no block needs more than one of those in which a part begins. Blocks of gate and up may lie in all.
  int ranks = fusion.swiglu ? padded_ranks([](int) { return true; }) : 0;
  for (int begins = 0; begins < parts.num_parts && !fusion.swiglu; ++begins) {
    const int block = parts.first_output[begins] / columns;
    ranks = std::max(ranks, padded_ranks([&](int part) { return is_in_part(parts, part, block, columns, static_cast<int>(p.N), false); }));
  }
  // A product of A alone costs as much as one of 64 columns. Measured, decoding of 32 sequences: `qkv` of 1,024 inputs in 64 columns with A
  // apart makes 1.20 of the cost without adapters for 1.26 in 32 with A behind them; of 2,560 inputs 1.24 for 1.22.
  constexpr std::int64_t kMaxApartInputs = 2048;
  const bool has_room = columns + ranks <= kSpan || fusion.swiglu || p.K <= kMaxApartInputs;
  if (ranks > (rows >= 64 ? 32 : kSpan) || !has_room) return std::nullopt;
  return ranks;
}
/// Whether the adapter's parts are such that columns of a lane, pairs of neighbours, lie in one.
bool has_even_parts(const LoraWeight& w) {
  return w.parts.size() <= kMaxLoraParts && std::ranges::all_of(w.parts, [](const LoraPart& part) {
           return part.first_output % 8 == 0 && part.num_outputs % 8 == 0 && part.rank <= kSpan;
         });
}

}  // namespace

std::optional<FewRowsTile> few_rows_tile(const Product& given, const cudaDeviceProp& device, const FewRowsFusion& fusion) {
  const Product p = as_pairs(given);
  const Operands operands = p.a_factors != nullptr ? Operands::kCodes : Operands::kBf16;
  if (operands == Operands::kCodes && (fusion.norm != nullptr || fusion.lora != nullptr || p.out_dtype != DType::kBF16))
    return std::nullopt;
  if (device.major != 9 || p.M > kMaxFewRows || p.M * p.N > max_few_rows_outputs(p.M, p.K) || p.K % kBlock != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.may_split || p.accumulate || p.transpose_a || !p.transpose_b) return std::nullopt;
  if (fusion.norm != nullptr && (p.M > kMaxNormRows || p.K > kMaxNormColumns || fusion.rows_are_there != nullptr)) return std::nullopt;
  if (fusion.is_any() && p.out_dtype != DType::kBF16) return std::nullopt;
  if (fusion.swiglu && (p.N % 16 != 0 || p.bias != nullptr || fusion.residual != nullptr)) return std::nullopt;
  if (fusion.lora != nullptr &&
      (p.out_dtype != DType::kBF16 || fusion.lora->tiles.shape.num_rows() == 0 || !has_even_parts(*fusion.lora->single)))
    return std::nullopt;
  const int unit = fusion.swiglu ? 16 : 8;
  const int processors = device.multiProcessorCount;
  const bool eight = p.b_codes.codes != nullptr && p.M <= kMaxEightBitRows && fusion.lora == nullptr && p.out_dtype == DType::kBF16;
  FewRowsTile best;
  double best_time = 0;
  for (int rows = 8; rows <= 128 && (rows == 8 || rows < 2 * p.M); rows *= 2)
    for (int columns = unit; columns <= 64; columns += unit) {
      const std::optional<int> ranks = ranks_of_tile(p, fusion, rows, columns);
      if (!ranks) continue;
      const double time = copy_time(p, rows, columns, *ranks, eight, processors);
      if (best_time > 0 && time >= best_time) continue;
      best_time = time;
      best = {.rows = rows, .columns = columns};
    }
  if (best_time == 0) return std::nullopt;
  const auto blocks_with = [&](int columns) { return ceil_div(p.M, best.rows) * ceil_div(p.N, columns); };
  // Blocks of the next product that find no processor free begin when these end, and then wait for their weights. Measured for up to four
  // rows: `o` and `down` of one sequence in 32 columns for 24, 2,001 tok/s for 1,935.
  while (p.M <= 4 && best.columns + unit <= 64 && ranks_of_tile(p, fusion, best.rows, best.columns + unit) &&
         4 * blocks_with(best.columns) > processors)
    best.columns += unit;
  // Measured: 128 rows of gate and up are faster in 128 blocks of 48 columns than in 96 of 64. `qkv`, which attention begins beside, is
  // not.
  while (fusion.swiglu && best.rows == 128 && best.columns > unit && blocks_with(best.columns - unit) <= processors) best.columns -= unit;
  best.ranks = ranks_of_tile(p, fusion, best.rows, best.columns).value_or(0);
  const bool is_one_wave = blocks_with(best.columns) <= processors;
  const int shared_bytes = kSharedBytes - (fusion.rows_are_there != nullptr ? kBesideBytes : 0);
  if (eight && (fit_codes(best, p.K, fusion.norm != nullptr, is_one_wave ? shared_bytes : shared_bytes / 2) ||
                fit_codes(best, p.K, fusion.norm != nullptr, shared_bytes)))
    return best;
  best.slots = slots_of(best, p.K, is_one_wave ? shared_bytes : shared_bytes / 2, operands);
  // Many ranks leave two blocks of a multiprocessor too little room: a slot is given back only after the products of the next have begun.
  if (best.slots < 2) best.slots = slots_of(best, p.K, shared_bytes, operands);
  if (best.slots < 2 && p.K > blocks_per_slot(best.rows, operands) * kBlock) return std::nullopt;
  return best;
}

std::optional<FewRowsTile> expert_rows_tile(const Product& given, const cudaDeviceProp& device, const RowsOfExperts& experts, int rows,
                                            bool swiglu) {
  const Product p = as_pairs(given);
  const Operands operands = given.in_dtype == DType::kU8 ? Operands::kCodes : Operands::kBf16;
  const int unit = swiglu ? 16 : 8;
  if (device.major != 9 || p.K % kBlock != 0 || p.N % unit != 0 || experts.rows_apart % 8 != 0) return std::nullopt;
  if (p.in_dtype != DType::kBF16 || p.out_dtype != DType::kBF16 || p.bias != nullptr) return std::nullopt;
  const int processors = device.multiProcessorCount;
  FewRowsTile tile{.rows = rows, .columns = kSpan};
  while (tile.columns > unit && experts.num_tiles * ceil_div(p.N, tile.columns) < processors) tile.columns -= unit;
  tile.slots = slots_of(tile, p.K, kSharedBytes / 2, operands);
  if (tile.slots < 2) tile.slots = slots_of(tile, p.K, kSharedBytes, operands);
  return tile;
}

void few_rows_product(const OpContext& ctx, const Product& given, const FewRowsTile& t, const FewRowsFusion& fusion) {
  const Product p = as_pairs(given);
  FewRowsArgs a{};
  const bool eight = t.code_slots > 0;
  const Operands operands = eight ? Operands::kWidened : p.a_factors != nullptr ? Operands::kCodes : Operands::kBf16;
  const int blocks = blocks_per_slot(t.rows, operands);
  const bool is_apart = t.ranks > 0 && (fusion.swiglu || t.columns + t.ranks > kSpan);
  const std::int64_t more_rows = fusion.experts != nullptr ? (fusion.experts->num_experts - 1) * fusion.experts->rows_apart : 0;
  a.weights = eight           ? codes_map(p, t.columns, blocks, fusion.swiglu)
              : fusion.swiglu ? gate_up_map(p, more_rows, t.columns, blocks)
                              : rows_map(p.b, p.N + more_rows, p.K, p.b_stride, t.columns, t.ranks > 0 && !is_apart ? 1 : blocks);
  if (fusion.experts != nullptr) {
    a.row_tiles = fusion.experts->tiles;
    a.rows_apart = static_cast<int>(fusion.experts->rows_apart);
    a.row_factors = fusion.experts->factors;
  }
  a.out = p.out;
  if (fusion.lora != nullptr) {
    a.adapted_bias = p.bias;
    a.adapter = reinterpret_cast<const LoraEntryMemory*>(fusion.lora->single_entry.as<char>());
    a.parts = parts_of(*fusion.lora->single);
    a.tiles = fusion.lora->tiles.as<std::int32_t>();
    a.num_tiles = static_cast<int>(fusion.lora->tiles.shape.num_rows());
    a.ranks = t.ranks;
  } else {
    a.bias = p.bias;
  }
  a.out_stride = p.out_stride;
  a.M = static_cast<int>(p.M);
  a.N = static_cast<int>(fusion.swiglu ? p.N / 2 : p.N);
  a.K = static_cast<int>(p.K);
  a.num_steps = static_cast<int>(ceil_div(p.K, blocks * kBlock));
  a.columns = t.columns;
  a.slots = t.slots;
  // A slot is given back only after the products of the next one have begun.
  if (a.num_steps > 1 && a.slots < 2)
    fail(ErrorCode::kShape, "[ops] {} slots for {} steps of a product, at least 2 are wanted", a.slots, a.num_steps);
  // Each is of one of the groups that take turns in widening: with two of them a slot's barrier could be a phase further than one sees.
  if (eight && a.num_steps > 1 && (a.slots % kWideners != 0 || t.code_slots % kWideners != 0))
    fail(ErrorCode::kShape, "[ops] {} and {} slots for codes, multiples of {} are wanted", a.slots, t.code_slots, kWideners);
  a.residual = static_cast<const __nv_bfloat16*>(fusion.residual);
  a.residual_stride = fusion.residual_stride;
  a.is_wide = a.N % 8 == 0 && p.out_stride % 8 == 0 && is_aligned(p.out, 16);
  if (a.residual != nullptr) a.is_wide = a.is_wide && a.residual_stride % 8 == 0 && is_aligned(a.residual, 16);
  a.rows_are_there = fusion.rows_are_there;
  a.norm = fusion.norm;
  a.eps = fusion.eps;
  a.inverse_K = 1.0f / static_cast<float>(p.K);
  if (fusion.norm != nullptr) {
    a.x = static_cast<const __nv_bfloat16*>(p.a);
    a.x_stride = p.a_stride;
  } else {
    a.rows = rows_map(p.a, p.M, p.K, p.a_stride, t.rows, blocks);
  }
  const int behind = is_apart ? 0 : t.ranks, apart = is_apart ? t.ranks : 0;  // rows of A
  const int weight_slot = blocks * (t.columns + behind) * kRowBytes, row_slots = fusion.norm != nullptr ? a.num_steps : t.slots;
  a.ranks_at = t.slots * weight_slot;
  a.rows_at = a.ranks_at + t.slots * blocks * apart * kRowBytes;
  // Products read kSpan rows of weights and of A, whatever there is.
  const int overrun = (kSpan - (apart > 0 ? apart : t.columns + behind)) * kRowBytes;
  a.codes_at = a.rows_at + std::max(row_slots * blocks * t.rows * kRowBytes, overrun);
  a.code_slots = t.code_slots;
  a.barriers_at = a.codes_at + t.code_slots * blocks * t.columns * kBlock;
  a.adapter_at = round_up(a.barriers_at + 2 * t.slots * 8, 16);
  if (eight) {
    a.code_factors = p.b_codes.factors;
    return launch_eight_bit_rows(ctx, p, a, t.rows, fusion.swiglu);
  }
  if (operands == Operands::kCodes) {
    a.row_scales = p.a_factors;
    a.column_scales = p.b_factors;
    return launch_code_rows(ctx, p, a, t.rows, fusion);
  }
  switch (t.rows) {
    case 8: return launch<8>(ctx, p, a, fusion, is_apart);
    case 16: return launch<16>(ctx, p, a, fusion, is_apart);
    case 32: return launch<32>(ctx, p, a, fusion, is_apart);
    case 64: return launch<64>(ctx, p, a, fusion, is_apart);
    default: return launch<128>(ctx, p, a, fusion, is_apart);
  }
}

}  // namespace prl::ops::cuda
