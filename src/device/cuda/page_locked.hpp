#pragma once

#include <cstddef>
#include <memory>

namespace prl::cuda {

/// Host memory that GPUs copy to and from directly, for all of them; freed with its last owner. Nullptr with cudaGetLastError() cleared and
/// `why` set where there is none. A GPU is active.
///
/// The driver's own allocation clears and locks page after page by one thread, 2 GB/s where it was measured. Large memory is made of huge
/// pages here, which several threads touch first, and locked then: 19 GB/s.
std::shared_ptr<void> allocate_page_locked(std::size_t bytes, const char*& why);

}  // namespace prl::cuda
