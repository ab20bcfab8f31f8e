#include "ops/cuda/blas.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "base/error.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "ops/cuda/blas_plan.hpp"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/simple_product.hpp"

namespace prl::ops::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
/// Shapes are few in training and bounded in decode; prefill lengths are not.
constexpr std::size_t kMaxPlans = 8192;
bool is_row_aligned(const void* pointer, std::int64_t stride, DType dtype) {
  return is_aligned(pointer, 16) && stride * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
}

/// Columns of row-invariant products that the library computes come in these numbers; beyond them it has kernels of its own, which add
/// in another order for some numbers of rows. Fours go to kernels that agree where K has no end of its own (kEvenDepth).
std::int64_t invariant_columns(const Product& p) { return p.K % kEvenDepth == 0 ? 4 : kAlignedElements; }

/// The first or last columns of a product.
Product columns_of(const Product& p, std::int64_t first, std::int64_t count) {
  Product q = p;
  const auto in_size = static_cast<std::int64_t>(size_of(p.in_dtype)), out_size = static_cast<std::int64_t>(size_of(p.out_dtype));
  q.N = count;
  q.b = static_cast<const char*>(p.b) + first * in_size * (p.transpose_b ? p.b_stride : 1);
  q.out = static_cast<char*>(p.out) + first * out_size;
  if (p.bias != nullptr) q.bias = p.bias + first;
  q.b_codes = {};
  return q;
}

/// Whether the library computes this product: a property of the matrices alone, not of the number of rows or of their places.
bool is_librarys(const Product& p, const cudaDeviceProp& device) {
  if (p.in_dtype == DType::kU8) return true;
  const std::int64_t depth = device.major >= 9 ? kAlignedElements : kEvenDepth;
  return p.may_split || (p.in_dtype == DType::kBF16 && p.K % depth == 0 && is_row_aligned(p.b, p.b_stride, p.in_dtype));
}

/// PRL_CUDA_EXACT=0 gives the library free choice, split-K included: for measuring what exactness costs, nothing else.
bool is_exact() {
  static const bool value = [] {
    const char* text = std::getenv("PRL_CUDA_EXACT");
    return text == nullptr || std::string_view(text) != "0";
  }();
  return value;
}

/// The cut of a product that our own kernels compute: one of few rows, whichever they are.
std::optional<FewRowsTile> few_rows(const OpContext& ctx, const Product& p, const FewRowsFusion& fusion = {}) {
  const auto is_row_aligned_here = [&](const void* pointer, std::int64_t stride, DType dtype) {
    return is_row_aligned(pointer, p.M == 1 ? 0 : stride, dtype);
  };
  if (!is_row_aligned_here(p.a, p.a_stride, p.in_dtype) || !is_row_aligned_here(p.out, p.out_stride, p.out_dtype)) return std::nullopt;
  if (!is_row_aligned_here(fusion.residual, fusion.residual_stride, p.out_dtype) || !is_aligned(fusion.norm, 16)) return std::nullopt;
  return few_rows_tile(p, properties_of(ctx), fusion);
}

}  // namespace

bool has_librarys_bits(const OpContext& ctx, const Product& p) {
  return is_exact() && is_librarys(p, properties_of(ctx)) && p.N % invariant_columns(p) == 0;
}

std::optional<FewRowsTile> find_few_rows_tile(const OpContext& ctx, const Product& p, const FewRowsFusion& fusion) {
  return has_librarys_bits(ctx, p) ? few_rows(ctx, p, fusion) : std::nullopt;
}

bool run_few_rows(const OpContext& ctx, const Product& p, const FewRowsFusion& fusion) {
  const std::optional<FewRowsTile> tile = find_few_rows_tile(ctx, p, fusion);
  if (tile) few_rows_product(ctx, p, *tile, fusion);
  return tile.has_value();
}

struct Blas::Impl {
  explicit Impl(std::shared_ptr<DeviceRuntime> r) : runtime(std::move(r)), lt(CublasLt::get()), padding(runtime) {
    ::prl::cuda::runtime_of(*runtime).activate();
    lt.check(lt.create(&handle), "cublasLtCreate");
    workspace = runtime->allocate(kWorkspaceBytes);
    planner.emplace(lt, handle, workspace, kWorkspaceBytes, ::prl::cuda::runtime_of(*runtime).properties().major);
  }
  ~Impl() {
    runtime->deallocate(workspace, kWorkspaceBytes);
    (void)lt.destroy(handle);
  }

  BlasPlan& plan_for(const OpContext& ctx, const Product& p) {
    const PlanKey key(p);
    if (const auto found = plans.find(key); found != plans.end()) {
      if (Planner::is_due(found->second, ctx.may_measure)) found->second = planner->make(p, stream_of(ctx), ctx.may_measure);
      return found->second;
    }
    if (plans.size() >= kMaxPlans) plans.clear();
    return plans.emplace(key, planner->make(p, stream_of(ctx), ctx.may_measure)).first->second;
  }

  void launch(const OpContext& ctx, const Product& p) {
    BlasPlan& plan = plan_for(ctx, p);
    if (!plan.exists)
      fail(ErrorCode::kNotImplemented, "[cuda] cuBLASLt has no product [{}, {}] x [{}, {}] of {} to {}", p.M, p.K, p.K, p.N,
           to_string(p.in_dtype), to_string(p.out_dtype));
    if (p.bias != nullptr)
      lt.check(lt.desc_set(&plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof p.bias), "cublasLtMatmulDescSetAttribute");
    if (p.in_dtype == DType::kU8) set_factors(lt, plan, p);
    const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status = lt.matmul(handle, &plan.desc, &one, p.b, &plan.a, p.a, &plan.b, &beta, p.out, &plan.out, p.out, &plan.out,
                                            &plan.algo, workspace, kWorkspaceBytes, stream_of(ctx));
    if (status != CUBLAS_STATUS_SUCCESS)
      fail(ErrorCode::kInternal, "[cuda] cublasLtMatmul of [{}, {}] x [{}, {}]: {}", p.M, p.K, p.K, p.N, lt.status_string(status));
  }

  /// Through aligned copies: for rows at odd places, and for a single row, which the library would hand to vector kernels that add
  /// in another order and which is therefore computed as the first of two.
  void launch_padded(const OpContext& ctx, const Product& p) {
    Product q = p;
    q.M = std::max<std::int64_t>(p.M, 2);
    const auto in_size = static_cast<std::int64_t>(size_of(p.in_dtype)), out_size = static_cast<std::int64_t>(size_of(p.out_dtype));
    // Behind a single row of codes lies memory that may be read as a second one.
    const bool copies_in = p.in_dtype != DType::kU8 && (p.M == 1 || !is_row_aligned(p.a, p.a_stride, p.in_dtype));
    const bool copies_out = p.M == 1 || !is_row_aligned(p.out, p.out_stride, p.out_dtype);
    char* in = nullptr;
    char* out = nullptr;
    const auto carve = [&](void* memory) {
      Carver c(memory);
      if (copies_in) in = c.take<char>(q.M * round_up(p.K, kAlignedElements) * in_size);
      if (copies_out) out = c.take<char>(q.M * round_up(p.N, kAlignedElements) * out_size);
      return c.used();
    };
    carve(padding.require(carve(nullptr)));
    const auto copy = [&](void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t cols,
                          std::int64_t rows, std::int64_t size) {
      PRL_CUDA_CHECK(cudaMemcpy2DAsync(to, static_cast<std::size_t>(to_stride * size), from, static_cast<std::size_t>(from_stride * size),
                                       static_cast<std::size_t>(cols * size), static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice,
                                       stream_of(ctx)));
    };
    if (copies_in) {
      q.a = in;
      q.a_stride = round_up(p.K, kAlignedElements);
      copy(in, q.a_stride, p.a, p.M == 1 ? p.K : p.a_stride, p.K, p.M, in_size);
      if (p.M == 1) copy(in + q.a_stride * in_size, q.a_stride, p.a, p.K, p.K, 1, in_size);
    }
    if (copies_out) {
      q.out = out;
      q.out_stride = round_up(p.N, kAlignedElements);
      if (p.accumulate) {
        copy(out, q.out_stride, p.out, p.M == 1 ? p.N : p.out_stride, p.N, p.M, out_size);
        if (p.M == 1) copy(out + q.out_stride * out_size, q.out_stride, p.out, p.N, p.N, 1, out_size);
      }
    }
    launch(ctx, q);
    if (copies_out) copy(p.out, p.M == 1 ? p.N : p.out_stride, out, q.out_stride, p.N, p.M, out_size);
  }

  std::shared_ptr<DeviceRuntime> runtime;
  const CublasLt& lt;
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  std::optional<Planner> planner;
  Workspace padding;
  std::unordered_map<PlanKey, BlasPlan, PlanKey::Hash> plans;
  std::unordered_map<PlanKey, bool, PlanKey::Hash> supported;
};

Blas::Blas(std::shared_ptr<DeviceRuntime> runtime) : impl_(std::make_unique<Impl>(std::move(runtime))) {}
Blas::~Blas() = default;

void Blas::run(const OpContext& ctx, const Product& given) {
  Product p = given;
  if (!is_exact() && p.in_dtype == DType::kBF16) p.may_split = true;
  const std::int64_t rest = p.N % invariant_columns(p);
  if (!is_librarys(p, properties_of(ctx))) {
    simple_product(ctx, p);
  } else if (!p.may_split && rest != 0) {
    if (p.N > rest) run(ctx, columns_of(p, 0, p.N - rest));
    simple_product(ctx, columns_of(p, p.N - rest, rest));
  } else if (const std::optional<FewRowsTile> tile = few_rows(ctx, p)) {
    few_rows_product(ctx, p, *tile);
  } else if (p.may_split || (p.M > 1 && is_row_aligned(p.a, p.a_stride, p.in_dtype) && is_row_aligned(p.out, p.out_stride, p.out_dtype)))
    impl_->launch(ctx, p);
  else
    impl_->launch_padded(ctx, p);
}

bool Blas::can_run(const Product& p) {
  if (!is_librarys(p, ::prl::cuda::runtime_of(*impl_->runtime).properties())) return true;
  // Types and bias decide, and one aligned case stands for all.
  Product q = p;
  q.M = kAlignedElements;
  q.a_stride = round_up(p.K, kAlignedElements);
  q.out_stride = round_up(p.out_stride, kAlignedElements);
  const PlanKey key(q);
  const auto found = impl_->supported.find(key);
  return found != impl_->supported.end() ? found->second : impl_->supported.emplace(key, impl_->planner->supports(q)).first->second;
}

}  // namespace prl::ops::cuda
