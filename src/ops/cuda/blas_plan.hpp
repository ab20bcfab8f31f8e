#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "ops/cuda/blas.hpp"
#include "ops/cuda/cublaslt.hpp"

namespace prl::ops::cuda {

/// Elements of bf16 rows that make 16 bytes, the alignment of the library's Hopper kernels.
constexpr std::int64_t kAlignedElements = 8;
/// Of K: the library's kernels for other matrices and devices begin with what K has beyond a multiple of their depth, so that two of
/// them agree in all bits only where there is nothing beyond. All depths divide this.
constexpr std::int64_t kEvenDepth = 64;

/// What the kernel for a product depends on.
struct PlanKey {
  std::int64_t M, N, K, a_stride, b_stride, out_stride;
  std::uint32_t flags;
  explicit PlanKey(const Product& p);
  bool operator==(const PlanKey&) const = default;
  struct Hash {
    std::size_t operator()(const PlanKey& k) const noexcept;
  };
};

/// The kernel of products whose sizes are alike.
struct Choice {
  cublasLtMatmulAlgo_t algo{};
  bool is_measured = false;  ///< else it is the library's first proposal
  int num_uses = 0;          ///< while it was not
};

/// A product as cuBLASLt takes it. The library counts in columns, so it computes out^T = b^T a^T: its A is our b.
struct BlasPlan {
  bool exists = false;
  cublasLtMatmulDescOpaque_t desc{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, out{};
  cublasLtMatmulAlgo_t algo{};
  Choice* open_choice = nullptr;  ///< where a better one may be found; Planner::is_due
};

/// Sets where the factors of codes lie.
void set_factors(const CublasLt& lt, BlasPlan& plan, const Product& p);

/// Makes plans: the library's proposals, restricted to one family of kernels where rows must not depend on their number, and
/// measured against each other.
class Planner {
 public:
  Planner(const CublasLt& lt, cublasLtHandle_t handle, void* workspace, std::size_t workspace_bytes, int device_major)
      : lt_(lt), handle_(handle), workspace_(workspace), workspace_bytes_(workspace_bytes), device_major_(device_major) {}
  /// `stream` must have reached nothing that `p` reads or writes later than now: candidates are run on p's own memory.
  BlasPlan make(const Product& p, cudaStream_t stream, bool may_measure);
  /// Counts a use of the plan. Whether it is to be made again.
  static bool is_due(const BlasPlan& plan, bool may_measure);
  /// Whether the library has any kernel for it. Launches nothing.
  bool supports(const Product& p) const { return !proposals(p, layouts(p), 1).empty(); }

 private:
  BlasPlan layouts(const Product& p) const;
  std::vector<cublasLtMatmulAlgo_t> proposals(const Product& p, const BlasPlan& plan, int count) const;
  std::vector<cublasLtMatmulAlgo_t> candidates(const Product& p, const BlasPlan& plan) const;
  int family_of(const cublasLtMatmulAlgo_t& algo) const;
  /// Whether the library's kernels for this product without split-K agree in all bits.
  bool do_kernels_agree(const Product& p) const;
  std::int32_t splits_of(const cublasLtMatmulAlgo_t& algo) const;
  /// The family of row-invariant kernels for these matrices, by the library's choice for many rows.
  std::optional<int> invariant_family(const Product& p) const;
  /// Milliseconds of one run; with `flush`, memory to write in between, of one that finds nothing in the cache.
  std::optional<float> measure(const Product& p, const BlasPlan& plan, const cublasLtMatmulAlgo_t& algo, void* out, void* flush,
                               cudaStream_t stream) const;

  const CublasLt& lt_;
  cublasLtHandle_t handle_;
  void* workspace_;
  std::size_t workspace_bytes_;
  int device_major_;
  std::optional<cublasLtMatmulAlgo_t> fastest(const Product& p, const BlasPlan& plan, std::span<const cublasLtMatmulAlgo_t> candidates,
                                              cudaStream_t stream) const;
  bool can_take(const BlasPlan& plan, const cublasLtMatmulAlgo_t& algo) const;

  /// By products whose numbers of rows (where splits are allowed, of K as well) are rounded up to their class.
  std::unordered_map<PlanKey, Choice, PlanKey::Hash> choices_;
};

}  // namespace prl::ops::cuda
