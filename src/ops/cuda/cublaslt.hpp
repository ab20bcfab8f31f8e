#pragma once

#include <cublasLt.h>

namespace prl::ops::cuda {

/// The functions of cuBLASLt that are used, found at run time.
struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) algo_check = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_get = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) desc_init = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;

  /// Opens the library at the first call. Error{kUnavailable} saying where it was looked for.
  static const CublasLt& get();
  /// Error{kInternal} unless `status` is success.
  void check(cublasStatus_t status, const char* what) const;

 private:
  CublasLt();
};

}  // namespace prl::ops::cuda
