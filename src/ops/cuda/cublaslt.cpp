#include "ops/cuda/cublaslt.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace prl::ops::cuda {

CublasLt::CublasLt() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  std::vector<std::string> places;
  if (const char* path = std::getenv("PRL_CUBLASLT"); path != nullptr && *path != '\0') places.emplace_back(path);
  places.push_back(name);
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const char* root = std::getenv(variable); root != nullptr && *root != '\0') places.push_back(std::string(root) + "/lib64/" + name);
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
  find(algo_check, "cublasLtMatmulAlgoCheck");
  find(algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
  find(desc_init, "cublasLtMatmulDescInit_internal");
  find(desc_set, "cublasLtMatmulDescSetAttribute");
  find(layout_init, "cublasLtMatrixLayoutInit_internal");
  find(preference_init, "cublasLtMatmulPreferenceInit_internal");
  find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(status_string, "cublasLtGetStatusString");
}

const CublasLt& CublasLt::get() {
  static const CublasLt lt;
  return lt;
}

void CublasLt::check(cublasStatus_t status, const char* what) const {
  if (status != CUBLAS_STATUS_SUCCESS) fail(ErrorCode::kInternal, "[cuda] {}: {}", what, status_string(status));
}

}  // namespace prl::ops::cuda
