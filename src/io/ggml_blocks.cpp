#include "io/ggml_blocks.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.hpp"
#include "io/safetensors.hpp"

// Layouts, little-endian; d and m are fp16 scales, q the stored integers of a block:
//   Q4_0  32: d, 16 x u8     x = d (q - 8)         low nibbles are elements 0-15, high ones 16-31; so in all 32-blocks
//   Q4_1  32: d, m, 16 x u8  x = d q + m
//   Q5_0  32: d, u32 of fifth bits, 16 x u8        x = d (q - 16)
//   Q5_1  32: d, m, u32 of fifth bits, 16 x u8     x = d q + m
//   Q8_0  32: d, 32 x i8     x = d q
//   Q4_K 256: d, dmin, 12 bytes of 6-bit scales s and minima m of 8 groups of 32, 128 x u8    x = d s q - dmin m
//   Q5_K 256: the same with 32 bytes of fifth bits before the nibbles
//   Q6_K 256: 128 x u8 low nibbles, 64 x u8 upper pairs of bits, 16 x i8 scales s of groups of 16, d    x = d s (q - 32)
namespace prl::io {
namespace {

constexpr std::array<GgmlTypeInfo, 11> kGgmlTypes{{{GgmlType::kF32, "F32", 1, 4},
                                                   {GgmlType::kF16, "F16", 1, 2},
                                                   {GgmlType::kBF16, "BF16", 1, 2},
                                                   {GgmlType::kQ4_0, "Q4_0", 32, 18},
                                                   {GgmlType::kQ4_1, "Q4_1", 32, 20},
                                                   {GgmlType::kQ5_0, "Q5_0", 32, 22},
                                                   {GgmlType::kQ5_1, "Q5_1", 32, 24},
                                                   {GgmlType::kQ8_0, "Q8_0", 32, 34},
                                                   {GgmlType::kQ4_K, "Q4_K", 256, 144},
                                                   {GgmlType::kQ5_K, "Q5_K", 256, 176},
                                                   {GgmlType::kQ6_K, "Q6_K", 256, 210}}};

/// Names by number of the types that are not read.
constexpr std::array<std::string_view, 40> kOtherNames{
    "F32",    "F16",      "Q4_0",     "Q4_1",     "Q4_2",  "Q4_3",  "Q5_0",       "Q5_1",       "Q8_0",       "Q8_1",
    "Q2_K",   "Q3_K",     "Q4_K",     "Q5_K",     "Q6_K",  "Q8_K",  "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",    "IQ1_S",
    "IQ4_NL", "IQ3_S",    "IQ2_S",    "IQ4_XS",   "I8",    "I16",   "I32",        "I64",        "F64",        "IQ1_M",
    "BF16",   "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4"};

using Bytes = const std::uint8_t*;

std::uint16_t load_u16(Bytes p) {
  std::uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
float load_half(Bytes p) { return f16_to_f32(load_u16(p)); }

/// 32 elements from 16 bytes of nibbles and, for the 5-bit types, a word of fifth bits.
template <bool has_fifth_bit, typename Value>
void nibbles(Bytes q, std::uint32_t fifth, float* out, Value value) {
  for (int i = 0; i < 16; ++i) {
    int low = q[i] & 0xf, high = q[i] >> 4;
    if constexpr (has_fifth_bit) {
      low |= static_cast<int>((fifth >> i) & 1u) << 4;
      high |= static_cast<int>((fifth >> (i + 16)) & 1u) << 4;
    }
    out[i] = value(low);
    out[i + 16] = value(high);
  }
}

template <bool has_fifth_bit, bool has_min>
void legacy_block(Bytes p, float* out) {
  const float d = load_half(p);
  p += 2;
  float m = 0;
  if constexpr (has_min) {
    m = load_half(p);
    p += 2;
  }
  std::uint32_t fifth = 0;
  if constexpr (has_fifth_bit) {
    std::memcpy(&fifth, p, sizeof fifth);
    p += 4;
  }
  constexpr int kMiddle = has_fifth_bit ? 16 : 8;
  nibbles<has_fifth_bit>(p, fifth, out, [&](int q) {
    if constexpr (has_min) return static_cast<float>(q) * d + m;
    return static_cast<float>(q - kMiddle) * d;
  });
}

/// The 6-bit scale and minimum of group `i` of 8: four of each lie in the low 6 bits of bytes 0-7, the other four are spread
/// over the nibbles of bytes 8-11 and the upper bits of bytes 0-7.
void scale_and_min(Bytes s, int i, int& scale, int& minimum) {
  if (i < 4) {
    scale = s[i] & 63;
    minimum = s[i + 4] & 63;
  } else {
    scale = (s[i + 4] & 0xf) | ((s[i - 4] >> 6) << 4);
    minimum = (s[i + 4] >> 4) | ((s[i] >> 6) << 4);
  }
}

template <bool has_fifth_bit>
void k_block(Bytes p, float* out) {
  const float d = load_half(p), dmin = load_half(p + 2);
  const Bytes scales = p + 4;
  const Bytes fifth = p + 16;  // Q5_K: bit g of byte i belongs to element i of group g
  const Bytes q = has_fifth_bit ? p + 48 : p + 16;
  for (int group = 0; group < 8; ++group) {
    int scale = 0, minimum = 0;
    scale_and_min(scales, group, scale, minimum);
    const float step = d * static_cast<float>(scale), offset = dmin * static_cast<float>(minimum);
    const Bytes chunk = q + 32 * (group / 2);  // two groups share 32 bytes
    for (int i = 0; i < 32; ++i) {
      int value = group % 2 == 0 ? chunk[i] & 0xf : chunk[i] >> 4;
      if constexpr (has_fifth_bit) value |= ((fifth[i] >> group) & 1) << 4;
      out[32 * group + i] = step * static_cast<float>(value) - offset;
    }
  }
}

void q6_k_block(Bytes p, float* out) {
  const Bytes low = p, high = p + 128;
  const auto* scales = reinterpret_cast<const std::int8_t*>(p + 192);
  const float d = load_half(p + 208);
  for (int half = 0; half < 2; ++half) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const int pair = low[64 * half + 32 * (quarter % 2) + i];
        const int nibble = quarter < 2 ? pair & 0xf : pair >> 4;
        const int upper = (high[32 * half + i] >> (2 * quarter)) & 3;
        const int element = 128 * half + 32 * quarter + i;
        out[element] = d * static_cast<float>(scales[element / 16]) * static_cast<float>((nibble | (upper << 4)) - 32);
      }
    }
  }
}

void q8_0_block(Bytes p, float* out) {
  const float d = load_half(p);
  const auto* q = reinterpret_cast<const std::int8_t*>(p + 2);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(q[i]) * d;
}

}  // namespace

std::optional<GgmlTypeInfo> ggml_type_info(std::uint32_t type) noexcept {
  const auto it =
      std::find_if(kGgmlTypes.begin(), kGgmlTypes.end(), [&](const auto& t) { return static_cast<std::uint32_t>(t.type) == type; });
  if (it == kGgmlTypes.end()) return std::nullopt;
  return *it;
}

std::string_view ggml_type_name(std::uint32_t type) noexcept { return type < kOtherNames.size() ? kOtherNames[type] : "an unknown type"; }

void dequantize(GgmlType type, std::span<const std::byte> blocks, std::span<float> out) {
  const auto info = ggml_type_info(static_cast<std::uint32_t>(type));
  PRL_CHECK(info && out.size() % info->block_elements == 0 && blocks.size() == out.size() / info->block_elements * info->block_bytes,
            "{} bytes for {} elements", blocks.size(), out.size());
  auto p = reinterpret_cast<Bytes>(blocks.data());
  const auto each = [&](auto&& block) {
    for (std::size_t i = 0; i < out.size(); i += info->block_elements, p += info->block_bytes) block(p, out.data() + i);
  };
  switch (type) {
    case GgmlType::kF32: std::memcpy(out.data(), p, blocks.size()); return;
    case GgmlType::kF16: return each([](Bytes b, float* x) { *x = load_half(b); });
    case GgmlType::kBF16: return each([](Bytes b, float* x) { *x = to_f32(BFloat16{load_u16(b)}); });
    case GgmlType::kQ4_0: return each(legacy_block<false, false>);
    case GgmlType::kQ4_1: return each(legacy_block<false, true>);
    case GgmlType::kQ5_0: return each(legacy_block<true, false>);
    case GgmlType::kQ5_1: return each(legacy_block<true, true>);
    case GgmlType::kQ8_0: return each(q8_0_block);
    case GgmlType::kQ4_K: return each(k_block<false>);
    case GgmlType::kQ5_K: return each(k_block<true>);
    case GgmlType::kQ6_K: return each(q6_k_block);
  }
}

}  // namespace prl::io
