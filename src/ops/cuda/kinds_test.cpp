#include "ops/cuda/test_session.hpp"
#include "ops/test_support.hpp"

// The GPU's side of test_support.hpp.

namespace prl::ops::testing {

Kind default_kind() {
  Kind cuda;
  cuda.is_cuda = true;
  return cuda;
}
std::vector<Kind> available_kinds() { return {default_kind()}; }
std::shared_ptr<DeviceRuntime> make_runtime(Kind) { return make_visible_cuda_runtime(); }
const OpTable& table_of(Kind) { return waiting_cuda_table(); }

}  // namespace prl::ops::testing
