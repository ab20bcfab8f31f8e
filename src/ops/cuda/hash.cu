#include "ops/cuda/bodies.hpp"
#include "ops/cuda/device.cuh"
#include "ops/cuda/linear_weight.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kHashBlock = 256;
constexpr int kHashBlocks = 1024;  ///< at most; each thread takes every n-th word

using Word = unsigned long long;

__device__ __forceinline__ void add_block(Word sum, Word* total) {
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) atomicAdd(total, sum);  // integers: no order shows
}

/// Rows of whole words that lie end to end.
__global__ void __launch_bounds__(kHashBlock) hash_words_kernel(Word* total, const Word* words, std::int64_t count, Word first_word) {
  Word sum = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kHashBlock + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kHashBlock)
    sum += hash_word(words[i], first_word + static_cast<Word>(i));
  add_block(sum, total);
}

/// Any rows: elements are converted and put together one by one.
template <typename Stored, typename As>
__global__ void __launch_bounds__(kHashBlock) hash_elements_kernel(Word* total, const Stored* data, std::int64_t rows, std::int64_t cols,
                                                                   std::int64_t words_per_row, Word first_word) {
  constexpr int kPerWord = 8 / static_cast<int>(sizeof(As));
  Word sum = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kHashBlock + threadIdx.x; i < rows * words_per_row;
       i += static_cast<std::int64_t>(gridDim.x) * kHashBlock) {
    const std::int64_t r = i / words_per_row, c = (i - r * words_per_row) * kPerWord;
    Word word = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if (c + j >= cols) break;
      const float v = to_float(data[r * cols + c + j]);
      Word bits = 0;
      if constexpr (sizeof(As) == 2)
        bits = __bfloat16_as_ushort(from_float<__nv_bfloat16>(v));
      else
        bits = __float_as_uint(v);
      word |= bits << (8 * static_cast<int>(sizeof(As)) * j);
    }
    sum += hash_word(word, first_word + static_cast<Word>(i));
  }
  add_block(sum, total);
}

}  // namespace

namespace {

/// Adds rows of `cols` values, the first of which has number `first_number` in its tensor.
void add_rows_hash(const OpContext& ctx, Word* total, const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                   std::int64_t first_number, DType as) {
  const std::int64_t row_bytes = cols * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t words_per_row = ceil_div(cols * static_cast<std::int64_t>(size_of(as)), 8), words = rows * words_per_row;
  const auto first_word = static_cast<Word>(first_number * words_per_row);
  if (words == 0) return;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(kHashBlocks, ceil_div(words, kHashBlock)));
  if (dtype == as && row_bytes % 8 == 0 && is_aligned(data, 8)) {
    hash_words_kernel<<<grid, kHashBlock, 0, stream_of(ctx)>>>(total, static_cast<const Word*>(data), words, first_word);
  } else {
    with_type(dtype, [&](auto stored) {
      using Stored = decltype(stored);
      const auto* values = static_cast<const Stored*>(data);
      if (as == DType::kBF16)
        hash_elements_kernel<Stored, __nv_bfloat16>
            <<<grid, kHashBlock, 0, stream_of(ctx)>>>(total, values, rows, cols, words_per_row, first_word);
      else
        hash_elements_kernel<Stored, float><<<grid, kHashBlock, 0, stream_of(ctx)>>>(total, values, rows, cols, words_per_row, first_word);
    });
  }
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// Bytes of values that are made from codes at a time.
constexpr std::int64_t kWidenedBytes = std::int64_t{32} << 20;

}  // namespace

void hash_rows(OpContext& ctx, std::span<std::uint64_t> out, std::span<const HashedRows> items, DType as) {
  const auto is_of_codes = [&](const HashedRows& item) { return item.packed != nullptr && !dense(ctx, *item.packed).has_values(); };
  std::int64_t most_columns = 0;
  for (const HashedRows& item : items)
    if (is_of_codes(item)) most_columns = std::max(most_columns, item.num_cols);
  Word* totals = nullptr;
  std::uint16_t* widened = nullptr;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    totals = c.take<Word>(static_cast<std::int64_t>(out.size()));
    if (most_columns > 0) widened = c.take<std::uint16_t>(std::max(most_columns, kWidenedBytes / 2));
    return c.used();
  };
  (void)carve(ctx.workspace->require(carve(nullptr)));
  ctx.runtime->zero(totals, out.size_bytes());
  for (std::size_t n = 0; n < items.size(); ++n) {
    const HashedRows& item = items[n];
    if (is_of_codes(item)) {
      const ProductCodes codes = dense(ctx, *item.packed).product_codes();
      const std::int64_t step = std::max<std::int64_t>(kWidenedBytes / 2 / item.num_cols, 1);
      for (std::int64_t done = 0; done < item.num_rows; done += step) {
        const std::int64_t rows = std::min(step, item.num_rows - done), row = item.first_row + done;
        widen_codes(ctx, widened, {codes.codes + row * item.num_cols, codes.factors + row}, rows, item.num_cols);
        add_rows_hash(ctx, totals + n, widened, DType::kBF16, rows, item.num_cols, item.first_number + done, as);
      }
      continue;
    }
    const ConstTensorView view = item.packed != nullptr ? ConstTensorView(dense(ctx, *item.packed).w_NK) : item.plain;
    const std::int64_t row_bytes = item.num_cols * static_cast<std::int64_t>(size_of(view.dtype));
    add_rows_hash(ctx, totals + n, view.as<char>() + item.first_row * row_bytes, view.dtype, item.num_rows, item.num_cols,
                  item.first_number, as);
  }
  ctx.runtime->copy_to_host(out.data(), totals, out.size_bytes());
}

}  // namespace prl::ops::cuda
