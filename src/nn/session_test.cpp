#include "nn/test_support.hpp"

// The CPU's side of test_support.hpp; that of the GPU is cuda/session_test.cpp.

namespace prl::nn::testing_support {

TestSession::TestSession(int num_threads) : session(make_cpu_runtime(), num_threads) {}

}  // namespace prl::nn::testing_support
