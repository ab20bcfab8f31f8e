#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace prl::io {

/// Element types of GGUF tensors that this build reads; the values are those of the format. Quantised types store blocks of a
/// fixed number of elements along the innermost dimension.
enum class GgmlType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

/// Size of one block of a type; 1 element for the plain ones.
struct GgmlTypeInfo {
  GgmlType type;
  std::string_view name;  ///< as the format spells it: "Q4_K"
  std::size_t block_elements;
  std::size_t block_bytes;
};

/// nullopt for types this build does not read.
std::optional<GgmlTypeInfo> ggml_type_info(std::uint32_t type) noexcept;
/// The format's name of any type it knows, "type 99" otherwise; for messages.
std::string_view ggml_type_name(std::uint32_t type) noexcept;

/// Blocks to fp32, in order. `blocks` holds out.size() / block_elements whole blocks.
/// Numerics  every product and sum is rounded to fp32 in the order of the reference implementation, so values agree bit for bit.
/// Source    ggml-quants.c of github.com/ggml-org/ggml: layouts block_q4_0 ... block_q6_K.
void dequantize(GgmlType type, std::span<const std::byte> blocks, std::span<float> out);

}  // namespace prl::io
