#include "ops/cuda/blas.hpp"

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.hpp"
#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
/// Shapes are few in training and bounded in decode; prefill lengths are not.
constexpr std::size_t kMaxPlans = 8192;

/// The functions of cuBLASLt that are used, found at run time.
struct Lt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) desc_init = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;

  Lt() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    std::vector<std::string> places;
    if (const char* path = std::getenv("PRL_CUBLASLT"); path != nullptr && *path != '\0') places.emplace_back(path);
    places.push_back(name);
    for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
      if (const char* root = std::getenv(variable); root != nullptr && *root != '\0')
        places.push_back(std::string(root) + "/lib64/" + name);
    places.push_back("/usr/local/cuda/lib64/" + name);
    void* library = nullptr;
    std::string looked;
    for (const std::string& place : places) {
      library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library != nullptr) break;
      looked += (looked.empty() ? "" : ", ") + place;
    }
    if (library == nullptr)
      fail(ErrorCode::kUnavailable, "[cuda] matrix products need cuBLASLt {}, looked for {}: install it, or name the file in PRL_CUBLASLT",
           CUBLAS_VER_MAJOR, looked);
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr) fail(ErrorCode::kUnavailable, "[cuda] {} has no {}; version {} is wanted", name, symbol, CUBLAS_VER_MAJOR);
    };
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(matmul, "cublasLtMatmul");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(desc_init, "cublasLtMatmulDescInit_internal");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_init, "cublasLtMatrixLayoutInit_internal");
    find(preference_init, "cublasLtMatmulPreferenceInit_internal");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(status_string, "cublasLtGetStatusString");
  }
  static const Lt& get() {
    static const Lt lt;
    return lt;
  }
};

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(ErrorCode::kInternal, "[cuda] {}: {}", what, Lt::get().status_string(status));
}

/// What a plan depends on.
struct Key {
  std::int64_t M, N, K, a_stride, b_stride, out_stride;
  std::uint32_t flags;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  std::size_t operator()(const Key& k) const noexcept {
    std::uint64_t h = k.flags;
    for (const std::int64_t v : {k.M, k.N, k.K, k.a_stride, k.b_stride, k.out_stride}) {
      h = (h ^ static_cast<std::uint64_t>(v)) * 0x9E3779B97F4A7C15ULL;
      h ^= h >> 29;
    }
    return static_cast<std::size_t>(h);
  }
};

/// log2 of the alignment in bytes that pointer and rows have, at most 16 bytes.
std::uint32_t alignment_log2(const void* pointer, std::int64_t stride, DType dtype) {
  const auto bits = reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(stride) * size_of(dtype) | 16u;
  return static_cast<std::uint32_t>(__builtin_ctzll(bits));
}

Key key_of(const Product& p) {
  std::uint32_t flags = (p.transpose_a ? 1u : 0u) | (p.transpose_b ? 2u : 0u) | (p.accumulate ? 4u : 0u) | (p.bias != nullptr ? 8u : 0u) |
                        (p.may_split ? 16u : 0u) | (p.in_dtype == DType::kBF16 ? 32u : 0u) | (p.out_dtype == DType::kBF16 ? 64u : 0u);
  flags |= alignment_log2(p.a, p.a_stride, p.in_dtype) << 8 | alignment_log2(p.b, p.b_stride, p.in_dtype) << 12 |
           alignment_log2(p.out, p.out_stride, p.out_dtype) << 16;
  return {p.M, p.N, p.K, p.a_stride, p.b_stride, p.out_stride, flags};
}

cudaDataType_t data_type(DType dtype) { return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

/// The library counts in columns, so it computes out^T = b^T a^T: its A is our b.
struct Plan {
  bool exists = false;
  cublasLtMatmulDescOpaque_t desc{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, out{};
  cublasLtMatmulAlgo_t algo{};
};

}  // namespace

struct Blas::Impl {
  explicit Impl(std::shared_ptr<DeviceRuntime> r) : runtime(std::move(r)), lt(Lt::get()), padding(runtime) {
    ::prl::cuda::runtime_of(*runtime).activate();
    check(lt.create(&handle), "cublasLtCreate");
    workspace = runtime->allocate(kWorkspaceBytes);
  }
  ~Impl() {
    runtime->deallocate(workspace, kWorkspaceBytes);
    (void)lt.destroy(handle);
  }

  const Plan& plan_for(const Product& p) {
    const Key key = key_of(p);
    if (const auto found = plans.find(key); found != plans.end()) return found->second;
    if (plans.size() >= kMaxPlans) plans.clear();
    return plans.emplace(key, make_plan(p, key)).first->second;
  }

  Plan make_plan(const Product& p, const Key& key) const {
    Plan plan;
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      check(lt.desc_set(&plan.desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
    };
    check(lt.desc_init(&plan.desc, sizeof plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<std::int32_t>(p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<std::int32_t>(p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_BIAS));
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(CUDA_R_32F));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(p.bias));
    }
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& out, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
      check(lt.layout_init(&out, sizeof out, data_type(dtype), static_cast<std::uint64_t>(cols), static_cast<std::uint64_t>(rows), stride),
            "cublasLtMatrixLayoutInit");
    };
    layout(plan.a, p.in_dtype, p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N, p.b_stride);
    layout(plan.b, p.in_dtype, p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K, p.a_stride);
    layout(plan.out, p.out_dtype, p.M, p.N, p.out_stride);

    cublasLtMatmulPreferenceOpaque_t preference{};
    check(lt.preference_init(&preference, sizeof preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(lt.preference_set(&preference, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<std::uint32_t>(p.may_split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{1} << (key.flags >> 12 & 15u));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{1} << (key.flags >> 8 & 15u));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{1} << (key.flags >> 16 & 15u));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{1} << (key.flags >> 16 & 15u));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status = lt.heuristic(handle, &plan.desc, &plan.a, &plan.b, &plan.out, &plan.out, &preference, 1, &result, &found);
    plan.exists = status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    plan.algo = result.algo;
    return plan;
  }

  void launch(const OpContext& ctx, const Product& p) {
    Plan plan = plan_for(p);
    if (!plan.exists)
      fail(ErrorCode::kNotImplemented, "[cuda] cuBLASLt has no product [{}, {}] x [{}, {}] of {} to {}", p.M, p.K, p.K, p.N,
           to_string(p.in_dtype), to_string(p.out_dtype));
    if (p.bias != nullptr)
      check(lt.desc_set(&plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof p.bias), "cublasLtMatmulDescSetAttribute");
    const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status = lt.matmul(handle, &plan.desc, &one, p.b, &plan.a, p.a, &plan.b, &beta, p.out, &plan.out, p.out, &plan.out,
                                            &plan.algo, workspace, kWorkspaceBytes, stream_of(ctx));
    if (status != CUBLAS_STATUS_SUCCESS)
      fail(ErrorCode::kInternal, "[cuda] cublasLtMatmul of [{}, {}] x [{}, {}]: {}", p.M, p.K, p.K, p.N, lt.status_string(status));
  }

  /// One row goes through the library's vector kernels, which add in another order: it is computed as the first of two.
  void launch_one_row(const OpContext& ctx, const Product& p) {
    const auto in_bytes = static_cast<std::size_t>(p.K) * size_of(p.in_dtype),
               out_bytes = static_cast<std::size_t>(p.N) * size_of(p.out_dtype);
    char* in = nullptr;
    char* out = nullptr;
    const auto carve = [&](void* memory) {
      Carver c(memory);
      in = c.take<char>(2 * static_cast<std::int64_t>(round_up(static_cast<std::int64_t>(in_bytes), 16)));
      out = c.take<char>(2 * static_cast<std::int64_t>(round_up(static_cast<std::int64_t>(out_bytes), 16)));
      return c.used();
    };
    carve(padding.require(carve(nullptr)));
    // Both rows lie as far apart as a dense matrix has them, so that one row and many meet the same alignment.
    runtime->copy_within(in, p.a, in_bytes);
    runtime->copy_within(in + in_bytes, p.a, in_bytes);
    if (p.accumulate) {
      runtime->copy_within(out, p.out, out_bytes);
      runtime->copy_within(out + out_bytes, p.out, out_bytes);
    }
    Product two = p;
    two.M = 2;
    two.a = in;
    two.a_stride = p.K;
    two.out = out;
    two.out_stride = p.N;
    launch(ctx, two);
    runtime->copy_within(p.out, out, out_bytes);
  }

  std::shared_ptr<DeviceRuntime> runtime;
  const Lt& lt;
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  Workspace padding;
  std::unordered_map<Key, Plan, KeyHash> plans;
};

Blas::Blas(std::shared_ptr<DeviceRuntime> runtime) : impl_(std::make_unique<Impl>(std::move(runtime))) {}
Blas::~Blas() = default;

void Blas::run(const OpContext& ctx, const Product& p) {
  if (p.M == 1 && !p.may_split)
    impl_->launch_one_row(ctx, p);
  else
    impl_->launch(ctx, p);
}

bool Blas::can_run(const Product& p) { return impl_->plan_for(p).exists; }

}  // namespace prl::ops::cuda
