#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/thread_pool.hpp"
#include "tensor/tensor.hpp"

namespace prl::ops {

struct OpTable;

/// Scratch memory of ops, valid for one call; grows to the largest request during warm-up.
class Workspace {
 public:
  explicit Workspace(std::shared_ptr<DeviceRuntime> runtime) : runtime_(std::move(runtime)) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  /// At least `bytes`, 64-byte aligned, contents undefined, valid until the next call.
  void* require(std::size_t bytes);
  std::size_t capacity() const noexcept { return capacity_; }
  /// Changes whenever the memory moves.
  std::uint64_t generation() const noexcept { return generation_; }

 private:
  std::shared_ptr<DeviceRuntime> runtime_;
  void* data_ = nullptr;
  std::size_t capacity_ = 0;
  std::uint64_t generation_ = 0;
};

/// Where and how ops run. One per role thread; never shared by two threads at once. Passed first to every op.
struct OpContext {
  std::shared_ptr<DeviceRuntime> runtime;
  ThreadPool* pool = nullptr;  ///< CPU bodies only
  Workspace* workspace = nullptr;
  const OpTable* table = nullptr;  ///< the bodies of runtime->device()
  void* stream = nullptr;          ///< cudaStream_t of CUDA bodies
  void* library = nullptr;         ///< what the device's bodies keep between calls: handles, plans
  /// Autotune: kernels are timed against each other when a size is used for the first time, which stalls the device. Where sizes vary it is
  /// off, and a size is tuned once it has been used often. Results do not depend on it.
  bool may_measure = true;
};

/// Which kernels compute there, in words ("the avx512 kernels of a CPU"): where it says the same, they round in the same way.
std::string kernels_of(const DeviceRuntime& runtime);

/// Owns what an OpContext points to.
class OpSession {
 public:
  /// Bodies for `runtime`'s device. `num_threads` as in ThreadPool. Error{kNotImplemented} if this build has none for it.
  OpSession(std::shared_ptr<DeviceRuntime> runtime, int num_threads);
  ~OpSession();
  OpContext& context() noexcept { return context_; }
  ThreadPool& pool() noexcept { return *pool_; }

 private:
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Workspace> workspace_;
  std::shared_ptr<void> library_;
  OpContext context_;
};

}  // namespace prl::ops
