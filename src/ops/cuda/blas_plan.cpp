#include "ops/cuda/blas_plan.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {
namespace {

/// Rows for which the library's choice names the family; it has tiles for all numbers of rows.
constexpr std::int64_t kManyRows = 4096;
constexpr int kProposals = 8;
/// Up to this many, weights are read from memory: so products are measured. Where the library proposes no kernel of the family for fewer
/// rows, that for as many is taken.
constexpr std::int64_t kFewRows = 384;
/// Of a size that comes and goes, until kernels are measured for it: some 18 steps with 28 layers.
constexpr int kUsesToMeasure = 512;
/// Time that one candidate may take to be measured.
constexpr float kMeasureMilliseconds = 0.3f;
/// Written between runs of a candidate to empty the second-level cache.
constexpr std::size_t kFlushBytes = std::size_t{128} << 20;
constexpr int kColdRuns = 4;

/// log2 of the alignment in bytes that pointer and rows have, at most 16 bytes.
std::uint32_t alignment_log2(const void* pointer, std::int64_t stride, DType dtype) {
  const auto bits = reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(stride) * size_of(dtype) | 16u;
  return static_cast<std::uint32_t>(__builtin_ctzll(bits));
}

/// Sizes that share a kernel: up to the next of 1, 1.5 times a power of two.
std::int64_t size_class(std::int64_t count) {
  std::int64_t size = 8;
  while (size < count) {
    if (count <= size + size / 2) return size + size / 2;
    size *= 2;
  }
  return size;
}

cudaDataType_t data_type(DType dtype) { return dtype == DType::kU8 ? CUDA_R_8F_E4M3 : dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

/// Device memory for one measurement; null where there is none to spare.
struct Scratch {
  void* data = nullptr;
  cudaStream_t stream;
  Scratch(std::size_t bytes, cudaStream_t s) : stream(s) {
    if (cudaMallocAsync(&data, bytes, s) == cudaSuccess) return;
    data = nullptr;
    (void)cudaGetLastError();
  }
  ~Scratch() {
    if (data != nullptr) (void)cudaFreeAsync(data, stream);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

}  // namespace

PlanKey::PlanKey(const Product& p) : M(p.M), N(p.N), K(p.K), a_stride(p.a_stride), b_stride(p.b_stride), out_stride(p.out_stride) {
  flags = (p.transpose_a ? 1u : 0u) | (p.transpose_b ? 2u : 0u) | (p.accumulate ? 4u : 0u) | (p.bias != nullptr ? 8u : 0u) |
          (p.may_split ? 16u : 0u) | (p.in_dtype == DType::kBF16 ? 32u : 0u) | (p.out_dtype == DType::kBF16 ? 64u : 0u) |
          (p.in_dtype == DType::kU8 ? 128u : 0u);
  flags |= alignment_log2(p.a, p.a_stride, p.in_dtype) << 8 | alignment_log2(p.b, p.b_stride, p.in_dtype) << 12 |
           alignment_log2(p.out, p.out_stride, p.out_dtype) << 16;
}

std::size_t PlanKey::Hash::operator()(const PlanKey& k) const noexcept {
  std::uint64_t h = k.flags;
  for (const std::int64_t v : {k.M, k.N, k.K, k.a_stride, k.b_stride, k.out_stride}) {
    h = (h ^ static_cast<std::uint64_t>(v)) * 0x9E3779B97F4A7C15ULL;
    h ^= h >> 29;
  }
  return static_cast<std::size_t>(h);
}

void set_factors(const CublasLt& lt, BlasPlan& plan, const Product& p) {
  lt.check(lt.desc_set(&plan.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p.b_factors, sizeof p.b_factors),
           "cublasLtMatmulDescSetAttribute");
  lt.check(lt.desc_set(&plan.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p.a_factors, sizeof p.a_factors),
           "cublasLtMatmulDescSetAttribute");
}

BlasPlan Planner::layouts(const Product& p) const {
  BlasPlan plan;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    lt_.check(lt_.desc_set(&plan.desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  };
  lt_.check(lt_.desc_init(&plan.desc, sizeof plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
  set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<std::int32_t>(p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
  set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<std::int32_t>(p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
  if (p.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_BIAS));
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(p.bias));
  }
  if (p.in_dtype == DType::kU8) {
    for (const auto mode : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
      set(mode, static_cast<std::int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
    set_factors(lt_, plan, p);
  }
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& out, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
    lt_.check(
        lt_.layout_init(&out, sizeof out, data_type(dtype), static_cast<std::uint64_t>(cols), static_cast<std::uint64_t>(rows), stride),
        "cublasLtMatrixLayoutInit");
  };
  layout(plan.a, p.in_dtype, p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N, p.b_stride);
  layout(plan.b, p.in_dtype, p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K, p.a_stride);
  layout(plan.out, p.out_dtype, p.M, p.N, p.out_stride);
  return plan;
}

std::vector<cublasLtMatmulAlgo_t> Planner::proposals(const Product& p, const BlasPlan& plan, int count) const {
  cublasLtMatmulPreferenceOpaque_t preference{};
  lt_.check(lt_.preference_init(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt_.check(lt_.preference_set(&preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
  };
  const std::uint32_t flags = PlanKey(p).flags;
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(workspace_bytes_));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<std::uint32_t>(p.may_split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{1} << (flags >> 12 & 15u));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{1} << (flags >> 8 & 15u));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{1} << (flags >> 16 & 15u));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{1} << (flags >> 16 & 15u));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(count));
  int found = 0;
  if (lt_.heuristic(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&plan.desc), const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.a),
                    const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.b), const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out),
                    const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out), &preference, count, results.data(),
                    &found) != CUBLAS_STATUS_SUCCESS)
    return {};
  std::vector<cublasLtMatmulAlgo_t> out;
  for (int i = 0; i < found; ++i)
    if (results[static_cast<std::size_t>(i)].state == CUBLAS_STATUS_SUCCESS) out.push_back(results[static_cast<std::size_t>(i)].algo);
  return out;
}

int Planner::family_of(const cublasLtMatmulAlgo_t& algo) const {
  std::int32_t id = -1;
  lt_.check(lt_.algo_get(&algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, nullptr), "cublasLtMatmulAlgoConfigGetAttribute");
  return id;
}

std::int32_t Planner::splits_of(const cublasLtMatmulAlgo_t& algo) const {
  std::int32_t splits = 1;
  lt_.check(lt_.algo_get(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, nullptr), "cublasLtMatmulAlgoConfigGetAttribute");
  return std::max(splits, 1);
}

bool Planner::do_kernels_agree(const Product& p) const {
  if (p.in_dtype != DType::kBF16) return false;  // some of those in fp32 sum parts of K apart
  if (p.K % kEvenDepth == 0) return true;
  const auto is_aligned_row = [](const void* pointer, std::int64_t stride, DType dtype) {
    return alignment_log2(pointer, stride, dtype) == 4;
  };
  // Of a transposed `a` M is the contiguous dimension: unless it is a multiple of 8, however far apart the rows are, the library takes
  // kernels of an older family, which do not agree. Measured: 2 of 6 candidates for 2,500 outputs of any K that is no multiple of 64.
  if (p.transpose_a && p.M % kAlignedElements != 0) return false;
  return device_major_ >= 9 && p.N % kAlignedElements == 0 && is_aligned_row(p.a, p.a_stride, p.in_dtype) &&
         is_aligned_row(p.b, p.b_stride, p.in_dtype) && is_aligned_row(p.out, p.out_stride, p.out_dtype);
}

std::optional<int> Planner::invariant_family(const Product& p) const {
  Product many = p;
  many.M = kManyRows;
  many.accumulate = false;
  many.may_split = false;
  const std::vector<cublasLtMatmulAlgo_t> found = proposals(many, layouts(many), 1);
  if (found.empty()) return std::nullopt;
  return family_of(found[0]);
}

std::vector<cublasLtMatmulAlgo_t> Planner::candidates(const Product& p, const BlasPlan& plan) const {
  std::vector<cublasLtMatmulAlgo_t> found = proposals(p, plan, kProposals);
  if (p.may_split) {
    if (found.empty()) return found;
    // Kernels that agree in all bits may be measured. Otherwise the library's first choice stands, or two runs could differ.
    const int family = family_of(found[0]);
    if (splits_of(found[0]) != 1 || !do_kernels_agree(p)) return {found[0]};
    std::erase_if(found, [&](const cublasLtMatmulAlgo_t& algo) { return splits_of(algo) != 1 || family_of(algo) != family; });
    return found;
  }
  const std::optional<int> family = invariant_family(p);
  std::erase_if(found, [&](const cublasLtMatmulAlgo_t& algo) { return splits_of(algo) != 1 || family_of(algo) != family; });
  if (!found.empty() || p.M >= kFewRows) return found;
  Product more = p;
  more.M = kFewRows;
  found = proposals(more, layouts(more), kProposals);
  std::erase_if(
      found, [&](const cublasLtMatmulAlgo_t& algo) { return splits_of(algo) != 1 || family_of(algo) != family || !can_take(plan, algo); });
  return found;
}

bool Planner::can_take(const BlasPlan& plan, const cublasLtMatmulAlgo_t& algo) const {
  cublasLtMatmulHeuristicResult_t result{};
  return lt_.algo_check(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&plan.desc), const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.a),
                        const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.b), const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out),
                        const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out), &algo, &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= workspace_bytes_;
}

std::optional<float> Planner::measure(const Product& p, const BlasPlan& plan, const cublasLtMatmulAlgo_t& algo, void* out, void* flush,
                                      cudaStream_t stream) const {
  const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  const auto run = [&] {
    return lt_.matmul(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&plan.desc), &one, p.b,
                      const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.a), p.a, const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.b), &beta,
                      out, const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out), out, const_cast<cublasLtMatrixLayoutOpaque_t*>(&plan.out),
                      &algo, workspace_, workspace_bytes_, stream);
  };
  struct Events {
    cudaEvent_t begin = nullptr, end = nullptr;
    Events() {
      PRL_CUDA_CHECK(cudaEventCreate(&begin));
      PRL_CUDA_CHECK(cudaEventCreate(&end));
    }
    ~Events() {
      (void)cudaEventDestroy(begin);
      (void)cudaEventDestroy(end);
    }
  } events;
  const auto timed = [&](int count) -> std::optional<float> {
    PRL_CUDA_CHECK(cudaEventRecord(events.begin, stream));
    for (int i = 0; i < count; ++i)
      if (run() != CUBLAS_STATUS_SUCCESS) return std::nullopt;
    PRL_CUDA_CHECK(cudaEventRecord(events.end, stream));
    PRL_CUDA_CHECK(cudaEventSynchronize(events.end));
    float milliseconds = 0;
    PRL_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events.begin, events.end));
    return milliseconds / static_cast<float>(count);
  };
  if (run() != CUBLAS_STATUS_SUCCESS) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  if (flush != nullptr) {
    // A decoding step reads each weight once, from memory: so it is measured.
    std::optional<float> best;
    for (int i = 0; i < kColdRuns; ++i) {
      PRL_CUDA_CHECK(cudaMemsetAsync(flush, 0, kFlushBytes, stream));
      const std::optional<float> time = timed(1);
      if (!time) return std::nullopt;
      best = best ? std::min(*best, *time) : *time;
    }
    return best;
  }
  const std::optional<float> once = timed(1);
  if (!once) return std::nullopt;
  // Short kernels need several runs to be told apart.
  const int count = std::clamp(static_cast<int>(kMeasureMilliseconds / std::max(*once, 1e-4f)), 1, 20);
  const std::optional<float> mean = timed(count);
  return mean ? std::optional(std::min(*once, *mean)) : std::nullopt;
}

std::optional<cublasLtMatmulAlgo_t> Planner::fastest(const Product& p, const BlasPlan& plan,
                                                     std::span<const cublasLtMatmulAlgo_t> candidates, cudaStream_t stream) const {
  // What accumulates must not be run on its own output more than once.
  std::optional<Scratch> scratch;
  void* out = p.out;
  if (p.accumulate) {
    scratch.emplace(static_cast<std::size_t>(p.M * p.out_stride) * size_of(p.out_dtype), stream);
    if (scratch->data == nullptr) return candidates.front();
    out = scratch->data;
  }
  std::optional<Scratch> flush;
  if (!p.may_split && p.M <= kFewRows) flush.emplace(kFlushBytes, stream);
  std::optional<cublasLtMatmulAlgo_t> best;
  float best_time = std::numeric_limits<float>::max();
  for (const cublasLtMatmulAlgo_t& algo : candidates) {
    const std::optional<float> time = measure(p, plan, algo, out, flush ? flush->data : nullptr, stream);
    if (!time || *time >= best_time) continue;
    best_time = *time;
    best = algo;
  }
  return best;
}

bool Planner::is_due(const BlasPlan& plan, bool may_measure) {
  Choice* const choice = plan.open_choice;
  return choice != nullptr && (choice->is_measured || may_measure || ++choice->num_uses >= kUsesToMeasure);
}

BlasPlan Planner::make(const Product& p, cudaStream_t stream, bool may_measure) {
  BlasPlan plan = layouts(p);
  const auto use = [&](const cublasLtMatmulAlgo_t& algo) {
    plan.algo = algo;
    plan.exists = true;
    return plan;
  };
  std::vector<cublasLtMatmulAlgo_t> all;
  PlanKey key(p);
  key.M = size_class(p.M);
  if (p.may_split) {
    // Whether it is split, and whether its kernels agree, is a rule of the very product.
    all = candidates(p, plan);
    if (all.size() == 1) return use(all[0]);
    key.K = size_class(p.K);
  }
  const auto found = choices_.find(key);
  const bool is_known =
      found != choices_.end() && can_take(plan, found->second.algo) && (all.empty() || family_of(found->second.algo) == family_of(all[0]));
  if (is_known && found->second.is_measured) return use(found->second.algo);
  const bool measures = !is_capturing(stream) && (may_measure || (is_known && found->second.num_uses >= kUsesToMeasure));
  if (is_known && !measures) {
    plan.open_choice = &found->second;
    return use(found->second.algo);
  }
  if (all.empty()) all = candidates(p, plan);
  if (all.empty()) return plan;
  if (found != choices_.end() && !measures) return use(all[0]);  // the class's kernel is not for this one
  const std::optional<cublasLtMatmulAlgo_t> best = measures && all.size() > 1 ? fastest(p, plan, all, stream) : all[0];
  if (!best) return plan;
  Choice& choice = choices_[key];
  choice.algo = *best;
  choice.is_measured = measures;
  if (!measures) plan.open_choice = &choice;
  return use(*best);
}

}  // namespace prl::ops::cuda
