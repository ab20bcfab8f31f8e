#include "nn/test_support.hpp"
#include "ops/cuda/test_session.hpp"

// The GPU's side of test_support.hpp.

namespace prl::nn::testing_support {

TestSession::TestSession(int num_threads) : session(ops::testing::make_visible_cuda_runtime(), num_threads) {
  session.context().table = &ops::testing::waiting_cuda_table();
}

}  // namespace prl::nn::testing_support
