#pragma once

#include <memory>
#include <vector>

#include "ops/context.hpp"

namespace prl::ops {

/// A weight matrix in the device's own layout (CPU: panels for its kernels; GPU: row-major). Immutable once made; shared
/// by trainer and engine under one policy version.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  std::int64_t num_outputs() const noexcept { return num_outputs_; }  ///< N
  std::int64_t num_inputs() const noexcept { return num_inputs_; }    ///< K
  DType dtype() const noexcept { return dtype_; }                     ///< compute dtype: kF32 or kBF16
  bool has_bias() const noexcept { return has_bias_; }
  bool has_backward() const noexcept { return has_backward_; }
  bool rounds_inputs() const noexcept { return rounds_inputs_; }  ///< WeightUse::kEightBitProduct
  virtual std::size_t num_bytes() const noexcept = 0;
  /// Row `n` of W in compute dtype values widened to fp32 into out_K, for checksums and saving.
  virtual void unpack_row(std::int64_t n, float* out_K) const = 0;
  /// The same of rows [first, first + count), one behind another: a GPU is waited for once.
  virtual void unpack_rows(std::int64_t first, std::int64_t count, float* out) const {
    for (std::int64_t i = 0; i < count; ++i) unpack_row(first + i, out + i * num_inputs_);
  }
  /// Takes the values of another matrix of this shape and dtype, and of another bias if it has one, as share_linear() would have made it;
  /// where that shares memory `w_NK` must be the tensor it was made of. For who holds it alone.
  virtual void refill(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N) = 0;

 protected:
  std::int64_t num_outputs_ = 0;
  std::int64_t num_inputs_ = 0;
  DType dtype_ = DType::kF32;
  bool has_bias_ = false;
  bool has_backward_ = false;
  bool rounds_inputs_ = false;
};
using LinearWeightPtr = std::shared_ptr<const LinearWeight>;

/// What a weight is multiplied in: devices may lay it out for that.
enum class WeightUse : std::uint8_t {
  kMatrix,
  kAdapter,  ///< A or B of an adapter, of which one side is its rank: for add_lora and lora_backward
  /// Its values are those of 8 bits (eight_bit.hpp) nearest to the given ones in the compute dtype, each output row with the factor that
  /// its greatest magnitude asks for. A device may keep the codes alone, or beside the values; where share_linear() shares memory, the
  /// tensor becomes those values.
  kEightBit,
  kEightBitExpert,  ///< the same, of one of the matrices that grouped_linear() multiplies with together
  /// The same, and linear() rounds rows of its input to 8 bits as well (eight_bit.hpp), so that a device may form products of 8-bit
  /// numbers. What adapters read, and gradients, are not rounded: the gradient passes the rounding as if there were none.
  kEightBitProduct,
};
constexpr bool is_eight_bit(WeightUse use) noexcept {
  return use == WeightUse::kEightBit || use == WeightUse::kEightBitExpert || use == WeightUse::kEightBitProduct;
}

/// What a device keeps beside the values of matrices of kEightBitProduct that grouped_linear() multiplies with together, one behind
/// another; undefined where it keeps nothing.
struct CodeMemory {
  Tensor codes, factors;  ///< kU8 [count * N, K], fp32 [count * N]
  /// The weight keeps no values beside them: whatever wants those gets them from the codes, the same bits. For weights that are not
  /// refilled.
  bool is_alone = false;
  /// That of matrix `i` of [N, K].
  CodeMemory of(std::int64_t i, std::int64_t N) const {
    return codes.defined() ? CodeMemory{codes.slice(i * N, N), factors.slice(i * N, N), is_alone} : CodeMemory{};
  }
};
/// For `count` matrices [N, K] that are multiplied with in `compute`.
CodeMemory take_code_memory(OpContext& ctx, std::int64_t count, std::int64_t N, std::int64_t K, DType compute);

/// Packs w_NK [N, K] (kF32 or kBF16, contiguous), rounded to `compute`, and bias_N [N] fp32 (data == nullptr for none).
/// `with_backward` also keeps what linear_backward_input needs.
LinearWeightPtr pack_linear(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward,
                            WeightUse use = WeightUse::kMatrix);

/// The same for a tensor that is in the compute dtype already; the result may share its memory instead of copying it, so that it must not
/// be written from then on. With 8 bits it is written once, here. `memory`: of this matrix, for its codes; without it the result takes
/// memory of its own if it wants any.
LinearWeightPtr share_linear(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N, bool with_backward,
                             WeightUse use = WeightUse::kMatrix, const CodeMemory& memory = {});

/// True where `share_linear` shares memory, so that all weights of a model can be parts of one array.
bool shares_weights(const OpContext& ctx);

/// y_TN = x_TK W^T + b; of a weight that rounds its inputs x_TK is rounded to 8 bits first, each row by itself.
///
/// Shapes    x [T, K], y [T, N], both in w.dtype() (y may also be kF32); row-strided views allowed.
/// Numerics  products summed in fp32, in one order of K per output element that depends on (N, K) and the CPU kind alone:
///           a row of y depends on its row of x and on w, never on T or on the thread count (batch-invariant). Products of 8-bit
///           numbers on compute capability 9.0: as its tensor cores sum 128 inputs, and those sums in fp32, in order.
/// `next`: the weight of the product after this one, if known: a prefetch hint, harmless if it is freed before.
void linear(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearWeight* next = nullptr);

/// dx_TK = dy_TN W, or += if `accumulate`. Needs w.has_backward(). Batch-invariant.
void linear_backward_input(OpContext& ctx, TensorView dx_TK, ConstTensorView dy_TN, const LinearWeight& w, bool accumulate);

/// dw_NK += dy^T x, or = unless `accumulate`, and db_N += column sums of dy, both fp32; db_N.data == nullptr leaves the bias out. Sums
/// over T run in a fixed order, so two runs agree bit for bit. The product is complete before it is added to dw: the bits of one that was
/// formed in memory of its own and then added.
void linear_backward_weight(OpContext& ctx, TensorView dw_NK, TensorView db_N, ConstTensorView dy_TN, ConstTensorView x_TK,
                            bool accumulate = true);

/// out_MN = a_MK b_KN (fp32, contiguous), for optimizers (Muon) and tests. `transpose_b` reads b as [N, K].
void matmul_f32(OpContext& ctx, TensorView out_MN, ConstTensorView a_MK, ConstTensorView b, bool transpose_b);

}  // namespace prl::ops
